"""The queue of one stage of the waiting room, by pool, in the order in which its requests are tried. Pure; times in s.

WaitingRoom decides who may wait, and has what the stages share.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from pointsman_router.core.load.attained_service import MOST_S
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.fair_order import REQUEST_TOKENS, Entry, PoolOrder, QueueKey
from pointsman_router.core.requests.shares import Shares

# Ageing rate that stands for 0, tokens/s. It is so low that no wait outweighs a single token.
_NEVER = 1e-6
_NOBODY: Mapping[str, int] = MappingProxyType({})
_Name = TypeVar("_Name", str, tuple[str, str])


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of a queue. `size`: maximum number of waiting requests of a pool. `tenant_share`: the part of them, 0 to 1, that
    one tenant may have while others want to wait (at least one request).

    `timeout_s`: maximum time that a request is held. `expiry`: whether a request that the policy still holds then is placed by
    its rule without holds, or refused. `ageing_tokens_per_s`: number of new tokens, or of tokens that its program has been served
    lately, that a second of waiting outweighs. `fair`: whether the tenants of a class are served by weight and cost ("tenant"),
    and the requests of a tenant in the order of what their programs have been served ("program"); "off": neither matters.
    `lower_class_share`: the share of the work of higher classes that a waiting class is owed, and the share of the places that
    each class keeps.
    """

    size: int = 256
    timeout_s: float = 30.0
    tenant_share: float = 1.0
    ageing_tokens_per_s: float = 5_000.0
    fair: Literal["off", "tenant", "program"] = "tenant"
    expiry: Literal["place", "refuse"] = "place"
    lower_class_share: float = 0.1


class HeldRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that waits. Times are in s."""

    request: PlacementRequest  # its keys in an array (with_compact_keys), its age_s as of the hold
    gateway_id: str  # of the gateway that asked; empty: the unary form
    pool: str  # of its model when it was held; the model may have moved to another pool since
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
    parked: bool = False  # whether it waits for the admission of its session, before anything else (parked_requests.py)
    asked_at: float = 0.0  # when its client, if it is parked, or else its gateway asked for it last
    resumes: bool = False  # whether it is parked although its session is under way (AdmissionView.resumes)
    tenant_load: float | None = None  # the weighted size of its tenant's sessions for the tenant's weight, then
    program_work: int = 0  # tokens that were counted as its program's service at `asked_at`

    @property
    def queue_key(self) -> QueueKey:
        """What the request waits for: (model, instance)."""
        return self.request.model, self.waits_for

    @property
    def ends_at(self) -> float:
        """When the request must be answered at the latest."""
        return min(self.answer_by, self.start_by)


class HoldQueue:
    """The waiting requests of one stage. Between classes and tenants the order is that of fair_order.py.

    Within a tenant of a class (without fairness: within a class) the least queue_penalty_s - waited goes first. If the policy set
    no queue penalty, new_tokens / ageing replaces it: the shortest new prefill goes first, and no request waits forever. What the
    request's program had been served counts as well then: program_tokens / ageing, at most MOST_S, are added. A
    client's deadline counts as age: a request that needs its first token in d s is tried as if it had waited `timeout_s` - d
    already. So of equal requests the earliest deadline goes first.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self._by_id: dict[str, HeldRequest] = {}
        self._entries: dict[str, Entry] = {}
        # (pool, requested model) -> number of requests that wait for room.
        self._for_room: Counter[tuple[str, str]] = Counter()
        # Pool -> instance -> number of requests that wait for the instance.
        self._held_for: dict[str, Counter[str]] = {}
        # Pool -> sum of the sizes of the admitted sessions whose requests wait.
        self._admitted: Counter[str] = Counter()
        self._shares: dict[str, Shares[str]] = {}
        self._orders: dict[str, PoolOrder] = {}
        # (ends_at, request id), earliest end first.
        self._ends: list[tuple[float, str]] = []

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

    def held_for(self, pool: str, request_id: str) -> Mapping[str, int]:
        """Return how many requests of `pool`, other than this one, wait until an instance has less to do, by instance. The caller
        must not change it. O(1), or O(instances) for a request that waits itself."""
        counts = self._held_for.get(pool, _NOBODY)
        own = self._by_id.get(request_id)
        if own is None or not own.waits_for:
            return counts
        return {
            name: count - (name == own.waits_for) for name, count in counts.items() if count > (name == own.waits_for)
        }

    def party(self, held: HeldRequest) -> str:
        """Return the name under which a request has its share of the places: its tenant, or all tenants together."""
        return held.request.tenant if self.settings.fair != "off" else ""

    def notes(self, held: HeldRequest) -> tuple[str, ...]:
        """Return what a held request's decision notes of its place in the queue."""
        tokens = held.request.program_tokens
        if self.settings.fair != "program" or tokens < 1.0 or held.queue_penalty_s is not None:
            return ()
        return (f"program_served: its program had been served {tokens:,.0f} tokens lately, so others went first",)

    def shares(self, pool: str) -> Shares[str]:
        """Return who has the places of a pool; do not change it."""
        return self._shares.get(pool) or self._new_shares()

    def last(self, pool: str, level: int, party: str) -> Iterator[HeldRequest]:
        """Yield a party's requests of one class, in the reverse of the order in which they are tried. The caller must not change
        the queue before the iteration ends. A request of which a part is computed, or that resumes a session, keeps its place,
        and is left out."""
        order = self._orders.get(pool)
        for request_id in order.last(level, party) if order is not None else ():
            held = self._by_id[request_id]
            if not (held.previous_id or held.resumes):
                yield held

    def add(self, held: HeldRequest) -> None:
        """Add a request for which there is room. Mutates."""
        self._by_id[held.request.request_id] = held
        self._count(held, 1)
        insort(self._ends, (held.ends_at, held.request.request_id))
        entry = self._entries[held.request.request_id] = self._entry(held)
        if held.pool not in self._orders:
            self._orders[held.pool] = PoolOrder(self.settings.lower_class_share)
            self._shares[held.pool] = self._new_shares()
        self._orders[held.pool].add(entry)
        self._shares[held.pool].add(held.request.priority.level, self.party(held), 1, held.request.weight)

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

    def admitted(self, pool: str) -> int:
        """Return the tokens of KV that the sessions are to have that were admitted to `pool`, and whose requests wait."""
        return self._admitted[pool]

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
        waiting = Counter((held.pool, held.waits_for) for held in self if held.waits_for)
        assert waiting == {(pool, name): count for pool, of in self._held_for.items() for name, count in of.items()}
        assert all(self._held_for.values())
        sizes: Counter[str] = Counter()
        for held in self:
            sizes[held.pool] += _admitted_size(held)
        assert self._admitted == +sizes
        assert self._shares.keys() == self._orders.keys()
        assert sum(map(len, self._orders.values())) == len(self)
        assert self._ends == sorted((held.ends_at, held.request.request_id) for held in self)
        for pool, order in self._orders.items():
            order.check_invariants()
            assert 0 < len(order) == self._shares[pool].used <= self.settings.size
            self._shares[pool].check_invariants()
            tried = [held.request.request_id for held in self.order(pool)]
            assert sorted(tried) == sorted(held.request.request_id for held in self if held.pool == pool)

    def _new_shares(self) -> Shares[str]:
        return Shares(self.settings.size, self.settings.tenant_share, self.settings.lower_class_share)

    def _forget(self, held: HeldRequest) -> None:
        request = held.request
        del self._by_id[request.request_id], self._entries[request.request_id]
        self._forget_end(held)
        self._count(held, -1)
        self._shares[held.pool].add(request.priority.level, self.party(held), -1)
        if not len(self._orders[held.pool]):
            del self._orders[held.pool], self._shares[held.pool]

    def _forget_end(self, held: HeldRequest) -> None:
        del self._ends[bisect_left(self._ends, (held.ends_at, held.request.request_id))]

    def _count(self, held: HeldRequest, change: int) -> None:
        if size := _admitted_size(held):
            _change(self._admitted, held.pool, change * size)
        if held.for_room:
            _change(self._for_room, (held.pool, held.request.model), change)
        if held.waits_for:
            _change(self._held_for.setdefault(held.pool, Counter()), held.waits_for, change)
            if not self._held_for[held.pool]:
                del self._held_for[held.pool]

    def _entry(self, held: HeldRequest) -> Entry:
        request, ageing = held.request, self.settings.ageing_tokens_per_s or _NEVER
        queue_penalty_s = held.queue_penalty_s
        if queue_penalty_s is None:
            queue_penalty_s = held.new_tokens / ageing
            if self.settings.fair == "program":
                queue_penalty_s += min(request.program_tokens / ageing, MOST_S)
        # A request without a client's deadline has one of `timeout_s`: it is refused after that.
        since = min(held.since, held.first_token_by - self.settings.timeout_s)
        return Entry(
            request_id=request.request_id,
            tenant=self.party(held),
            queue_key=held.queue_key,
            level=request.priority.level,
            rank=since + queue_penalty_s,
            since=since,
            cost=float(held.new_tokens + REQUEST_TOKENS),
            weight=request.weight if self.settings.fair != "off" else 1.0,
            starts_at=held.tenant_load,
        )


def _change(counter: Counter[_Name], name: _Name, change: int) -> None:
    counter[name] += change
    if not counter[name]:
        del counter[name]


def _admitted_size(held: HeldRequest) -> int:
    """Return the size of the session that an admission let in with this request; 0 if the session is counted already, since a
    part of the prompt is computed."""
    record = held.request.admitted
    return record.view.size if record is not None and not held.previous_id else 0


def with_compact_keys(request: PlacementRequest) -> PlacementRequest:
    """Return the request with its keys in an array, 8 bytes each: thousands of prompts of 130k tokens may wait."""
    return request if isinstance(request.keys, array) else replace(request, keys=array("Q", request.keys))
