"""Prompts and methods to figures: evaluation, its peers and its reports."""
