"""One interface to all transformers models, and the drafts and heads that read a model's states."""
