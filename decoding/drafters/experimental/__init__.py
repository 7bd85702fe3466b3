"""Drafters that no table shows to be faster than the others: kept small, and lossless like all."""
