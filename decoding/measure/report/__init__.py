"""Views of a report from `decoding.measure.measurement`: tables for terminal and Markdown, and an HTML page."""
