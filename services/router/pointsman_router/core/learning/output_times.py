"""Learns how long engines take for an output token, from streamed answers that ended well. Pure; times in s."""

from __future__ import annotations

from math import exp

# What is assumed before anything is learned, s.
FIRST_TOKEN_S = 0.025
# The share of answers that take at most the learned time for a token, and the step of its logarithm. The quantile is found by
# stochastic approximation (Robbins and Monro, 1951): each answer moves it by the step, up in the proportion of the share, so that
# one which a client has read slowly counts no more than any other.
SHARE, STEP = 0.9, 0.1
# What an answer may take in multiples of the learned time: its batch may be larger than theirs.
MARGIN = 2.0
# Minimum and maximum that are learned, s.
LEAST_S, MOST_S = 1e-4, 10.0


class OutputTimes:
    """A time for each pool and kind of hardware."""

    def __init__(self) -> None:
        self._token_s: dict[tuple[str, str], float] = {}

    def token_s(self, pool: str, hardware: str) -> float:
        """Return in what time a token comes after the one before, with a margin."""
        return MARGIN * self._token_s.get((pool, hardware), FIRST_TOKEN_S)

    def answered(self, pool: str, hardware: str, seconds: float, tokens: int) -> None:
        """Record that `tokens` tokens after an answer's first took `seconds`. Mutates."""
        if tokens <= 0 or seconds <= 0.0:
            return
        before = self._token_s.get((pool, hardware), FIRST_TOKEN_S)
        step = SHARE if seconds / tokens > before else SHARE - 1.0
        self._token_s[pool, hardware] = min(max(before * exp(STEP * step), LEAST_S), MOST_S)

    def forget_pool(self, pool: str) -> None:
        """Drop what was learned of `pool`. Mutates."""
        for key in [key for key in self._token_s if key[0] == pool]:
            del self._token_s[key]
