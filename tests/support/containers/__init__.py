"""A Docker engine for tests, and the project's images and compose files in it."""
