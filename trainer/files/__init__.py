"""Folders and files written whole or not at all, locks, and formats that servers misread."""
