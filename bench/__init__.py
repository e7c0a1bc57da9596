"""Benchmarks: `make bench` runs all, prints a table and appends one JSON object a figure to bench/results.jsonl."""
