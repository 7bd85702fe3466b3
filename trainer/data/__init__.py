"""Turns rows into conversations, token ids with a loss mask, and batches."""
