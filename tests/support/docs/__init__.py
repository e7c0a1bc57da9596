"""The shell blocks of the documentation pages, and the parsers of their commands."""
