"""Requests that wait in the router, by pool, in the order in which they are to be tried. Pure; times in s on one clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal

import msgspec

from pointsman.router.core.types import PlacementRequest

# Ageing so slow that no wait makes up for a token.
_NEVER = 1e-6


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`size`: requests held in one pool, of which one tenant may have `tenant_share` (0 to 1, but always one).

    They are held for `timeout_s` at most. What a policy held to the end is then placed by the default policy (`expiry` place)
    or refused. `ageing_tokens_per_s`: a second of waiting counts as much as so many fewer new tokens. `fair`: tenants take turns.
    """

    size: int = 256
    timeout_s: float = 30.0
    tenant_share: float = 1.0
    ageing_tokens_per_s: float = 5_000.0
    fair: bool = True
    expiry: Literal["place", "refuse"] = "place"


class HeldRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that waits. `since` is when it first asked, at whichever router; it is answered by `answer_by`.

    `for_room`: every instance was saturated; otherwise the policy asked to wait. `new_tokens`: the least prefill that it would
    cost when it was last tried; `queue_penalty_s`: the policy's own word on how much sooner others are to be tried that came
    together with it. `previous_id`: the decision on the part of its plan that is done; empty when it waits for its first step.
    """

    request: PlacementRequest
    gateway_id: str
    pool: str
    since: float
    answer_by: float
    reason: str
    new_tokens: int
    for_room: bool
    queue_penalty_s: float | None = None
    previous_id: str = ""


class HoldQueue:
    """All held requests. Within a tenant (or without fairness, altogether) the order is by queue_penalty_s - waited, where
    new_tokens / ageing stand in for a queue_penalty that is not given: shortest new prefill first, and nobody waits for ever.
    Tenants with waiting requests stand in a ring."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self._by_id: dict[str, HeldRequest] = {}
        # (pool, model asked for) -> how many wait for room.
        self._for_room: Counter[tuple[str, str]] = Counter()
        # pool -> tenant -> request ids; the order of the tenants is the ring.
        self._rings: dict[str, dict[str, set[str]]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> HeldRequest | None:
        """The held request with this id."""
        return self._by_id.get(request_id)

    def pools(self) -> list[str]:
        """The pools in which requests wait."""
        return list(self._rings)

    def count(self, pool: str) -> int:
        """How many requests wait in `pool`."""
        return sum(map(len, self._rings.get(pool, {}).values()))

    def waiting_for_room(self, pool: str) -> list[str]:
        """The models (names of the pool, or adapters) for which requests wait because all their instances were saturated."""
        return [model for of, model in self._for_room if of == pool]

    def offer(self, held: HeldRequest) -> str:
        """Let a request wait; returns "" or why it may not. Mutates."""
        size = self.settings.size
        ring = self._rings.get(held.pool, {})
        if self.count(held.pool) >= size:
            return f"{size} requests wait already" if size else "no queue"
        if len(ring.get(held.request.tenant, ())) >= max(int(size * self.settings.tenant_share), 1):
            return "this tenant has its share of the queue already"
        self._by_id[held.request.request_id] = held
        self._count(held, 1)
        self._rings.setdefault(held.pool, {}).setdefault(held.request.tenant, set()).add(held.request.request_id)
        return ""

    def update(self, held: HeldRequest) -> None:
        """Replace what is known of a waiting request of the same id, pool and tenant. Mutates."""
        self._count(self._by_id[held.request.request_id], -1)
        self._by_id[held.request.request_id] = held
        self._count(held, 1)

    def remove(self, request_id: str) -> HeldRequest | None:
        """Let a request wait no more; None when it did not. Mutates."""
        held = self._by_id.pop(request_id, None)
        if held is not None:
            self._count(held, -1)
            ring = self._rings[held.pool]
            ring[held.request.tenant].discard(request_id)
            if not ring[held.request.tenant]:
                del ring[held.request.tenant]
            if not ring:
                del self._rings[held.pool]
        return held

    def answered(self, request_id: str) -> None:
        """A waiting request got its placement: it leaves, and its tenant goes to the end of the ring. Mutates."""
        held = self.remove(request_id)
        assert held is not None
        ring = self._rings.get(held.pool, {})
        if (ids := ring.pop(held.request.tenant, None)) is not None:
            ring[held.request.tenant] = ids

    def expired(self, now: float) -> list[HeldRequest]:
        """Requests whose time is over, the longest overdue first."""
        return sorted((held for held in self if held.answer_by <= now), key=lambda held: held.answer_by)

    def order(self, pool: str, now: float) -> list[HeldRequest]:
        """The waiting requests of `pool` in the order in which they are to be tried."""
        by_tenant = [[self._by_id[one] for one in ids] for ids in self._rings.get(pool, {}).values()]
        if not self.settings.fair:
            by_tenant = [list(chain.from_iterable(by_tenant))]
        for waiting in by_tenant:
            waiting.sort(key=lambda held: self._rank(held, now))
        return [held for turn in zip_longest(*by_tenant) for held in turn if held is not None]

    def check_invariants(self) -> None:
        """Raise AssertionError when the rings and the requests disagree, or a bound is passed."""
        listed = {
            request_id: (pool, tenant)
            for pool, ring in self._rings.items()
            for tenant, ids in ring.items()
            for request_id in ids
        }
        assert listed == {held.request.request_id: (held.pool, held.request.tenant) for held in self}
        assert self._for_room == Counter((held.pool, held.request.model) for held in self if held.for_room)
        for pool, ring in self._rings.items():
            assert 0 < self.count(pool) <= self.settings.size
            assert all(ring.values())
            assert all(len(ids) <= max(self.settings.size * self.settings.tenant_share, 1) for ids in ring.values())

    def _count(self, held: HeldRequest, change: int) -> None:
        if held.for_room:
            line = held.pool, held.request.model
            self._for_room[line] += change
            if not self._for_room[line]:
                del self._for_room[line]

    def _rank(self, held: HeldRequest, now: float) -> tuple[float, float, str]:
        waited = now - held.since
        queue_penalty_s = held.queue_penalty_s
        if queue_penalty_s is None:
            queue_penalty_s = held.new_tokens / (self.settings.ageing_tokens_per_s or _NEVER)
        return queue_penalty_s - waited, held.since, held.request.request_id
