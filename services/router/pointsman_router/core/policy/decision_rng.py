"""The random numbers of a decision, which follow from its id so that the decision can be made again. Pure."""

from __future__ import annotations

import random
from functools import cached_property
from typing import cast

from xxhash import xxh3_64_intdigest


class _Late:
    """A random.Random that is created at its first use: seeding takes 13 us, and few policies draw."""

    def __init__(self, decision_id: str) -> None:
        self._decision_id = decision_id

    @cached_property
    def _rng(self) -> random.Random:
        return random.Random(xxh3_64_intdigest(self._decision_id.encode()))

    def __getattr__(self, name: str) -> object:
        return getattr(self._rng, name)


def rng_of(decision_id: str) -> random.Random:
    """Return the random number generator of a decision."""
    return cast(random.Random, _Late(decision_id))
