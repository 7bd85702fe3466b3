"""Text on the terminal: consoles, progress bars, and the silencing of other libraries."""
