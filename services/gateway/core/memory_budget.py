"""A budget of bytes that all requests of a process share, and what one request holds of it."""

from __future__ import annotations

SHARE = 3  # alone, a client gets three quarters


class MemoryBudget:
    """`limit` bytes for all clients together. A client that holds some already may hold SHARE times what stays free, so that none
    keeps the others out (dynamic thresholds: Choudhury and Hahne, 1998)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._by_holder: dict[bytes, int] = {}

    def has_room(self, holder: bytes, more: int) -> bool:
        """Whether `holder` may hold `more` bytes than it does; an empty name is nobody's in particular."""
        free = self.limit - self.used - more
        held = self._by_holder.get(holder, 0)
        return free >= 0 and (not held or held + more <= SHARE * free)

    def count(self, holder: bytes, more: int) -> None:
        """`holder` holds `more` bytes; fewer than none were let go. Mutates."""
        self.used += more
        if holder:
            held = self._by_holder.pop(holder, 0) + more
            if held:
                self._by_holder[holder] = held


class Holding:
    """What one request holds of a budget, for the client `holder`."""

    __slots__ = ("_budget", "holder", "size")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.holder = b""
        self.size = 0

    @property
    def limit(self) -> int:
        """How much there is for all."""
        return self._budget.limit

    def take(self, more: int) -> bool:
        """Hold `more` bytes; False, and as many as before, where there is no room. Mutates."""
        if not self._budget.has_room(self.holder, more):
            return False
        self._budget.count(self.holder, more)
        self.size += more
        return True

    def let_go(self) -> None:
        """Hold nothing. Mutates."""
        self._budget.count(self.holder, -self.size)
        self.size = 0
