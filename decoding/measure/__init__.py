"""Measures methods of decoding on prompts: the evaluation, other software to compare with, and reports of the figures."""
