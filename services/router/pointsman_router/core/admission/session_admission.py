"""Session admission of all pools: counts sessions under way, watches the caches, and describes each request's admission. Pure.

A pool is armed while its caches evict what sessions under way need again, and that costs a noticeable part of the time of its
instances. An armed pool stays so until the sessions fit well and nobody is parked. A pool that is not armed admits everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.admission.cache_capacity import CacheCapacity, Capacity
from pointsman_router.core.admission.recomputation import Recomputation
from pointsman_router.core.admission.session_ledger import SessionLedger
from pointsman_router.core.admission_rule import AdmissionView
from pointsman_router.core.idle_sessions import IdleSessions
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.placement_types import (
    LIGHT_CACHE_RATIO,
    LIGHT_NEW_TOKENS,
    Decision,
    PlacementRequest,
)
from pointsman_router.core.prefill_curve import PrefillCurve
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.priority import Priority

# A pool is armed when at least ARM_SHARE of its prefill of the last minute is recomputed, and the sessions' weighted size is at
# least ARM_SIZE of its capacity: near a fleet's limit, sizes reach the capacity for moments without harm. It is disarmed below
# DISARM_SIZE of the capacity.
ARM_SHARE, ARM_SIZE, DISARM_SIZE = 0.05, 1.25, 0.8
# How often the sums of a pool's idle sessions are stored for its next owner, s. They matter at once only if the pool is armed.
STORED_EVERY_ARMED_S, STORED_EVERY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Settings of session admission. `on`: whether sessions are admitted under every policy; without it `auto` admits them
    where its rules say so. The others: how long a new session of each class
    is parked at most before it is refused, s."""

    on: bool = False
    interactive_s: float = 30.0
    # The clients of OpenAI and Anthropic give up after 600 s without a byte.
    standard_s: float = 480.0
    batch_s: float = 600.0

    def bound_s(self, priority: Priority) -> float:
        """Return how long a request of this class may be parked, s."""
        if priority is Priority.INTERACTIVE:
            return self.interactive_s
        return self.batch_s if priority is Priority.BATCH else self.standard_s


class AdmissionStatus(NamedTuple):
    """Session admission of one pool, for operators. Sizes in tokens."""

    armed: bool  # whether the caches evict what is needed again
    off_reason: str  # why it cannot work; empty if it can
    sessions: int  # number of sessions that are counted
    weighted: float  # sum of the sizes of the sessions under way, each times its chance to need its KV soon
    capacity: float  # what the pool's caches hold
    recomputed_share: float  # share of the last minute's prefill that was computed before, and evicted


class Newness(NamedTuple):
    """What the session of a request would add to its pool."""

    # Why the request continues work under way, which adds nothing; empty: its session is new, or resumes.
    under_way: str
    size: int  # tokens of KV
    resumes: bool = False  # whether it continues a session under way whose context the caches have lost
    counted: float = 0.0  # its part of the pool's weighted size, if it resumes: it needs no room besides itself


@dataclass(slots=True)
class PoolAdmission:
    """The state of one pool."""

    ledger: SessionLedger = field(default_factory=SessionLedger)  # counted also while admission does not apply
    recomputation: Recomputation = field(default_factory=Recomputation)  # by which the pool is armed
    capacity: Capacity = field(default_factory=Capacity)  # of the last tick at which an instance served
    armed: bool = False  # as of the last tick; without effect where admission does not apply
    curve: PrefillCurve = field(default_factory=PrefillCurve)  # of most of its instances; as of the last tick
    stored_at: float = -inf  # when the sums of idle sessions were last given to be stored, s


class SessionAdmission:
    """The admission of a RouterState's sessions. `applies` says for a pool and a time whether its sessions are admitted. They are
    counted in either case, so that the sums are right when it begins to apply."""

    def __init__(
        self,
        settings: AdmissionSettings,
        instances: InstanceRegistry,
        index: PrefixIndex,
        prefill_observer: PrefillObserver,
        affinity: Affinity,
        capacity: CacheCapacity,
        applies: Callable[[str, float], bool],
        least_new: Callable[[PlacementRequest, str, float], int],
    ) -> None:
        """`least_new(request, pool, now)`: the least tokens of its prompt that an instance of the pool has to compute."""
        self.settings = settings
        self.applies = applies
        self.pools: dict[str, PoolAdmission] = {}
        self._instances = instances
        self._index = index
        self._prefill_observer = prefill_observer
        self._affinity = affinity
        self._capacity = capacity
        self._least_new = least_new

    def armed(self, pool: str, now: float) -> bool:
        """Return whether new sessions of a pool may have to wait: its caches are too small, and admission applies."""
        state = self.pools.get(pool)
        return state is not None and state.armed and self.applies(pool, now)

    def newness(self, request: PlacementRequest, pool: str, now: float, *, dry: bool = False) -> Newness:
        """Return what the session of a request would add to its pool. O(keys). Unless `dry`, mutates
        what is known of prefixes."""
        state = self.pools.get(pool)
        ledger = state.ledger if state is not None else SessionLedger()
        under_way = "tool_result" if request.continues else ""
        if not under_way and request.started_by in ledger.sessions:
            under_way = "parent"
        if not under_way and request.session:
            under_way = ledger.continued(request.session, request.tenant, request.keys, dry=dry)
            if not under_way and request.session not in ledger.sessions:
                under_way = "session" if self._affinity.owner(pool, request.session, now) else ""
        if under_way:
            known = ledger.sessions.get(request.session)
            idle = known is None or not known.open
            pauses = idle and _can_pause(request) and self.armed(pool, now)
            lost = self._least_new(request, pool, now) if pauses else 0
            if lost < max(LIGHT_NEW_TOKENS, (1.0 - LIGHT_CACHE_RATIO) * request.input_tokens):
                return Newness(under_way, 0)
            return Newness("", lost, resumes=True, counted=ledger.weight(request.session))
        shared = self._shared(request.keys, state.capacity.ids) if state is not None else 0
        return Newness("", max(request.input_tokens - shared, 0))

    def has_begun(self, request: PlacementRequest, pool: str, now: float) -> bool:
        """Return whether the session of a request is under way by now. O(1)."""
        state = self.pools.get(pool)
        known = state is not None and request.session in state.ledger.sessions
        return bool(request.session) and (known or bool(self._affinity.owner(pool, request.session, now)))

    def view(
        self, pool: str, newness: Newness, now: float, *, before: int = 0, waited_s: float = 0.0, bound_s: float = 0.0
    ) -> AdmissionView:
        """Return what the admission of a request is decided on."""
        state = self._state(pool)
        return AdmissionView(
            size=newness.size,
            weighted=max(state.ledger.weighted() - newness.counted, 0.0),
            capacity=state.capacity.tokens,
            largest=state.capacity.largest,
            armed=self.armed(pool, now),
            under_way=newness.under_way,
            resumes=newness.resumes,
            before=before,
            waited_s=waited_s,
            bound_s=bound_s,
        )

    def _update(self, pool: str, state: PoolAdmission, now: float, *, parked: bool) -> None:
        """Bring a pool up to date: its idle sessions, its capacity, and whether it is armed. `parked`: whether requests of the
        pool are parked."""
        state.ledger.advance(now)
        members = self._instances.members(pool, pool)
        capacity = self._capacity.of(pool, members)
        # While no instance serves, the last capacity stays: else all that is parked would be let in at once.
        if capacity.ids or not members:
            state.capacity = capacity
        state.ledger.hosted_by(max(len(state.capacity.ids), 1))
        state.curve = self._prefill_observer.curve(pool, state.capacity.hardware)
        computed, again = state.recomputation.tokens(now)
        thrashes = computed > 0 and again >= ARM_SHARE * computed
        weighted, tokens = state.ledger.weighted(), state.capacity.tokens
        if not state.armed:
            state.armed = thrashes and weighted >= ARM_SIZE * tokens > 0
            return
        fits = weighted < DISARM_SIZE * tokens
        state.armed = tokens > 0 and (parked or not fits)

    def tick(self, parked: Collection[str], now: float) -> None:
        """Bring all pools up to date; called with every tick. `parked`: the pools in which requests are parked. Mutates."""
        for pool, state in self.pools.items():
            self._update(pool, state, now, parked=pool in parked)

    def status(self, pool: str, now: float) -> AdmissionStatus:
        """Return the admission of a pool at `now`. Mutates nothing but sums over time and what is remembered of caches."""
        state = self.pools.get(pool)
        if state is None:
            capacity = self._capacity.of(pool, self._instances.members(pool, pool))
            return AdmissionStatus(False, capacity.reason, 0, 0.0, capacity.tokens, 0.0)
        return AdmissionStatus(
            state.armed,
            state.capacity.reason,
            len(state.ledger),
            state.ledger.weighted(),
            state.capacity.tokens,
            state.recomputation.share(now),
        )

    # ---- sessions ----

    def asked(self, request: PlacementRequest, pool: str) -> None:
        """Count the return of the session of a request that has arrived. Mutates."""
        if (state := self.pools.get(pool)) is not None:
            state.ledger.asked(request.session)

    def opened(self, decision: Decision, new: int, keys: Sequence[int], now: float) -> str:
        """Count a request that was placed where `new` tokens of its prompt are to be computed; return its session's name in the
        ledger, which `closed` needs. Mutates."""
        request, view = decision.request, decision.view
        state, session = self._state(decision.pool), request.session
        name = session or request.request_id
        known = name in state.ledger.sessions
        prefix = state.ledger.known_prefix(name, keys) if known and keys else 0
        # What is cached of the prompt of a session that an earlier owner of the pool has placed is its own.
        own = known or (session and self._affinity.owner(decision.pool, session, now))
        cached = 0
        if prefix or (keys and not own):
            # A list, since a generator takes twice the time.
            cached = max([candidate.cached_tokens for candidate in view.candidates], default=0)
        state.recomputation.add(new, min(max(prefix - cached, 0), new), now)
        parent = request.started_by
        state.ledger.opened(name, request.tenant, request.input_tokens, keys, 0 if own else cached, now, parent=parent)
        return name

    def announced(self, request: PlacementRequest, pool: str, now: float) -> str:
        """Count a request that its gateway runs, as `opened`; its keys are not known. Mutates."""
        name = request.session or request.request_id
        ledger, parent = self._state(pool).ledger, request.started_by
        ledger.opened(name, request.tenant, request.input_tokens, (), 0, now, parent=parent)
        return name

    def closed(
        self, pool: str, name: str, prompt_tokens: int, output_tokens: int, finish_reason: str, now: float
    ) -> None:
        """Count the end of a request. Mutates."""
        if (state := self.pools.get(pool)) is not None:
            # A request without a session has the name of the request, and nothing follows it.
            lasts = "/" in name
            state.ledger.closed(name, prompt_tokens, output_tokens, finish_reason, now, lasts=lasts)

    def was_parked(self, pool: str, now: float) -> None:
        """Record that an earlier owner of the pool had parked a request: it is armed. Mutates."""
        state = self._state(pool)
        self._update(pool, state, now, parked=True)
        state.armed = state.capacity.tokens > 0

    def idle_sessions(self, pool: str, now: float) -> IdleSessions | None:
        """Return what the pool's next owner needs of its idle sessions, if it is to be stored now: each second while the pool is
        armed, else every STORED_EVERY_S. Mutates."""
        state = self.pools.get(pool)
        if state is None or now < state.stored_at + (STORED_EVERY_ARMED_S if state.armed else STORED_EVERY_S):
            return None
        state.stored_at = now
        return state.ledger.idle()

    def take_over(self, pool: str, idle: IdleSessions, age_s: float, now: float) -> None:
        """Count the idle sessions that the pool's last owner stored `age_s` ago. Mutates."""
        self._state(pool).ledger.inherit(idle, age_s, now)

    def session_ended(self, session: str) -> bool:
        """Forget a session that its client has ended, and its sub-agents, in all pools; return whether one of them knew it.
        Mutates; O(pools + sub-agents)."""
        knowing = [state for state in self.pools.values() if state.ledger.knows(session)]
        for state in knowing:
            state.ledger.over(session)
        return bool(knowing)

    def forget_pool(self, pool: str) -> None:
        """Drop all that is known of a pool. Mutates."""
        self.pools.pop(pool, None)
        self._capacity.forget_pool(pool)

    def check_invariants(self) -> None:
        """Raise AssertionError if a pool's ledger is inconsistent."""
        for state in self.pools.values():
            state.ledger.check_invariants()

    def _state(self, pool: str) -> PoolAdmission:
        if (state := self.pools.get(pool)) is None:
            state = self.pools[pool] = PoolAdmission()
        return state

    def _shared(self, keys: Sequence[int], ids: Sequence[str]) -> int:
        """Return how many leading tokens of a prompt some instance has."""
        if not keys:
            return 0
        return next(self._index.runs(keys, self._index.mask(ids)), (0, 0))[0] * KEY_TOKENS


def _can_pause(request: PlacementRequest) -> bool:
    """Return whether a request of a session under way may wait: it is no sub-agent's, for which a parent waits that holds KV, no
    attempt to go on after an instance has failed, and has no deadline, which the wait would use up."""
    waits = request.ttft_deadline_s is None and not request.exclude and not request.resumed
    return bool(request.keys) and not request.started_by and waits
