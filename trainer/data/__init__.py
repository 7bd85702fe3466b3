"""Rows to conversations, to token ids with a loss mask, to batches."""
