"""Who must give up what when a limited thing (places, or memory for block keys) is full: by shares of tenants and classes. Pure.

A share limits nobody while there is room. When there is none, an arrival gets room from the first of these, if any:

1. A tenant that has more than a tenant's share, if the arrival's tenant stays within it: what is of its lowest class first.
2. A class that has more than each class keeps, from the lowest one on: a lower class than the arrival's; or a higher one, if the
   arrival's class stays within what it keeps. If the arrival's tenant is beyond its share, this rule is for its own requests.
3. Lower classes of the tenant that has most, if it has more than its share, and more than the arrival's tenant would have.
4. The tenant that has most of the arrival's class for its weight, if it has more than the arrival's tenant would have.

So nobody keeps more than a share while another one within its share wants room, and two arrivals never displace each other in
turn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from pointsman_router.core.priority import PRIORITIES

# A tenant, in whatever is shared.
Party = TypeVar("Party", bound=Hashable)

# All classes together, as the level of a sum.
ALL = -1
LEVELS = sorted(priority.level for priority in PRIORITIES)


class Shares(Generic[Party]):
    """What parties have of `limit` units, by class (level). `tenant_share`: the part of it, 0 to 1, that is a tenant's share (at
    least one unit); `class_share`: the part that each class keeps, rounded down. Changes cost O(log parties), and a shift within
    a list of references."""

    def __init__(self, limit: int, tenant_share: float, class_share: float) -> None:
        self.limit = limit
        self._most = max(int(limit * tenant_share), 1)
        self._class_share = class_share
        self._of: Counter[tuple[int, Party]] = Counter()
        self._of_level: Counter[int] = Counter()
        # Level -> (units for its weight, number of the party), ascending. Parties are numbered since they need not be comparable.
        self._ranked: dict[int, list[tuple[float, int]]] = {}
        self._weights: dict[Party, float] = {}
        self._numbers: dict[Party, int] = {}
        self._parties: dict[int, Party] = {}
        self._numbered = 0

    @property
    def used(self) -> int:
        """The units that all have."""
        return self._of_level[ALL]

    def add(self, level: int, party: Party, units: int, weight: float = 1.0) -> None:
        """Give a party `units` more, or fewer if negative. Its weight is that of its first units. Mutates."""
        if not units:
            return
        if party not in self._numbers:
            self._numbered += 1
            self._numbers[party], self._parties[self._numbered] = self._numbered, party
            self._weights[party] = weight
        for of in (level, ALL):
            self._change(of, party, units)
        if not self._of[ALL, party]:
            del self._parties[self._numbers.pop(party)], self._of[ALL, party], self._weights[party]

    def _change(self, level: int, party: Party, units: int) -> None:
        ranked, number, weight = self._ranked.setdefault(level, []), self._numbers[party], self._weights[party]
        before = self._of[level, party]
        if before:
            del ranked[bisect_left(ranked, (before / weight, number))]
        after = self._of[level, party] = before + units
        if after:
            insort(ranked, (after / weight, number))
        elif level != ALL:
            del self._of[level, party]
        self._of_level[level] += units

    def missing(self, units: int) -> int:
        """Return how many units others must give up before `units` more fit; 0 if they fit."""
        return max(self.used + units - self.limit, 0)

    def givers(self, level: int, party: Party, units: int, weight: float = 1.0) -> Iterator[tuple[int, Party]] | None:
        """Return the parties, each with a level, that give up what is missing for an arrival of `units`, in this order; together
        they have enough. None: nobody has to, so the arrival gets no room."""
        missing = self.missing(units)
        own = self._of[ALL, party] + units
        within = own <= self._most
        most = self._parties[self._ranked[ALL][-1][1]] if self._ranked.get(ALL) else party
        has_more = most != party and self._of[ALL, most] > max(self._most, own)
        if has_more and within:
            return iter([(of, most) for of in LEVELS])
        if (other := self._giving_class(level, party, units, missing, within=within)) is not None:
            return self._all_in(other) if within else iter([(other, party)])
        if has_more and sum(self._of[of, most] for of in LEVELS if of < level) >= missing:
            return iter([(of, most) for of in LEVELS if of < level])
        if ranked := self._ranked.get(level):
            for_its_weight, number = ranked[-1]
            most = self._parties[number]
            enough = self._of[level, most] >= missing
            if enough and for_its_weight > (self._of[level, party] + units) / self._weights.get(party, weight):
                return iter([(level, most)])
        return None

    def _giving_class(self, level: int, party: Party, units: int, missing: int, *, within: bool) -> int | None:
        kept = int(self._class_share * (self.limit if within else self._most))

        def has(of: int) -> int:
            return self._of_level[of] if within else self._of[of, party]

        for other in LEVELS:
            if other != level and has(other) - kept >= missing and (other < level or has(level) + units <= kept):
                return other
        return None

    def _all_in(self, level: int) -> Iterator[tuple[int, Party]]:
        return ((level, self._parties[number]) for _, number in reversed(self._ranked[level]))

    def check_invariants(self) -> None:
        """Raise AssertionError if a sum is not that of its parts, or the limit is exceeded."""
        assert 0 <= self.used <= self.limit
        parts = {key: units for key, units in self._of.items() if key[0] != ALL}
        assert all(units > 0 for units in parts.values())
        sums: Counter[tuple[int, Party]] = Counter()
        levels: Counter[int] = Counter()
        for (level, party), units in parts.items():
            sums[ALL, party] += units
            levels[level] += units
            levels[ALL] += units
        assert +self._of == Counter(parts) + sums
        assert +self._of_level == levels
        for level, ranked in self._ranked.items():
            expected = [
                (units / self._weights[party], self._numbers[party])
                for (of, party), units in (+self._of).items()
                if of == level
            ]
            assert ranked == sorted(expected)
        assert self._numbers.keys() == self._weights.keys() == {party for _, party in parts}
