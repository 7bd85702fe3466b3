"""Training of drafts: distilled models, DSpark drafts and EAGLE-3 drafts, offline or on policy."""
