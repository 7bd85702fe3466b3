"""Speculative decoding for transformers models: drafters, acceptance rules, one loop, and its measurement."""
