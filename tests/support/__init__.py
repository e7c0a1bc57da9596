"""What tests and benchmarks share: fakes, processes, engines, each once."""
