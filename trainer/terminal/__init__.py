"""Output to the terminal: consoles, progress bars, streamed texts and exit codes."""
