"""Limits the instances that a request may go to if some instances of its pool have a weight below 1. Pure.

A weight is a part of the instance's fair share, which is 1 / n of the new sessions with n placeable instances. With weight w the
instance gets w / n of them. A session's hash falls on one weighted instance, or on none:

    |-- w1 / n --|-- w2 / n --|------------------- the others -------------------|
    0                                                                            1

If it falls on an instance, the session goes there whatever the policy's formula says. Otherwise a formula that prefers the least
loaded instance would give an instance with a small weight, which is idle, all sessions that it may get. A formula that prefers
cached prompts would give it none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from sys import float_info

from xxhash import xxh3_64_intdigest

from pointsman_router.core.placement_types import Candidate

CANARY = "canary"
# Minimum weights of the instances for a request that no weighted instance draws, tried in this order: instances of full weight,
# then those that accept new sessions, then all. So a weight never makes a request wait or fail.
LEAST_WEIGHTS = (1.0, float_info.min, 0.0)


class SessionShares:
    """The weights of the instances of a pool that answer to one name. `members`: (id, weight, whether it only produces KV) of the
    placeable instances, in the same order on all replicas. Shares are computed separately for the instances that only produce
    KV."""

    def __init__(self, members: Sequence[tuple[str, float, bool]]) -> None:
        self._weights = {name: weight for name, weight, _ in members if weight < 1.0}
        # For each kind (produces KV only or not): the kind, its weighted instances, and the ends of their shares.
        self._shares: list[tuple[bool, list[str], list[float]]] = []
        for kind in (False, True):
            alike = [weight for _, weight, produces_only in members if produces_only is kind]
            weighted = [
                (name, weight / len(alike))
                for name, weight, produces_only in members
                if produces_only is kind and weight < 1.0
            ]
            if weighted:
                self._shares.append(
                    (kind, [name for name, _ in weighted], list(accumulate(weight for _, weight in weighted)))
                )

    def __bool__(self) -> bool:
        return bool(self._weights)

    def weight(self, instance_id: str) -> float:
        """Return the instance's weight, 0 to 1."""
        return self._weights.get(instance_id, 1.0)

    def drawn(self, pool: str, session: str) -> tuple[str, ...]:
        """Return the weighted instances, at most one of each kind, that `session` goes to if it is new. `session`: the session's
        name, or the id of a request without a session. The result is the same in all processes."""
        found = []
        for kind, names, ends in self._shares:
            point = xxh3_64_intdigest(f"{pool}\n{kind}\n{session}".encode()) / 2**64
            if (at := bisect_right(ends, point)) < len(names):
                found.append(names[at])
        return tuple(found)

    def withheld(self, candidates: Iterable[Candidate], drawn: Sequence[str], owner: str) -> set[str]:
        """Return the candidates that the request must not go to because of their weights. If the session's `owner` is placeable,
        the session is not new: it may stay there, and goes to no other weighted instance."""
        placeable = [candidate for candidate in candidates if not candidate.excluded]
        withheld: set[str] = set()
        for kind in (False, True):
            alike = [candidate.instance_id for candidate in placeable if candidate.produces_only is kind]
            chosen = [] if owner in alike else [name for name in alike if name in drawn]
            withheld.update(set(alike).difference(chosen or self._of_most_weight(alike, owner)))
        return withheld

    def _of_most_weight(self, names: Sequence[str], owner: str) -> list[str]:
        for least in LEAST_WEIGHTS:
            if found := [name for name in names if self.weight(name) >= least or name == owner]:
                return found
        return []
