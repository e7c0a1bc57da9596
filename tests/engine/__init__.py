"""That all of it is true of a real vLLM."""
