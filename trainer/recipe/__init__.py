"""Typed recipes, one file per kind, and their reading from YAML."""
