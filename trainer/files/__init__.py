"""Folders and files that are written whole or not at all, locks, and model folders for transformers 4 and 5."""
