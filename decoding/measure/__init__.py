"""From prompts and methods to figures: the evaluation, other software as peers, and reports."""
