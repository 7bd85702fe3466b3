"""Folders and files that are written whole or not at all, locks, and formats that servers misread."""
