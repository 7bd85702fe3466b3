"""Views of a report (see `decoding.measure.measurement`): tables for the terminal and Markdown, and an HTML page."""
