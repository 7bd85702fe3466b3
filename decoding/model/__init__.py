"""One transformers model behind one call, with its cache, its attention and what is read from disk."""
