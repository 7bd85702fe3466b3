"""Folders and files that appear whole or not at all, and locks on them."""
