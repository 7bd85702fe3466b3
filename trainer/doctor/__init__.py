"""Checks of the machine, installed packages, a target and its drafters; each returns a finding."""
