"""Names of methods that an evaluation writes and its report reads."""

PLAIN = "plain"
"""Plain decoding in this project's loop, which every speed-up is over."""
TRANSFORMERS = "transformers generate"
ARGMAX_DRAFTS = ", argmax drafts"
"""Ending of a twin's name: its drafts are argmaxes where its drafter samples them, and it is not timed."""
