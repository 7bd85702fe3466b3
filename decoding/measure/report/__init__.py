"""Views of a report (see `decoding.measure.evaluate`): tables for the terminal and Markdown, and an HTML page."""
