"""Real vLLM servers, and what asks them."""
