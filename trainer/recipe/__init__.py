"""Typed recipes, and their reading from YAML."""
