"""The path from rows to conversations, to token ids with a loss mask, and to batches."""
