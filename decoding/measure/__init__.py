"""Measurement of methods on prompts: the evaluation, other software as peers, and reports of the figures."""
