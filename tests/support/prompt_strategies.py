"""Prompts with common beginnings, for tests of caches and schedulers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


def prompts(shared_tokens: Sequence[int], lengths: st.SearchStrategy[int], most: int) -> st.SearchStrategy[list[int]]:
    """Draw prompts of `lengths` tokens, `most` at most. Each begins with `shared_tokens` tokens of one of two texts."""
    return st.builds(
        lambda shared, cut, own, length: ([shared] * cut + [own] * most)[:length],
        st.integers(1, 2),
        st.sampled_from(shared_tokens),
        st.integers(3, 5),
        lengths,
    )
