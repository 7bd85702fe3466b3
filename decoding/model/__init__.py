"""A transformers model with one way to call it: its cache, its attention, its heads, and its files on disk."""
