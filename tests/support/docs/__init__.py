"""The shell blocks of the pages, and who parses their commands."""
