"""A transformers model with one way to call it, and the drafts and heads that read its states."""
