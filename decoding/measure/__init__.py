"""Measures methods of decoding on prompts: evaluations, other software for comparison, and reports of the figures."""
