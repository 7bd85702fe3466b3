"""How rows become conversations, then token ids with a loss mask, and finally batches."""
