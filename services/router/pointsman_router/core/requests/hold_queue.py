"""The queue of held requests, by pool, in the order in which they are tried. Pure; times in s on one clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.priority import PRIORITIES, Priority
from pointsman_router.core.requests.fair_order import REQUEST_TOKENS, Entry, PoolOrder, QueueKey

# Ageing rate that stands for 0, tokens/s. It is so low that no wait outweighs a single token.
_NEVER = 1e-6


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of the queue. `size`: maximum number of held requests of a pool. `tenant_share`: the part of them, 0 to 1, that
    one tenant may have (at least one request).

    `timeout_s`: maximum time that a request is held. `expiry`: whether a request that the policy still holds then is placed by
    its rule without holds, or refused. `ageing_tokens_per_s`: number of new tokens that a second of waiting outweighs. `fair`:
    whether the tenants of a class are served by weight and cost; otherwise tenants do not matter. `lower_class_share`: the share
    of the work of higher classes that a waiting class is owed, and the share of the places that each class keeps. `keys`:
    maximum number of block keys of all held prompts together.
    """

    size: int = 256
    timeout_s: float = 30.0
    tenant_share: float = 1.0
    ageing_tokens_per_s: float = 5_000.0
    fair: bool = True
    expiry: Literal["place", "refuse"] = "place"
    lower_class_share: float = 0.1
    keys: int = 1 << 62


class HeldRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that waits. Times are in s."""

    request: PlacementRequest
    gateway_id: str  # of the gateway that asked; empty: the unary form
    pool: str
    since: float  # when it first came, at any router
    answer_by: float  # when it is answered at the latest
    reason: str  # why it waits
    new_tokens: int  # the least prefill that it needed on any instance at its last trial
    for_room: bool  # whether it waits for an unsaturated instance; otherwise the policy holds it
    queue_penalty_s: float | None = None  # the policy's; None: none was set
    previous_id: str = ""  # the decision on the part of its plan that is done; empty while it waits for its first step
    first_token_by: float = inf  # when its client needs the first token
    start_by: float = inf  # when it must be placed for that; inf: no limit
    waits_for: str = ""  # the instance that must first have less to do, by the policy; empty: any instance
    parked: bool = False  # whether it waits for the admission of its session, before anything else (parking.py)
    asked_at: float = 0.0  # when its client asked for it last, if it is parked
    tenant_load: float | None = None  # the weighted size of its tenant's sessions for the tenant's weight, then

    @property
    def queue_key(self) -> QueueKey:
        """What the request waits for: (model, instance)."""
        return self.request.model, self.waits_for

    @property
    def ends_at(self) -> float:
        """When the request must be answered at the latest."""
        return min(self.answer_by, self.start_by)


class HoldQueue:
    """All held requests. Between classes and tenants the order is that of fair_order.py.

    Within a tenant of a class (without fairness: within a class) the least queue_penalty_s - waited goes first. If the policy set
    no queue penalty, new_tokens / ageing replaces it: the shortest new prefill goes first, and no request waits forever. A
    client's deadline counts as age: a request that needs its first token in d s is tried as if it had waited `timeout_s` - d
    already. So of equal requests the earliest deadline goes first.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self._by_id: dict[str, HeldRequest] = {}
        self._entries: dict[str, Entry] = {}
        # (pool, requested model) -> number of requests that wait for room.
        self._for_room: Counter[tuple[str, str]] = Counter()
        self._of_tenant: Counter[tuple[str, str, Priority]] = Counter()
        self._orders: dict[str, PoolOrder] = {}
        # (ends_at, request id), earliest end first.
        self._ends: list[tuple[float, str]] = []
        self._keys = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> HeldRequest | None:
        """Return the held request with this id, or None."""
        return self._by_id.get(request_id)

    def pools(self) -> list[str]:
        """Return the pools in which requests wait."""
        return list(self._orders)

    def count(self, pool: str, priority: Priority | None = None) -> int:
        """Return how many requests wait in `pool`, of one class or of all (None)."""
        order = self._orders.get(pool)
        if order is None:
            return 0
        return len(order) if priority is None else order.count(priority.level)

    def waiting_for_room(self, pool: str) -> list[str]:
        """Return the models (names of the pool, or adapters) for which requests wait for room."""
        return [model for of, model in self._for_room if of == pool]

    def make_room(self, held: HeldRequest) -> HeldRequest | None:
        """Remove the request in whose place `held` may wait, and return it. None if there is room, or no such request. Mutates.

        Each class keeps `lower_class_share` of the places, rounded down. The last request of the lowest class with more than that
        gives up its place to a request of a higher class, or of a lower class with less. If the tenant of `held` has its share of
        the queue, the rule applies to this tenant's places alone. A request of which a part is computed is not removed.
        """
        has_its_share = self._has_its_share(held)
        if not has_its_share and self.count(held.pool) < self.settings.size:
            return None
        order = self._orders.get(held.pool)
        if order is None:
            return None
        tenant = held.request.tenant if has_its_share else None
        places = self._most_of_a_tenant if has_its_share else self.settings.size
        kept = int(self.settings.lower_class_share * places)
        own = held.request.priority
        for other in PRIORITIES:
            if other is own or self._count_of(held.pool, tenant, other) <= kept:
                continue
            if other.level > own.level and self._count_of(held.pool, tenant, own) >= kept:
                continue
            for request_id in order.last(other.level, tenant if self.settings.fair else None):
                last = self._by_id[request_id]
                if not last.previous_id and tenant in (None, last.request.tenant):
                    return self.remove(request_id)
        return None

    def offer(self, held: HeldRequest) -> str:
        """Add a request to the queue; return "", or why it may not wait. Mutates."""
        size = self.settings.size
        if self.count(held.pool) >= size:
            return f"{size} requests wait already" if size else "no queue"
        if self._has_its_share(held):
            return "this tenant has its share of the queue already"
        if self._keys + len(held.request.keys) > self.settings.keys:
            return "the prompts that wait take all memory that they may"
        self._keys += len(held.request.keys)
        self._by_id[held.request.request_id] = held
        self._count(held, 1)
        insort(self._ends, (held.ends_at, held.request.request_id))
        entry = self._entries[held.request.request_id] = self._entry(held)
        if held.pool not in self._orders:
            self._orders[held.pool] = PoolOrder(self.settings.lower_class_share)
        self._orders[held.pool].add(entry)
        self._of_tenant[held.pool, held.request.tenant, held.request.priority] += 1
        return ""

    def update(self, held: HeldRequest) -> None:
        """Replace the waiting request with the same id, pool and tenant. Mutates."""
        request_id = held.request.request_id
        before = self._by_id[request_id]
        self._count(before, -1)
        self._by_id[request_id] = held
        self._count(held, 1)
        if held.ends_at != before.ends_at:
            self._forget_end(before)
            insort(self._ends, (held.ends_at, request_id))
        old, new = self._entries[request_id], self._entry(held)
        if new != old:
            self._entries[request_id] = new
            self._orders[held.pool].replace(old, new)

    def remove(self, request_id: str) -> HeldRequest | None:
        """Remove a request from the queue and return it; None if it was not in the queue. Mutates."""
        held = self._by_id.get(request_id)
        if held is not None:
            self._orders[held.pool].remove(self._entries[request_id])
            self._forget(held)
        return held

    def answered(self, request_id: str, new_tokens: int) -> None:
        """Remove a waiting request that was placed, and charge its tenant with a prefill of `new_tokens`. Mutates."""
        held = self._by_id[request_id]
        self._orders[held.pool].serve(self._entries[request_id], new_tokens + REQUEST_TOKENS)
        self._forget(held)

    def queue_keys(self, pool: str) -> set[QueueKey]:
        """Return the queues in which requests of `pool` wait."""
        return self._orders[pool].queue_keys() if pool in self._orders else set()

    @property
    def next_end(self) -> float:
        """When the first of the waiting requests must be answered at the latest; inf if none waits."""
        return self._ends[0][0] if self._ends else inf

    def expired(self, now: float, most: int) -> list[HeldRequest]:
        """Return at most `most` requests whose end has passed, earliest end first."""
        return [self._by_id[request_id] for ends_at, request_id in self._ends[:most] if ends_at <= now]

    def order(self, pool: str, full: Collection[QueueKey] = ()) -> Iterator[HeldRequest]:
        """Yield the waiting requests of `pool` in the order in which they are tried, computed one by one. The caller may add
        queues to `full` during the walk, whose requests are skipped from then on. It must not change the queue before the walk
        ends."""
        order = self._orders.get(pool)
        return (self._by_id[request_id] for request_id in order.walk(full)) if order is not None else iter(())

    def check_invariants(self) -> None:
        """Raise AssertionError if the orders and the requests disagree, or a limit is exceeded."""
        assert self._entries == {name: self._entry(held) for name, held in self._by_id.items()}
        assert self._for_room == Counter((held.pool, held.request.model) for held in self if held.for_room)
        assert self._of_tenant == Counter((held.pool, held.request.tenant, held.request.priority) for held in self)
        assert sum(map(len, self._orders.values())) == len(self)
        assert self._keys == sum(len(held.request.keys) for held in self) <= self.settings.keys
        assert self._ends == sorted((held.ends_at, held.request.request_id) for held in self)
        for pool, order in self._orders.items():
            order.check_invariants()
            assert 0 < len(order) <= self.settings.size
            tried = [held.request.request_id for held in self.order(pool)]
            assert sorted(tried) == sorted(held.request.request_id for held in self if held.pool == pool)
        assert not any(self._of(pool, tenant) > self._most_of_a_tenant for pool, tenant, _ in self._of_tenant)

    @property
    def _most_of_a_tenant(self) -> int:
        return max(int(self.settings.size * self.settings.tenant_share), 1)

    def _has_its_share(self, held: HeldRequest) -> bool:
        return self._of(held.pool, held.request.tenant) >= self._most_of_a_tenant

    def _of(self, pool: str, tenant: str) -> int:
        return sum(self._of_tenant[pool, tenant, priority] for priority in PRIORITIES)

    def _count_of(self, pool: str, tenant: str | None, priority: Priority) -> int:
        return self.count(pool, priority) if tenant is None else self._of_tenant[pool, tenant, priority]

    def _forget(self, held: HeldRequest) -> None:
        request = held.request
        del self._by_id[request.request_id], self._entries[request.request_id]
        self._keys -= len(request.keys)
        self._forget_end(held)
        self._count(held, -1)
        of_tenant = held.pool, request.tenant, request.priority
        self._of_tenant[of_tenant] -= 1
        if not self._of_tenant[of_tenant]:
            del self._of_tenant[of_tenant]
        if not len(self._orders[held.pool]):
            del self._orders[held.pool]

    def _forget_end(self, held: HeldRequest) -> None:
        del self._ends[bisect_left(self._ends, (held.ends_at, held.request.request_id))]

    def _count(self, held: HeldRequest, change: int) -> None:
        if held.for_room:
            name = held.pool, held.request.model
            self._for_room[name] += change
            if not self._for_room[name]:
                del self._for_room[name]

    def _entry(self, held: HeldRequest) -> Entry:
        request = held.request
        queue_penalty_s = held.queue_penalty_s
        if queue_penalty_s is None:
            queue_penalty_s = held.new_tokens / (self.settings.ageing_tokens_per_s or _NEVER)
        # A request without a client's deadline has one of `timeout_s`: it is refused after that.
        since = min(held.since, held.first_token_by - self.settings.timeout_s)
        return Entry(
            request_id=request.request_id,
            tenant=request.tenant if self.settings.fair else "",
            queue_key=held.queue_key,
            level=request.priority.level,
            rank=since + queue_penalty_s,
            since=since,
            cost=float(held.new_tokens + REQUEST_TOKENS),
            weight=request.weight if self.settings.fair else 1.0,
            starts_at=held.tenant_load,
        )
