"""Drafters that are the fastest in no table of the results; they are small, and lossless like all others."""
