"""Checks of the documentation against the repository."""
