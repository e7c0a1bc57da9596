"""One module's rules: by example, and for every input."""
