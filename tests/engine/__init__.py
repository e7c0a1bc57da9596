"""Tests on a real vLLM."""
