"""A budget of bytes that all requests of a process share, and the part of it that one request holds."""

from __future__ import annotations

# A client that holds bytes may hold at most SHARE times the free bytes: alone, three quarters of the budget.
SHARE = 3


class MemoryBudget:
    """`limit` bytes for all clients together. A client that already holds bytes may hold at most SHARE times the bytes that
    remain free, so that no client can lock out the others (dynamic thresholds: Choudhury and Hahne, 1998)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._by_holder: dict[bytes, int] = {}

    def has_room(self, holder: bytes, more: int) -> bool:
        """Whether `holder` may hold `more` additional bytes. An empty `holder` is limited only by the budget."""
        free = self.limit - self.used - more
        held = self._by_holder.get(holder, 0)
        return free >= 0 and (not held or held + more <= SHARE * free)

    def count(self, holder: bytes, more: int) -> None:
        """Add `more` bytes to what `holder` holds; a negative number releases bytes. Mutates."""
        self.used += more
        if holder:
            held = self._by_holder.pop(holder, 0) + more
            if held:
                self._by_holder[holder] = held


class Holding:
    """The bytes of a budget that one request holds for the client `holder`."""

    __slots__ = ("_budget", "holder", "size")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.holder = b""
        self.size = 0

    @property
    def limit(self) -> int:
        """Size of the whole budget, bytes."""
        return self._budget.limit

    def take(self, more: int) -> bool:
        """Hold `more` additional bytes; return False, without a change, if the budget has no room. Mutates."""
        if not self._budget.has_room(self.holder, more):
            return False
        self._budget.count(self.holder, more)
        self.size += more
        return True

    def let_go(self) -> None:
        """Release all held bytes. Mutates."""
        self._budget.count(self.holder, -self.size)
        self.size = 0
