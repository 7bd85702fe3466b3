"""Views of a report (`decoding.measure.measurement`): tables for terminal and Markdown, and an HTML page."""
