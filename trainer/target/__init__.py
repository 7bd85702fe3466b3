"""The frozen target: how it is loaded, and its states and logits, computed when needed or stored on disk."""
