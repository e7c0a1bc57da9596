"""Hypothesis machines: the index against sets, the protocol over a bad network, the state under any order of events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_SCHEME, KEY_TOKENS, digest_of
from pointsman_common.core.key_report_types import (
    ConsistencyCheck,
    Delta,
    KeyMessage,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
)
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.instances.engine_life import LifeSettings
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.key_report_receiver import ReportSync
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import (
    FleetView,
    InstanceInfo,
    KvRole,
    Load,
    Phase,
    PlacementRequest,
    PolicyResult,
    StepKind,
)
from pointsman_router.core.policy.base import Policy, fetch_of, hold, serve
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.hold_queue import HeldRequest, QueueSettings
from tests.support.router_values import info, request, set_policy, state

OWNERS = st.sampled_from([f"i{n}" for n in range(12)])
KEYS = st.lists(st.integers(0, 30), max_size=8, unique=True)


def _chained(last: int) -> list[int]:
    """Return the keys of a prompt that ends with `last`: each has one predecessor."""
    return [*_chained((last - 1) // 2), last] if last >= 0 else []


PROMPTS = st.integers(-1, 30).map(_chained)
MACHINE = settings(max_examples=60, stateful_step_count=40)


def _of_later_step(event: ev.Event, effect: ev.Placed | ev.Refused) -> bool:
    """Return whether the effect answers the event's StepDone: with the next step, or with a refusal if the plan is unknown."""
    if isinstance(event, ev.GatewayReported):
        event = event.report
    if not isinstance(event, ev.StepDone) or effect.request_id != event.request_id:
        return False
    return isinstance(effect, ev.Refused) or effect.step_index > 0


class IndexMachine(RuleBasedStateMachine):
    """PrefixIndex equals a dict of sets, through drops and sweeps."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(sweep_keys=1)
        self.model: dict[str, set[int]] = {}
        self.sparse: set[str] = set()

    @rule(owner=OWNERS, keys=KEYS)
    def add(self, owner: str, keys: list[int]) -> None:
        held = self.model.setdefault(owner, set())
        assert self.index.add(owner, keys) == len(set(keys) - held)
        held.update(keys)

    @rule(owner=OWNERS, keys=KEYS)
    def remove(self, owner: str, keys: list[int]) -> None:
        held = self.model.get(owner, set())
        assert self.index.remove(owner, keys) == len(held & set(keys))
        held.difference_update(keys)

    @rule(owner=OWNERS)
    def drop(self, owner: str) -> None:
        self.index.drop(owner)
        self.model.pop(owner, None)

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @rule(owner=OWNERS, sparse=st.booleans())
    def set_sparse(self, owner: str, sparse: bool) -> None:
        self.index.set_sparse(owner, sparse)
        (self.sparse.add if sparse else self.sparse.discard)(owner)

    @rule(keys=KEYS, owners=st.lists(OWNERS, unique=True))
    def look_up(self, keys: list[int], owners: list[str]) -> None:
        found = self.index.leading_blocks(keys, owners)
        for owner in owners:
            held = self.model.get(owner, set())
            end = found[owner]
            if owner in self.sparse:  # fewer keys than there are from one anchor to the next
                assert end == max((place + 1 for place, key in enumerate(keys) if key in held), default=0)
                continue
            assert end == 0 or keys[end - 1] in held
            assert end == len(keys) or keys[end] not in held
            run = next((place for place, key in enumerate(keys) if key not in held), len(keys))
            if not held & set(keys[run:]):
                assert end == run  # without holes: exact

    @rule(owner=OWNERS, count=st.integers(0, 31), asked=st.integers(0, 31))
    def look_up_a_chain(self, owner: str, count: int, asked: int) -> None:
        self.drop(owner)
        self.add(owner, list(range(count)))
        assert self.index.leading_blocks(range(asked), [owner]) == {owner: min(count, asked)}

    @invariant()
    def consistent(self) -> None:
        self.index.check_invariants()
        assert len(self.index) >= len(set().union(*self.model.values()))
        for owner, held in self.model.items():
            assert self.index.keys_of(owner) == held


TIERS = (1, 2, 3)


class SyncMachine(RuleBasedStateMachine):
    """A model set of keys of the device and of the host tier, `shadow`, is reported over a link that loses, doubles and swaps
    messages. While the copy is live, it equals the set as of the copy's seq; when all messages have arrived, it equals the
    set."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: set[tuple[int, int]] = set()
        self.seq = 0
        self.history: dict[int, frozenset[tuple[int, int]]] = {0: frozenset()}
        self.link: deque[KeyMessage] = deque()
        self.index = PrefixIndex()
        self.lower = LowerTiers()
        self.sync = ReportSync("a", self.index, self.lower)
        self.resync_asked = False
        self._snapshot()
        self.deliver(len(self.link))

    @rule(added=KEYS, removed=KEYS, tier=st.sampled_from(TIERS), cleared=st.booleans())
    def change(self, added: list[int], removed: list[int], tier: int, cleared: bool) -> None:
        base = set() if cleared else self.shadow
        new = [key for key in added if (tier, key) not in base]
        gone = [key for key in removed if (tier, key) in base and key not in new]
        self.shadow = (base - {(tier, key) for key in gone}) | {(tier, key) for key in new}
        self.seq += 1
        self.history[self.seq] = frozenset(self.shadow)
        self.link.append(Delta(self.seq, tier, new, gone, cleared))

    @rule()
    def consistency_check(self) -> None:
        self.link.append(ConsistencyCheck(self.seq, len(self.shadow), self.digest()))

    @rule()
    def lose(self) -> None:
        if self.link:
            self.link.popleft()

    @rule()
    def double(self) -> None:
        if self.link:
            self.link.appendleft(self.link[0])

    @rule()
    def swap(self) -> None:
        if len(self.link) > 1:
            self.link[0], self.link[1] = self.link[1], self.link[0]

    @rule()
    def deliver_all(self) -> None:
        self.deliver(len(self.link))

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.link))):
            if self.sync.handle(self.link.popleft()):
                self.resync_asked = True

    @rule()
    def answer_resync(self) -> None:
        if self.resync_asked:
            self.resync_asked = False
            self._snapshot()

    def _snapshot(self) -> None:
        self.link.append(SnapshotBegin(self.seq))
        for tier in TIERS:
            keys = sorted(key for of, key in self.shadow if of == tier)
            half = len(keys) // 2
            self.link.extend([SnapshotChunk(tier, keys[:half]), SnapshotChunk(tier, keys[half:])])
        self.link.append(SnapshotEnd(self.seq, len(self.shadow), self.digest()))

    def digest(self) -> int:
        return reduce(xor, (digest_of(tier, [key]) for tier, key in self.shadow), 0)

    def copied(self) -> set[tuple[int, int]]:
        lower = {(tier, key) for tier in TIERS[1:] for key in self.lower.keys_of("a", tier)}
        return lower | {(1, key) for key in self.index.keys_of("a")}

    @invariant()
    def live_means_equal(self) -> None:
        if self.sync.live:
            assert self.copied() == self.history[self.sync.seq]

    def teardown(self) -> None:
        self.consistency_check()
        self.deliver(len(self.link))
        if not self.sync.live:
            self._snapshot()
            self.deliver(len(self.link))
        assert self.sync.live
        assert self.copied() == self.shadow


REQUESTS = st.sampled_from([f"r{n}" for n in range(8)])
GATEWAYS = st.sampled_from(["g1", "g2"])
INSTANCES = st.sampled_from(["a", "b", "c", "p"])
ORDERS = st.builds(InstanceOrder, st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
# p only produces KV.
POOL_OF = {"a": "m", "b": "m", "c": "n", "p": "m"}
STEPS = st.sampled_from([0, 1, 2, 2**32 - 1])


@dataclass(frozen=True)
class Patient(Policy):
    """Holds prompts with an odd number of tokens while the first instance is busy."""

    name: ClassVar[str] = "patient"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = view.eligible()[0]
        if request.input_tokens % 2 and first.num_requests:
            return hold("busy", max_hold_s=request.input_tokens % 7)
        return serve(first, "first")


class Fetching(Policy):
    """Has the last instance send the first block to the first one, unless that has it. The first one then answers."""

    name: ClassVar[str] = "fetching"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first, last = view.eligible()[0], view.eligible()[-1]
        if request.sliceable_tokens > KEY_TOKENS > first.cached_tokens and last.can_give_kv_to(first):
            return fetch_of(first, KEY_TOKENS, last.instance_id, "fetch")
        return serve(first, "first")


class StateMachine(RuleBasedStateMachine):
    """Any order of events leaves the state consistent, and every counter at 0 once all requests have ended. A held request is
    answered exactly once, unless it ends, or its gateway's stream does."""

    admission: ClassVar[AdmissionSettings] = AdmissionSettings()

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, dict[str, Reservation]] = {"m": {}, "n": {}}
        self.router = state(
            owns_all=False,
            startup_wait_s=1.0,
            gateway_lease_s=40.0,
            place_lease_s=5.0,
            lost_instance_s=5.0,
            affinity_ttl_s=20.0,
            max_keys=25,
            limits=SaturationLimits(max_requests=2, max_kv_usage=0.9),
            queue=QueueSettings(size=3, timeout_s=8.0, tenant_share=0.7),
            life=LifeSettings(failures=1),
            admission=self.admission,
        )
        set_policy(self.router, Patient())
        self.waiting: dict[str, str] = {}  # held request -> who is to get the answer
        self.now = 0.0
        self.stream = 0
        self.stream_of: dict[str, int] = {}
        self.model_of = dict(POOL_OF)
        self.take("m")

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        """Every answer is one that somebody waits for, and goes to who asked last."""
        match event:
            case ev.PlaceRequested(asked, gateway):
                if self.is_anothers(asked.request_id, gateway):
                    return self.handle_of_another(event, asked.request_id)
                self.waiting[asked.request_id] = gateway
            case ev.GatewayReported(gateway, report) if self.is_anothers(report.request_id, gateway):
                return self.handle_of_another(event, report.request_id)
            case ev.StreamOpened(gateway, stream) if self.is_anothers(stream.request.request_id, gateway):
                return self.handle_of_another(event, stream.request.request_id)
            case ev.Finished(request_id):
                self.waiting.pop(request_id, None)
            case ev.StreamOpened(_, stream):
                # The request runs, so it waits no longer: a gateway may serve by itself also while it waits for a first step.
                self.waiting.pop(stream.request.request_id, None)
            case ev.GatewayLost(gateway) | ev.GatewayHello(gateway):
                kept = event.waiting if isinstance(event, ev.GatewayHello) else frozenset()
                self.waiting = {
                    request_id: by for request_id, by in self.waiting.items() if by != gateway or request_id in kept
                }
        if isinstance(event, ev.GatewayHello):
            for stream in event.open_streams:
                if not self.is_anothers(stream.request.request_id, event.gateway_id):
                    self.waiting.pop(stream.request.request_id, None)
        effects = self.router.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, ev.Reserved):
                self.kept[effect.reservation.pool][effect.reservation.request_id] = effect.reservation
            elif isinstance(effect, ev.Released):
                del self.kept[effect.pool][effect.request_id]
            if isinstance(effect, ev.Placed) and effect.step.kind is StepKind.SERVE and effect.step.instance_id == "p":
                assert self.serve_only_as_all_produce(effect.decision.pool)
            if isinstance(effect, ev.Move):
                leaves = self.router.reservations.get(effect.request_id)
                assert leaves is not None
                assert leaves.gateway_id == effect.gateway_id
                there = self.router.instances.get(leaves.instance_id)
                # A gateway lets a lost request leave only if nobody is there: it is told so too if the instance is kept.
                agent_gone = there is None or there.kept
                assert agent_gone if effect.lost else self.router.instances.moves(leaves.instance_id)
            if isinstance(effect, ev.Placed | ev.Refused) and not _of_later_step(event, effect):
                assert self.waiting.pop(effect.request_id) == effect.gateway_id
        assert {held.request.request_id: held.gateway_id for held in self.waiters()} == self.waiting
        return effects

    def waiters(self) -> list[HeldRequest]:
        """The held and the parked requests."""
        return [*self.router.held_requests.queue, *self.router.parked_requests.queue]

    def is_anothers(self, request_id: str, gateway: str) -> bool:
        """Whether another gateway with a stream has a request open, or waits for it."""
        if self.waiting.get(request_id, "") not in ("", gateway):
            return True
        one = self.router.reservations.get(request_id)
        return one is not None and one.lease_until is None and one.gateway_id not in ("", gateway)

    def handle_of_another(self, event: ev.Event, request_id: str) -> list[ev.Effect]:
        """It changes nothing."""
        before = list(self.router.reservations), self.waiters()
        effects = self.router.handle(event, self.now)
        assert (list(self.router.reservations), self.waiters()) == before
        [effect] = [effect for effect in effects if not isinstance(effect, ev.Move)]
        assert isinstance(effect, ev.ReportIgnored | ev.Refused)
        assert effect.request_id == request_id
        return effects

    def serve_only_as_all_produce(self, pool: str) -> bool:
        """Return whether `p` may serve: its agent has not yet reported that `p` only produces KV, or the pool has no other
        instance."""
        instances = self.router.instances
        return instances.get("p") is None or all(
            member.info.instance_id == "p" for member in instances.members(pool, pool)
        )

    @initialize(joined=st.booleans())
    def begin(self, joined: bool) -> None:
        """Half of the time with a fleet that is up."""
        if joined:
            self.take("n")
            for name in POOL_OF:
                self.agent_hello(name, "1", 16)
                self.keys(name, [], 0)
            self.tick(1.0)

    @rule(name=INSTANCES, incarnation=st.sampled_from("12"), size=st.sampled_from([16, 32, 24]))
    def agent_hello(self, name: str, incarnation: str, size: int) -> None:
        self.stream += 1
        known = self.info(name, incarnation=incarnation, block_size=size)
        self.handle(ev.AgentHello(self.stream, known, KEY_SCHEME, 1, 0))
        if size != 24:
            self.stream_of[name] = self.stream

    @rule(
        name=INSTANCES,
        healthy=st.booleans(),
        suspended=st.sampled_from(["", "", "paused"]),
        running=st.integers(0, 1),
        repeats=st.integers(1, 3),
        full=st.booleans(),
    )
    def load(self, name: str, healthy: bool, suspended: str, running: int, repeats: int, full: bool) -> None:
        for _ in range(repeats):
            self.now += 0.1
            sample = Load(
                self.now,
                healthy=healthy,
                suspended=suspended,
                running=running,
                waiting=full,
                kv_usage=0.95 * full,
            )
            self.handle(ev.LoadReported(self.stream_of.get(name, 0), name, sample))

    def info(self, name: str, **changes: Any) -> InstanceInfo:
        known = info(name, model=self.model_of[name], served_names=(), sparse_prefixes=name == "b", **changes)
        assert known.kv_transfer is not None
        return replace(known, kv_transfer=replace(known.kv_transfer, role=KvRole.PRODUCER)) if name == "p" else known

    @rule(name=INSTANCES, same=st.booleans(), busy=st.booleans(), lost=st.booleans())
    def change_model(self, name: str, same: bool, busy: bool, lost: bool) -> None:
        """The engine serves the other pool's model from now on, in the same incarnation or not, `busy` with a request or not.
        `lost`: another router has taken the pool that it was in."""
        before, record = self.model_of[name], self.router.instances.get(name)
        known = record.info.incarnation if record else "2"
        if busy:
            self.send_to(name)
        self.model_of[name] = {"m": "n", "n": "m"}[before]
        self.agent_hello(name, known if same else {"1": "2", "2": "1"}[known], 16)
        if lost:
            self.lose(before, lost=True)

    @rule(name=INSTANCES)
    def hello_without_events(self, name: str) -> None:
        self.stream += 1
        self.stream_of[name] = self.stream
        known = self.info(name, exact_prefix=False, kv_capacity_tokens=80)
        self.handle(ev.AgentHello(self.stream, known, KEY_SCHEME, 1, 0))

    @rule(name=INSTANCES, keys=KEYS, tier=st.integers(1, 3), cleared=st.booleans(), ahead=st.integers(0, 1))
    def delta(self, name: str, keys: list[int], tier: int, cleared: bool, ahead: int) -> None:
        """Report a delta that usually fits the copy: `keys` that are not held are added, and every second one, if
        held, is removed."""
        record = self.router.instances.get(name)
        if record is None:
            return
        held = self.router.index.keys_of(name) if tier == 1 else self.router.lower_tiers.keys_of(name, tier)
        held = set() if cleared else held
        added = [key for key in keys if key not in held]
        removed = [key for key in keys[::2] if key in held]
        message = Delta(record.sync.seq + 1 + ahead, tier, added, removed, cleared)
        self.handle(ev.KeysReported(record.stream_id, name, message))

    @rule(name=INSTANCES, keys=KEYS, seq=st.integers(0, 3))
    def keys(self, name: str, keys: list[int], seq: int) -> None:
        stream = self.stream_of.get(name, 0)
        for message in (
            SnapshotBegin(seq),
            SnapshotChunk(1, keys),
            SnapshotEnd(seq, len(keys), digest_of(1, keys)),
            Delta(seq + 1, 1, [99]),
            Delta(seq + 3, 1, [98]),
        ):
            self.handle(ev.KeysReported(stream, name, message))

    @rule(name=INSTANCES, goodbye=st.booleans())
    def agent_ends(self, name: str, goodbye: bool) -> None:
        stream = self.stream_of.get(name, 0)
        self.handle(ev.AgentGoodbye(stream, name) if goodbye else ev.AgentLost(stream, name))

    @rule(incarnations=st.dictionaries(INSTANCES, st.sampled_from("12")), moving=st.frozensets(INSTANCES))
    def drain(self, incarnations: dict[str, str], moving: frozenset[str]) -> None:
        self.handle(ev.DrainsChanged(incarnations, moving))

    @rule(orders=st.dictionaries(INSTANCES, ORDERS))
    def order(self, orders: dict[str, InstanceOrder]) -> None:
        self.handle(ev.OrdersChanged(orders))

    @rule(
        request_id=REQUESTS,
        gateway=st.one_of(GATEWAYS, st.just("")),
        tokens=st.integers(0, 50_000),
        keys=PROMPTS,
        tenant=st.sampled_from("tu"),
        deadline=st.sampled_from([None, 0.5, 5.0]),
        age=st.sampled_from([0.0, 3.0]),
        priority=st.sampled_from(Priority),
        weight=st.sampled_from([1.0, 3.0]),
        needed=st.sampled_from([None, 0.0, 2.0]),
        again=st.booleans(),
    )
    def place(
        self,
        request_id: str,
        gateway: str,
        tokens: int,
        keys: list[int],
        tenant: str,
        deadline: float,
        age: float,
        priority: Priority = Priority.STANDARD,
        weight: float = 1.0,
        needed: float | None = None,
        again: bool = False,
    ) -> None:
        known = self.router.held_requests.queue.get(request_id) or self.router.parked_requests.queue.get(request_id)
        asked = request(
            request_id,
            tokens=tokens,
            # Every sixth has four sequences; it follows from the tokens, so that the same draws give the same events.
            sequences=1 if tokens % 6 else 4,
            sequence_tokens=0 if tokens % 6 else 4 * tokens,
            keys=tuple(keys),
            session_id=f"s{tokens % 3}",
            tenant=known.request.tenant if known else tenant,
            deadline_s=deadline,
            age_s=age,
            model=_model(request_id),
            priority=priority,
            weight=weight,
            ttft_deadline_s=needed,
            movable=tokens % 3 > 0,
            sliceable_tokens=tokens if tokens % 5 else 0,
        )
        before, anothers = self.router.reservations.get(request_id), self.is_anothers(request_id, gateway)
        effects = self.handle(ev.PlaceRequested(asked, gateway))
        if anothers:
            return
        if not self.router.owned.owns(asked.model) and self.router.instances.pool_of(asked.model):
            assert any(isinstance(effect, ev.Refused) and effect.not_serving for effect in effects)
        elif (
            before is not None
            and self.router.instances.pool_of(asked.model)
            and not self.router.starting(self.now, asked.model)
            and (before.instance_id != "p" or self.serve_only_as_all_produce(before.pool))
        ):
            self.is_told_where_it_is(request_id, effects)
        if again and any(isinstance(effect, ev.Placed) and effect.request_id == request_id for effect in effects):
            self.is_told_where_it_is(request_id, self.handle(ev.PlaceRequested(asked, gateway)))

    def is_told_where_it_is(self, request_id: str, effects: list[ev.Effect]) -> None:
        """Who asks again gets the same answer."""
        [again] = effects
        assert isinstance(again, ev.Placed)
        if (reservation := self.router.reservations.get(request_id)) is not None:
            assert again.step_index == reservation.step_index
            assert again.step == again.decision.result.steps[again.step_index]

    @rule(at=st.integers(0, 7))
    def ask_again(self, at: int) -> None:
        """Its gateway asks for a request that is open."""
        if opened := [
            reservation for reservation in self.router.reservations if reservation.request_id.startswith("r")
        ]:
            one = opened[at % len(opened)]
            self.place(one.request_id, one.gateway_id, one.input_tokens, [], "t", None, 0.0)

    @rule(request_id=REQUESTS)
    def first_token(self, request_id: str) -> None:
        self.handle(ev.FirstToken(request_id))

    @rule(gateway=st.one_of(GATEWAYS, st.just("")), request_id=REQUESTS, what=st.integers(0, 3))
    def tell(self, gateway: str, request_id: str, what: int) -> None:
        """As a gateway tells it, which may not be the request's own."""
        report = (
            ev.FirstToken(request_id),
            ev.StepDone(request_id, 0, ok=True),
            ev.StepDone(request_id, 0, ok=False),
            ev.Finished(request_id, "OK"),
        )[what]
        anothers = self.is_anothers(request_id, gateway)
        if isinstance(report, ev.Finished) and not anothers:
            self.waiting.pop(request_id, None)
        self.handle(ev.GatewayReported(gateway, report))

    @rule(request_id=REQUESTS, ok=st.booleans(), index=STEPS, deadline=st.sampled_from([None, 0.5, 5.0]))
    def step_done(self, request_id: str, ok: bool, index: int, deadline: float | None) -> None:
        self.handle(ev.StepDone(request_id, index, ok, deadline_s=deadline))

    @rule(gateway=GATEWAYS, request_id=REQUESTS, where=INSTANCES, cached=st.integers(0, 20), times=st.integers(1, 2))
    def gateway_goes_on_alone(self, gateway: str, request_id: str, where: str, cached: int, times: int) -> None:
        asked = request(request_id, tokens=10, model=_model(request_id))
        stream = ev.OpenStream(asked, where, Phase.PREFILL, cached)
        if self.is_anothers(request_id, gateway):
            times = 0
            self.handle(ev.StreamOpened(gateway, stream))
        for _ in range(times):
            effects = self.handle(ev.StreamOpened(gateway, stream))
            assert not any(isinstance(effect, ev.Placed) and effect.request_id == request_id for effect in effects)
            assert request_id not in [held.request.request_id for held in self.waiters()]
            if (kept := self.router.reservations.get(request_id)) is not None:
                assert (kept.instance_id, kept.gateway_id) == (where, gateway)

    @rule(name=INSTANCES, waits=st.booleans())
    def fail(self, name: str, waits: bool) -> None:
        """A request on this instance fails. `waits`: time passes until the next request may be on trial there."""
        self.handle(ev.Finished(self.send_to(name), "FAILED"))
        if waits:
            self.tick(2.0)

    def send_to(self, name: str) -> str:
        """A request that can go to no other instance; its id."""
        self.stream += 1
        others = tuple(instance_id for instance_id in POOL_OF if instance_id != name)
        asked = request(f"s{self.stream}", tokens=10, model=self.model_of[name], exclude=others)
        self.handle(ev.PlaceRequested(asked, "g1"))
        return asked.request_id

    @rule(
        request_id=REQUESTS,
        outcome=st.sampled_from(["OK", "OK", "CANCELLED", "FAILED"]),
        cached=st.one_of(st.none(), st.integers(0, 200)),
    )
    def finish(self, request_id: str, outcome: str, cached: int | None) -> None:
        self.handle(ev.Finished(request_id, outcome, cached_tokens=cached))
        assert self.router.reservations.get(request_id) is None

    @rule(keys=PROMPTS, count=st.integers(1, 6))
    def disappoint(self, keys: list[int], count: int) -> None:
        """Run requests whose answers report no cached tokens. Five of these fail the audit of an instance that was predicted to
        have three blocks."""
        for _ in range(count):
            self.stream += 1
            asked = request(f"d{self.stream}", tokens=1_000, keys=tuple(keys))
            self.handle(ev.PlaceRequested(asked, "g1"))
            self.handle(ev.FirstToken(asked.request_id))
            self.handle(ev.Finished(asked.request_id, "OK", cached_tokens=0))

    @rule(
        gateway=GATEWAYS,
        announced=st.lists(REQUESTS, unique=True, max_size=3),
        where=INSTANCES,
        phase=st.sampled_from(Phase),
        waiting=st.frozensets(REQUESTS, max_size=2),
    )
    def gateway_hello(
        self, gateway: str, announced: list[str], where: str, phase: Phase, waiting: frozenset[str]
    ) -> None:
        asked = [request(name, tokens=10, model=_model(name)) for name in announced]
        streams = tuple(ev.OpenStream(asked_request, where, phase, 3) for asked_request in asked)
        self.handle(ev.GatewayHello(gateway, streams, waiting))

    @rule(gateway=GATEWAYS)
    def gateway_lost(self, gateway: str) -> None:
        self.handle(ev.GatewayLost(gateway))

    @rule(seconds=st.floats(0, 10))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(ev.Tick())
        assert all(held.ends_at > self.now for held in self.waiters())

    @rule(pool=st.sampled_from("mn"))
    def take(self, pool: str) -> None:
        self.handle(ev.PoolTaken(pool, tuple(self.kept[pool].values())))

    @rule(
        pool=st.sampled_from("mn"),
        sessions=st.dictionaries(st.sampled_from(["/s1", "/s2"]), INSTANCES, max_size=2),
        last=st.booleans(),
    )
    def read_sessions(self, pool: str, sessions: dict[str, str], last: bool) -> None:
        self.handle(ev.SessionsRead(pool, sessions, last))

    @rule(session=st.sampled_from(["s1", "s2", ""]), gateway=GATEWAYS)
    def end_session(self, session: str, gateway: str) -> None:
        self.handle(ev.SessionEnded("", session, gateway))
        assert not any(self.router.affinity.owner(pool, f"/{session}", self.now) for pool in "mn")

    @rule(pool=st.sampled_from("mn"), lost=st.booleans())
    def lose(self, pool: str, lost: bool) -> None:
        self.handle(ev.PoolLost(pool))
        if lost:
            self.kept[pool] = {}

    @invariant()
    def the_store_holds_what_is_owned(self) -> None:
        for pool, kept in self.kept.items():
            here = {
                reservation.request_id: _kept(reservation) for reservation in self.router.reservations.of_pool(pool)
            }
            if self.router.owned.owns(pool):
                assert here == {key: _kept(reservation) for key, reservation in kept.items()}
            else:
                assert here == {}

    @rule(policy=st.sampled_from([Patient(), Fetching(), make_policy("unified")]))
    def policy(self, policy: Policy) -> None:
        self.handle(ev.PolicySet(policy))

    @invariant()
    def consistent(self) -> None:
        self.router.check_invariants()

    def teardown(self) -> None:
        for gateway in ("g1", "g2"):
            self.handle(ev.GatewayHello(gateway))
        for _ in range(4):
            # The first tick ends open requests by their leases. This places held ones, which the next ticks end in turn.
            self.now += 100.0
            self.handle(ev.Tick())
        assert len(self.router.reservations) == len(self.router.requests) == 0
        assert not self.waiting
        for name in POOL_OF:
            counters = self.router.reservations.counters(name)
            assert (counters.num_requests, counters.pending_prefill_tokens) == (0, 0)
            assert (counters.ongoing_decode_tokens, counters.ongoing_tokens) == (0, 0)


def _model(request_id: str) -> str:
    return "n" if request_id in ("r6", "r7") else "m"


def _kept(reservation: Reservation) -> Reservation:
    """What the store must know of a reservation: not the lease nor the progress, which are this process's own."""
    return replace(reservation, lease_until=None, prefilled_tokens=0)


IndexMachine.TestCase.settings = MACHINE
SyncMachine.TestCase.settings = settings(MACHINE, max_examples=200)
StateMachine.TestCase.settings = settings(MACHINE, max_examples=200)
TestIndex = IndexMachine.TestCase
TestSync = SyncMachine.TestCase
TestState = StateMachine.TestCase


def test_a_held_request_that_is_refused_when_it_is_asked_again_is_held_no_longer() -> None:
    """Found by the machine: its only instance had left, the router was starting anew, and a second answer would have come."""
    machine = StateMachine()
    machine.hello_without_events(name="a")
    machine.place("r0", "g1", 0, [], "t", 60.0, 0.0)
    machine.place("r2", "", 27_115, [18, 4, 13, 22, 25], "t", 60.0, 3.0)
    assert list(machine.router.held_requests.queue)
    machine.agent_ends(name="a", goodbye=True)
    machine.place("r2", "", 1, [], "u", 60.0, 0.0)
    assert not list(machine.router.held_requests.queue)


def test_a_held_request_that_a_gateway_says_it_runs_is_held_no_longer() -> None:
    """Found by the machine: the only instance had left, and with it what told whose pool the model is in."""
    machine = StateMachine()
    machine.hello_without_events(name="a")
    machine.gateway_hello("g1", ["r0", "r1"], "a", Phase.PREFILL, frozenset())
    machine.place("r2", "", 0, [], "t", None, 0.0)
    assert list(machine.router.held_requests.queue)
    machine.agent_ends(name="a", goodbye=True)
    machine.gateway_hello("g1", ["r2"], "a", Phase.PREFILL, frozenset())
    assert not list(machine.router.held_requests.queue)


def test_what_a_gateway_said_to_run_on_a_producer_is_answered_by_another_when_it_asks_again() -> None:
    machine = StateMachine()
    machine.begin(joined=True)
    machine.gateway_goes_on_alone("g1", "r0", "p", 0, 1)
    machine.ask_again(0)
    [reservation] = machine.router.reservations
    assert reservation.instance_id in ("a", "b")


def test_gateways_hear_of_a_lost_agent_whose_instance_is_kept() -> None:
    """Found by the machine: the engine had answered without its agent, and requests may hang there all the same."""
    machine = StateMachine()
    machine.begin(joined=True)
    open_ = [machine.send_to("a") for _ in range(2)]
    machine.agent_ends("a", goodbye=False)
    machine.now += 4.0
    machine.first_token(open_[0])
    machine.now += 2.0
    moves = {effect for effect in machine.handle(ev.Tick()) if isinstance(effect, ev.Move)}
    assert moves == {ev.Move(request_id, "g1", lost=True) for request_id in open_}
    there = machine.router.instances.get("a")
    assert there is not None
    assert there.kept
