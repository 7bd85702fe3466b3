"""Objective protocol, losses and teachers."""
