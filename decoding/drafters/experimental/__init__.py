"""Drafters that are not the fastest in any table of results. Their code is short, and they are as lossless as all other
drafters.
"""
