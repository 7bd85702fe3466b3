"""Folders, weights and configs: models by name, here or on the Hub, and the checked contents of their files."""
