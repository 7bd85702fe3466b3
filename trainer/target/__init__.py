"""The frozen target: loading it, and its states and logits, online or on disk."""
