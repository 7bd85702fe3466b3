"""Typed recipes: one file per kind, their union, and their reading from YAML."""
