"""Typed recipes, with one file per kind, and how they are read from YAML."""
