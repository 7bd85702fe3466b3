"""Training of drafts: distilled models and DSpark drafts, offline or on policy."""
