"""Names of methods that measuring gives and that reports know again."""

PLAIN = "plain"
ARGMAX_DRAFTS = ", argmax drafts"
"""Ending of a twin's name: its drafts are the likeliest tokens where the method before it draws them. Not timed."""
