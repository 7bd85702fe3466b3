"""Checks of this machine, of the installed packages, and of a target with its drafters: each returns a finding."""
