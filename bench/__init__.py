"""Benchmarks. `make bench` runs all short ones, prints a table and appends one JSON object per figure to bench/results.jsonl."""
