"""Finds models by name, on this machine or on the Hub, and reads and checks their files: weights and configs."""
