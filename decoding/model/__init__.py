"""A transformers model behind one call: its cache, its attention, its heads, and its files on disk."""
