"""Models by name, on this machine or on the Hub, and the checked contents of their files: weights and configs."""
