"""Training of distilled drafts."""
