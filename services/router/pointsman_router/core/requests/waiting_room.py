"""All requests that wait in the router: at which stage, within which limits, and who leaves. Pure; times in s on one clock.

There are two stages. A request of a new session is parked until the session is admitted (parked_requests.py); a held one waits
for the policy or for room on an instance (place_or_hold.py). Each stage has its queue, with an order and places of its own, and
both share the memory for block keys.

Thousands may have to leave at once, because their gateway or their pool is lost. They leave in parts (`next_to_leave`), and
nothing is placed from the queues of their pools meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from pointsman_router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman_router.core.requests.shares import Shares

# Maximum number of block keys of all waiting prompts together, 8 bytes each. 256 MB hold 4,096 prompts of 131,072 tokens.
MAX_KEYS = 32_000_000
# Parts of the keys that one tenant of one pool may have while others want to wait, and that each class keeps.
TENANT_SHARE, CLASS_SHARE = 0.25, 0.1
NO_MEMORY = "the prompts that wait take all memory that they may"


class WaitingRoom:
    """The waiting requests by id, stage and gateway. `held`, `parked`: the queues; only this class adds to them and removes from
    them."""

    def __init__(self, held: QueueSettings, parked: QueueSettings, max_keys: int = MAX_KEYS) -> None:
        self.held = HoldQueue(held)
        self.parked = HoldQueue(parked)
        # Shares of (pool, tenant).
        self._keys: Shares[tuple[str, str]]
        self._of_gateway: dict[str, dict[str, None]] = {}
        # Request id -> why it leaves (empty: nobody waits for an answer), and how many leave in each pool.
        self._leaving: dict[str, str] = {}
        self._leaving_of: dict[str, int] = {}
        self.limit_keys(max_keys)

    def limit_keys(self, max_keys: int) -> None:
        """Set the maximum number of block keys. Mutates; nothing may wait."""
        assert not len(self)
        self._keys = Shares(max_keys, TENANT_SHARE, CLASS_SHARE)

    def __len__(self) -> int:
        return len(self.held) + len(self.parked)

    def __iter__(self) -> Iterator[HeldRequest]:
        return chain(self.held, self.parked)

    def get(self, request_id: str) -> HeldRequest | None:
        """Return the waiting request with this id, or None."""
        return self.held.get(request_id) or self.parked.get(request_id)

    def count(self, pool: str) -> int:
        """Return how many requests wait in a pool."""
        return self.held.count(pool) + self.parked.count(pool)

    # ---- entering and leaving ----

    def displaced_by(self, held: HeldRequest) -> tuple[list[HeldRequest], str]:
        """Return the requests that must leave before `held` may wait, and why it may not wait (empty if it may)."""
        queue, request = self._queue(held), held.request
        level, keys = request.priority.level, len(request.keys)
        leaving: dict[str, HeldRequest] = {}
        # The limits are checked one after another, and what gives up its place gives up its keys, too.
        by_keys = (
            self._keys.givers(level, (held.pool, queue.party(held)), keys, request.weight)
            if self._keys.missing(keys)
            else ()
        )
        if by_keys is None:
            return [], NO_MEMORY
        places = queue.shares(held.pool)
        if places.missing(1):
            by_place = places.givers(level, queue.party(held), 1, request.weight)
            last_ones = (last for of, party in by_place or () for last in queue.last(held.pool, of, party))
            if (first := next(last_ones, None)) is None:
                size = places.limit
                return [], f"{size} requests wait already" if size else "no queue"
            leaving[first.request.request_id] = first
        missing = self._keys.missing(keys) - sum(len(gone.request.keys) for gone in leaving.values())
        last_ones = (
            last
            for of, (pool, party) in by_keys
            for last in chain(self.parked.last(pool, of, party), self.held.last(pool, of, party))
        )
        while missing > 0 and (last := next(last_ones, None)) is not None:
            if last.request.request_id not in leaving:
                leaving[last.request.request_id] = last
                missing -= len(last.request.keys)
        if missing > 0:
            return [], NO_MEMORY
        return list(leaving.values()), ""

    def enter(self, held: HeldRequest) -> None:
        """Let a request wait, for which there is room. Mutates."""
        self._queue(held).add(held)
        self._count_keys(held, 1)
        self._of_gateway.setdefault(held.gateway_id, {})[held.request.request_id] = None

    def change(self, held: HeldRequest) -> None:
        """Replace the waiting request with the same id, stage, pool and tenant. Mutates."""
        request_id = held.request.request_id
        before = self.get(request_id)
        assert before is not None
        if held.gateway_id != before.gateway_id:
            self._forget_gateway(before)
            self._of_gateway.setdefault(held.gateway_id, {})[request_id] = None
        self._queue(held).update(held)

    def remove(self, request_id: str) -> HeldRequest | None:
        """Remove a request that was not placed and return it; None if it does not wait. Mutates."""
        held = self.held.remove(request_id) or (self.parked.remove(request_id) if len(self.parked) else None)
        if held is not None:
            self._forget(held)
        return held

    def served(self, request_id: str, cost: int) -> None:
        """Remove a request that was placed, or whose session is admitted, and charge its tenant with `cost` tokens. Mutates."""
        held = self.get(request_id)
        assert held is not None
        self._queue(held).answered(request_id, cost)
        self._forget(held)

    # ---- leaving in parts ----

    def drop_gateway(self, gateway_id: str, keep: Collection[str] = ()) -> None:
        """Have a gateway's requests leave, except `keep`, because its stream ended or began anew: it asks again for the others.
        Mutates; O(its requests)."""
        for request_id in list(self._of_gateway.get(gateway_id, ())):
            if request_id in keep:
                self.stays(request_id)
            else:
                self.leave_soon((request_id,))

    def drop_pool(self, pool: str, why: str) -> None:
        """Have the requests of a pool leave, so that their gateways ask its owner. Mutates; O(waiting requests)."""
        self.leave_soon([held.request.request_id for held in self if held.pool == pool], why)

    def leave_soon(self, request_ids: Iterable[str], why: str = "") -> None:
        """Have waiting requests leave in parts. `why`: for those who wait for the answers; empty: nobody does. Mutates; some
        0.1 us per request."""
        for request_id in request_ids:
            if (held := self.get(request_id)) is None:
                continue
            if request_id not in self._leaving:
                self._leaving_of[held.pool] = self._leaving_of.get(held.pool, 0) + 1
            self._leaving[request_id] = why

    def stays(self, request_id: str) -> None:
        """Let a request wait on that was to leave without an answer, because its gateway asks again. One that is to be answered
        leaves: its pool is lost, whatever its gateway knew of that. Mutates."""
        if self._leaving.get(request_id) == "":
            del self._leaving[request_id]
            held = self.get(request_id)
            assert held is not None
            self._left(held)

    @property
    def leaving(self) -> bool:
        """Whether requests are still to leave."""
        return bool(self._leaving)

    def is_leaving(self, request_id: str) -> bool:
        """Return whether a request is still to leave."""
        return request_id in self._leaving

    def why_leaving(self, request_id: str) -> str | None:
        """Return why a request is still to leave, as in `leave_soon`; None if it is not."""
        return self._leaving.get(request_id)

    def leaves(self, pool: str) -> bool:
        """Return whether requests of a pool are still to leave, so that nothing may be placed from its queues."""
        return pool in self._leaving_of

    def next_to_leave(self, most: int) -> list[tuple[HeldRequest, str]]:
        """Return the next requests that leave, and why. They are still to be removed."""
        leaving = [(self.get(request_id), why) for request_id, why in islice(self._leaving.items(), most)]
        return [(held, why) for held, why in leaving if held is not None]

    def check_invariants(self) -> None:
        """Raise AssertionError if the queues and what they share disagree."""
        self.held.check_invariants()
        self.parked.check_invariants()
        self._keys.check_invariants()
        assert self._keys.used == sum(len(held.request.keys) for held in self)
        by_gateway: dict[str, set[str]] = {}
        for held in self:
            by_gateway.setdefault(held.gateway_id, set()).add(held.request.request_id)
            assert held.parked is (self.parked.get(held.request.request_id) is held)
        assert by_gateway == {gateway_id: set(ids) for gateway_id, ids in self._of_gateway.items()}
        leaving: dict[str, int] = {}
        for request_id in self._leaving:
            leaver = self.get(request_id)
            assert leaver is not None, request_id
            leaving[leaver.pool] = leaving.get(leaver.pool, 0) + 1
        assert leaving == self._leaving_of

    def _queue(self, held: HeldRequest) -> HoldQueue:
        return self.parked if held.parked else self.held

    def _count_keys(self, held: HeldRequest, sign: int) -> None:
        party = held.pool, self._queue(held).party(held)
        self._keys.add(held.request.priority.level, party, sign * len(held.request.keys), held.request.weight)

    def _forget(self, held: HeldRequest) -> None:
        self._count_keys(held, -1)
        self._forget_gateway(held)
        if self._leaving.pop(held.request.request_id, None) is not None:
            self._left(held)

    def _forget_gateway(self, held: HeldRequest) -> None:
        ids = self._of_gateway[held.gateway_id]
        del ids[held.request.request_id]
        if not ids:
            del self._of_gateway[held.gateway_id]

    def _left(self, held: HeldRequest) -> None:
        self._leaving_of[held.pool] -= 1
        if not self._leaving_of[held.pool]:
            del self._leaving_of[held.pool]
