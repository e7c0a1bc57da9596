"""Helpers that tests and benchmarks share: fakes, processes and engines."""
