"""Names of methods that an evaluation writes and its report reads."""

PLAIN = "plain"
"""Plain decoding in this project's loop, which every speed-up is over."""
TRANSFORMERS = "transformers generate"
