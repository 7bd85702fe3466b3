"""Drafters that are not the fastest in any table of results. They are small, and as lossless as all others."""
