"""Which instances a request may go to where some of its pool have a weight below 1. Pure.

A weight is a part of the instance's fair share, which is 1 / n of the new sessions where n instances are placeable: with weight w
it gets w / n of them. A session's hash falls on one weighted instance, or on none:

    |-- w1 / n --|-- w2 / n --|------------------- the others -------------------|
    0                                                                            1

Where it falls on one, the session goes there whatever the policy's formula: a formula that prefers the least loaded would give an
instance with a small weight, which is idle, all that it may have, and one that prefers cached prompts nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from sys import float_info

from xxhash import xxh3_64_intdigest

from pointsman.router.core.types import Candidate

CANARY = "canary"
# Whoever is not drawn by an instance goes to those of full weight; without any to those that take new sessions; without any of
# these to whatever there is: a weight has no request wait or fail.
LEAST_WEIGHTS = (1.0, float_info.min, 0.0)


class SessionShares:
    """The weights among the instances of a pool that answer to one name. `members` are the placeable ones, in an order that all
    replicas have: id, weight, and whether it only computes KV for others. Those that do have shares of their own."""

    def __init__(self, members: Sequence[tuple[str, float, bool]]) -> None:
        self._weights = {name: weight for name, weight, _ in members if weight < 1.0}
        # Of each kind: which kind, the weighted instances, and where the share of each ends.
        self._lines: list[tuple[bool, list[str], list[float]]] = []
        for kind in (False, True):
            alike = [weight for _, weight, produces_only in members if produces_only is kind]
            weighted = [
                (name, weight / len(alike))
                for name, weight, produces_only in members
                if produces_only is kind and weight < 1.0
            ]
            if weighted:
                self._lines.append((kind, [name for name, _ in weighted], list(accumulate(one for _, one in weighted))))

    def __bool__(self) -> bool:
        return bool(self._weights)

    def weight(self, instance_id: str) -> float:
        """The instance's weight, 0 to 1."""
        return self._weights.get(instance_id, 1.0)

    def drawn(self, pool: str, session: str) -> tuple[str, ...]:
        """The weighted instances, at most one of each kind, that `session` goes to if it is a new one. `session` is its name, or
        that of a request without one. Equal for equal arguments, in any process."""
        found = []
        for kind, names, ends in self._lines:
            point = xxh3_64_intdigest(f"{pool}\n{kind}\n{session}".encode()) / 2**64
            if (at := bisect_right(ends, point)) < len(names):
                found.append(names[at])
        return tuple(found)

    def withheld(self, candidates: Iterable[Candidate], drawn: Sequence[str], owner: str) -> set[str]:
        """Which candidates the request must not go to for their weights. A session that lives on `owner` is not new where that is
        placeable, and may stay; it goes to no other weighted instance."""
        placeable = [one for one in candidates if not one.excluded]
        withheld: set[str] = set()
        for kind in (False, True):
            alike = [one.instance_id for one in placeable if one.produces_only is kind]
            chosen = [] if owner in alike else [name for name in alike if name in drawn]
            withheld.update(set(alike).difference(chosen or self._of_most_weight(alike, owner)))
        return withheld

    def _of_most_weight(self, names: Sequence[str], owner: str) -> list[str]:
        for least in LEAST_WEIGHTS:
            if found := [name for name in names if self.weight(name) >= least or name == owner]:
                return found
        return []
