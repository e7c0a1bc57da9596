"""The registry of instances: their state, and which of them serve a model. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from math import inf

import msgspec

from pointsman_router.core.instances.engine_life import SILENCE, EngineLife, PoolAnswers
from pointsman_router.core.instances.event_trust import CountedHits, EventTrust
from pointsman_router.core.instances.instance_orders import NO_ORDER, InstanceOrder
from pointsman_router.core.instances.key_report_receiver import ReportSync
from pointsman_router.core.instances.pool_differences import common_traits, differing, most
from pointsman_router.core.instances.prediction_audit import PredictionAudit
from pointsman_router.core.instances.session_shares import SessionShares
from pointsman_router.core.instances.stale_reservations import IdleReports
from pointsman_router.core.placement_types import Candidate, EngineTraits, InstanceInfo, InstanceState, Load
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers

# How long the announcement of an instance by another agent is shown, s. Such an agent asks again every 10 s.
RIVAL_SHOWN_S = 60.0


class CandidateSnapshot(msgspec.Struct, frozen=True, gc=False):
    """The part of a candidate that does not depend on the request."""

    candidate: Candidate  # without cached and new tokens
    block_size: int  # in tokens
    uncertain_tokens: int  # at the end of a known prefix, that a prompt can miss
    kv_token_bytes: int  # KV of one token, bytes; 0 if unknown
    since: float  # valid for decisions from then, s
    until: float  # and before then, s


@dataclass(slots=True)
class InstanceRecord:
    """One instance: its identity, the state of its reports, and its last load. Times are in s on the router's clock."""

    info: InstanceInfo  # as in its agent's last hello
    sync: ReportSync  # the copy of its keys, on the GPU and below, by its agent's reports
    stream_id: int  # of its agent
    heard_at: float  # when its agent's last message came
    greeted_seq: int = 0  # number of its agent's last change of keys before the stream began
    report_interval_s: float = 0.0  # maximum interval between two of its agent's messages; 0: unknown
    load_interval_s: float = 0.0  # minimum interval between two loads that the agent received; 0: none
    key_interval_s: float = 0.0  # the same for changes of keys
    accepts_pace: bool = False  # whether the agent accepts such intervals
    agent_id: str = ""  # of its agent; empty: unknown
    lost_at: float | None = None  # when its stream ended without a goodbye; None: it has one
    kept: bool = False  # whether it is in the fleet only because its engine answers, or nobody else does
    draining: bool = False  # whether operators drain this incarnation; the next one is not drained
    order: InstanceOrder = NO_ORDER  # the operators'
    rival: tuple[str, float] = ("", -inf)  # who else announced it and was refused, and when
    load: Load | None = None  # None before the first report
    generated_at: float = -inf  # when a load first had the newest count of generated tokens
    trust: EventTrust = field(default_factory=EventTrust)  # of its events, in this incarnation
    counted_hits: CountedHits = field(default_factory=CountedHits)  # of answers without usage details
    # Of the keys that come from events.
    prediction_audit: PredictionAudit = field(default_factory=PredictionAudit)
    # Of the approximate keys.
    placement_audit: PredictionAudit = field(default_factory=PredictionAudit)
    # As prediction_audit, of the tokens that the instance should load from lower tiers.
    load_audit: PredictionAudit = field(default_factory=PredictionAudit)
    idle_reports: IdleReports = field(default_factory=IdleReports)  # by which stale reservations are found
    life: EngineLife = field(default_factory=EngineLife)  # anew with each incarnation and owner of the pool
    candidate_snapshot: CandidateSnapshot | None = None  # kept until forget_snapshot (fleet_view_builder.py)

    def become(self, other: InstanceRecord) -> None:
        """Copy all fields of another incarnation's record, so that lists of instances keep this record. Mutates."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(other, field_.name))

    @property
    def state(self) -> InstanceState:
        """The first of CORDONED, DRAINING, UNHEALTHY, SUSPENDED, LOST, SYNCING that applies, else READY."""
        if self.order.cordoned:
            return InstanceState.CORDONED
        return InstanceState.DRAINING if self.draining else self.underlying_state

    @property
    def underlying_state(self) -> InstanceState:
        """The state without operators' orders and drains."""
        # Read for every instance in each tick.
        if (load := self.load) is not None:
            if not load.healthy:
                return InstanceState.UNHEALTHY
            if load.suspended:
                return InstanceState.SUSPENDED
        if self.lost_at is not None:
            return InstanceState.LOST
        if self.info.exact_prefix and self.sync.is_incomplete:
            return InstanceState.SYNCING
        return InstanceState.READY

    def set_load(self, load: Load, now: float) -> None:
        """Set the newest load. Mutates."""
        if self.load is None or self.load.generation_tokens != load.generation_tokens:
            self.generated_at = now
        self.load = load

    def computes_nothing(self, for_s: float, now: float) -> bool:
        """Return whether the engine's loads have come until lately, and its count of generated tokens has stood still for
        `for_s`; False if it has no such count."""
        return self._counts(for_s, now) and now - self.generated_at >= for_s

    def generates(self, for_s: float, now: float) -> bool:
        """Return whether the engine's loads have come until lately, and its count of generated tokens has grown in `for_s`."""
        return self._counts(for_s, now) and now - self.generated_at < for_s

    def _counts(self, for_s: float, now: float) -> bool:
        load = self.load
        return load is not None and load.generation_tokens is not None and now - load.sampled_at <= for_s / 2

    def forget_snapshot(self) -> None:
        """Drop the candidate snapshot, because something that decisions see of the instance has changed. Mutates."""
        self.candidate_snapshot = None

    @property
    def follows_events(self) -> bool:
        """Whether the router keeps a copy of the keys in the instance's events, trusted or not."""
        return self.info.exact_prefix and not self.sync.full

    @property
    def exact(self) -> bool:
        """Whether the instance's keys come from its events alone; otherwise from the router's own placements."""
        return self.follows_events and self.trust.proven

    @property
    def needs_placements(self) -> bool:
        """Whether the approximate keys count, alone or beside those in the instance's events."""
        return not self.exact or self.trust.doubted or self.lost_at is not None

    @property
    def audit_failures(self) -> int:
        """How often in this incarnation its answers persistently had fewer cached tokens than predicted."""
        return self.prediction_audit.failures + self.placement_audit.failures

    @property
    def prefix_reason(self) -> str:
        """Why the instance's keys do not come from its events; empty if they do."""
        if self.lost_at is not None:
            return "its agent is gone: its keys are those last reported, and the router's own placements"
        if not self.info.exact_prefix:
            return self.info.prefix_reason or "no KV events"
        if self.sync.full:
            return "the router's index is full"
        problem = self.load.events_problem if self.load is not None else ""
        return f"{self.trust.reason}; its agent: {problem}" if self.trust.reason and problem else self.trust.reason


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The names that a model's instances answer to, its placeable instances, and those that get no requests now."""

    model: str  # name of the pool
    served_names: tuple[str, ...]  # without `model` and adapters, sorted; each is a name of some instance
    lora_names: tuple[str, ...]  # of adapters
    model_root: str  # that of the most instances
    max_model_len: int  # the largest of the instances that answer, tokens; 0 if unknown
    instances: Mapping[str, InstanceInfo]  # by id, in no order
    others: Mapping[str, InstanceInfo]  # likewise


class _Traits:
    """The names and limits of an instance, and whether it only produces KV, as a dict key. The hash is computed once, since there
    may be hundreds of names."""

    __slots__ = ("_hash", "context", "lora_names", "produces_only", "served_names")

    def __init__(self, info: InstanceInfo) -> None:
        self.served_names, self.lora_names = info.served_names, info.lora_names
        self.context, self.produces_only = info.context, info.produces_only
        self._hash = hash((self.served_names, self.lora_names, self.context, self.produces_only))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Traits) and (
            self.context == other.context
            and self.produces_only == other.produces_only
            and self.served_names == other.served_names
            and self.lora_names == other.lora_names
        )

    @property
    def names(self) -> frozenset[str]:
        """The names that the instance answers to, besides its pool's name."""
        return frozenset(self.served_names + self.lora_names)


class _Pool:
    """All instances of one model, and what gateways are sent about them. Each change updates one instance, since a pass over a
    thousand instances per change would block the event loop."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.records: list[InstanceRecord] = []  # by id
        # _members: name of the pool -> the instances that answer to it. Names with the same instances share one list (`lists`).
        # Both are cleared when instances are added or removed.
        self._members: dict[str, list[InstanceRecord]] = {}
        self.lists: dict[frozenset[_Traits], list[InstanceRecord]] = {}
        # id() of such a list -> the weights of its placeable instances. Cleared when these instances, weights or lists change.
        self._shares: dict[int, SessionShares] = {}
        # Name -> the contexts of the instances that answer to it. Cleared with the lists.
        self._contexts: dict[str, frozenset[EngineTraits]] = {}
        self._common: EngineTraits | None = None  # cleared when instances are added, removed or described
        # Traits -> id -> instance. Most instances are alike, so there are few different traits.
        self._alike: dict[_Traits, dict[str, InstanceRecord]] = {}
        # Name, other than the pool's -> the traits that have it.
        self._answering: dict[str, set[_Traits]] = {}
        # The instances by how good they are (_tier): id -> info.
        self._tiers: tuple[dict[str, InstanceInfo], ...] = ({}, {}, {}, {})
        self.answers = PoolAnswers()
        self._info: PoolInfo | None = None

    def add(self, record: InstanceRecord) -> None:
        """Add a new instance. Mutates."""
        insort(self.records, record, key=_id_of)
        traits = _Traits(record.info)
        if traits not in self._alike:
            self._alike[traits] = {}
            for name in traits.names:
                self._answering.setdefault(name, set()).add(traits)
        self._alike[traits][_id_of(record)] = record
        self._list_anew()
        self.refresh(record)

    def remove(self, record: InstanceRecord) -> None:
        """Remove an instance, whose `info` must still be the one with which it was added. Mutates."""
        del self.records[bisect_left(self.records, _id_of(record), key=_id_of)]
        traits = _Traits(record.info)
        del self._alike[traits][_id_of(record)]
        if not self._alike[traits]:
            del self._alike[traits]
            for name in traits.names:
                self._answering[name].discard(traits)
                if not self._answering[name]:
                    del self._answering[name]
        for infos in self._tiers:
            infos.pop(record.info.instance_id, None)
        self._list_anew()

    def members(self, name: str) -> list[InstanceRecord]:
        """Return the instances that answer to a name, in order of ids."""
        members = self._members.get(name)
        if members is None:
            alike = frozenset(self._traits_of(name))
            if alike not in self.lists:
                found = (self._alike[traits].values() for traits in alike)
                self.lists[alike] = sorted(chain.from_iterable(found), key=_id_of)
            members = self._members[name] = self.lists[alike]
        return members

    def contexts(self, name: str) -> frozenset[EngineTraits]:
        """Return the different contexts of the instances that answer to a name, tokens (0: unknown); those of instances that only
        produce KV count where no other answers."""
        contexts = self._contexts.get(name)
        if contexts is None:
            alike = self._traits_of(name)
            answering = [traits for traits in alike if not traits.produces_only] or alike
            contexts = self._contexts[name] = frozenset([traits.context for traits in answering])
        return contexts

    def _traits_of(self, name: str) -> Collection[_Traits]:
        return self._alike.keys() if name == self.model else self._answering.get(name, ())

    def common(self) -> EngineTraits:
        """Return the identity and the limits of the most instances."""
        if self._common is None:
            self._common = common_traits(record.info for record in self.records)
        return self._common

    def shares(self, name: str) -> SessionShares:
        """Return the weights of the instances that answer to a name."""
        members = self.members(name)
        shares = self._shares.get(id(members))
        if shares is None:
            shares = self._shares[id(members)] = _shares_of(members)
        return shares

    def weigh_anew(self) -> None:
        """Drop the cached weights, because weights have changed. Mutates."""
        self._shares = {}

    def described(self, record: InstanceRecord) -> None:
        """Apply a changed `info` of an instance whose traits have not changed. Mutates."""
        self._shares, self._common, self._info = {}, None, None
        self.refresh(record)

    def refresh(self, record: InstanceRecord) -> None:
        """Apply whether an instance is placeable, healthy, and in by its life. Mutates."""
        instance_id, tier = record.info.instance_id, _tier(record)
        self._shares = {}  # an instance that is out may have become unhealthy
        for number, infos in enumerate(self._tiers):
            if number == tier:
                if infos.get(instance_id) is not record.info:
                    infos[instance_id] = record.info
                    self._info = None
            elif infos.pop(instance_id, None) is not None:
                self._info = None

    @property
    def has_healthy(self) -> bool:
        """Whether an instance may be placed on that is in by its life, and healthy by its agent."""
        return bool(self._tiers[0])

    @property
    def unwanted(self) -> Collection[str]:
        """The instances that get no requests: those that operators or the engines themselves want none on, and those that fail
        while others do not."""
        wanted = self._announced()
        return list(chain.from_iterable(infos for infos in self._tiers if infos is not wanted))

    def _announced(self) -> dict[str, InstanceInfo]:
        # Instances that fail are better than none, as in the router's own decisions.
        return next(filter(None, self._tiers[:_UNWANTED]), {})

    def names(self) -> set[str]:
        """Return all names that instances answer to, besides the pool's name."""
        return set(self._answering)

    def info(self) -> PoolInfo:
        """Return what gateways are sent about the pool; the same object until it changes."""
        if self._info is None:
            announced = self._announced()
            self._info = PoolInfo(
                model=self.model,
                served_names=tuple(
                    sorted({name for record in self._alike for name in record.served_names} - {self.model})
                ),
                lora_names=tuple(sorted({name for record in self._alike for name in record.lora_names})),
                model_root=most((record.info.model_root for record in self.records if record.info.model_root), ""),
                max_model_len=max((context.max_model_len for context in self.contexts(self.model)), default=0),
                instances=dict(announced),
                others=dict(chain.from_iterable(infos.items() for infos in self._tiers if infos is not announced)),
            )
        return self._info

    def check_invariants(self) -> None:
        """Raise AssertionError if cached data differs from the records."""
        assert self.records == sorted(self.records, key=_id_of)
        alike: dict[_Traits, dict[str, InstanceRecord]] = {}
        for record in self.records:
            alike.setdefault(_Traits(record.info), {})[_id_of(record)] = record
        assert self._alike == alike
        assert self._answering == {
            name: {record for record in alike if name in record.names}
            for name in {name for record in alike for name in record.names}
        }
        tiers: list[list[InstanceRecord]] = [[], [], []]
        for record in self.records:
            if (tier := _tier(record)) != _UNWANTED:
                tiers[tier].append(record)
        announced = next(filter(None, tiers), [])
        info = self.info()
        assert {instance_id: id(known) for instance_id, known in info.instances.items()} == {
            _id_of(record): id(record.info) for record in announced
        }
        assert {instance_id: id(known) for instance_id, known in info.others.items()} == {
            _id_of(record): id(record.info) for record in self.records if record not in announced
        }
        for name, members in self._members.items():
            assert members == [record for record in self.records if _answers(record, name)]
            assert any(members is listed for listed in self.lists.values())
        for name, contexts in self._contexts.items():
            infos = [record.info for record in self.records if _answers(record, name)]
            assert contexts == {info.context for info in [i for i in infos if not i.produces_only] or infos}
        for members in self.lists.values():
            if (shares := self._shares.get(id(members))) is not None:
                assert vars(shares) == vars(_shares_of(members))
        assert self._shares.keys() <= {id(members) for members in self.lists.values()}

    def _list_anew(self) -> None:
        self._members, self.lists, self._shares, self._contexts, self._common, self._info = {}, {}, {}, {}, None, None


_PLACEABLE = frozenset({InstanceState.READY, InstanceState.SYNCING, InstanceState.LOST})
_UNWANTED = 3


def _tier(record: InstanceRecord) -> int:
    """Return 0 for an instance that is in and healthy, 1 if its agent calls it unhealthy, 2 if it is out; _UNWANTED if operators
    or the engine itself want no requests there."""
    if record.state not in (*_PLACEABLE, InstanceState.UNHEALTHY):
        return _UNWANTED
    return 2 if record.life.opened else int(record.state is InstanceState.UNHEALTHY)


def _shares_of(members: Iterable[InstanceRecord]) -> SessionShares:
    return SessionShares(
        [
            (_id_of(record), record.order.weight, record.info.produces_only)
            for record in members
            if record.state in _PLACEABLE
        ]
    )


def _id_of(record: InstanceRecord) -> str:
    return record.info.instance_id


class InstanceRegistry:
    """All instances by id, and the model names that they serve.

    `shared_names`: names that several pools answer to -> these pools. Requests for such a name go to the pool with that name, or
    to the first pool by name. `orders`: operators' orders by instance id, also for unknown instances.
    """

    def __init__(self, index: PrefixIndex, lower_tiers: LowerTiers | None = None) -> None:
        self._index = index
        self._lower_tiers = LowerTiers() if lower_tiers is None else lower_tiers
        self._records: dict[str, InstanceRecord] = {}
        self._pools: dict[str, _Pool] = {}
        self._named: dict[str, set[str]] = {}
        self._pool_of: dict[str, str] = {}
        self.shared_names: dict[str, list[str]] = {}
        self._drained: Mapping[str, str] = {}
        self._moving: frozenset[str] = frozenset()
        self.orders: Mapping[str, InstanceOrder] = {}
        self._weighted: frozenset[str] = frozenset()
        self._left: set[str] = set()
        self._silent: set[str] = set()

    def get(self, instance_id: str) -> InstanceRecord | None:
        """Return the record of an instance, or None."""
        return self._records.get(instance_id)

    def records(self) -> list[InstanceRecord]:
        """Return all instances, in order of ids."""
        return [self._records[instance_id] for instance_id in sorted(self._records)]

    def unordered(self) -> Iterable[InstanceRecord]:
        """Return all instances, in no order."""
        return self._records.values()

    def pool_of(self, model: str) -> str:
        """Return the pool of a name (pool, served name or LoRA adapter), or ""."""
        return self._pool_of.get(model, "")

    def members(self, pool: str, model: str) -> list[InstanceRecord]:
        """Return the pool's instances that answer to `model`, one of its names, in order of ids; an adapter may be loaded on some
        instances only. Names with the same instances get the same list object, until an instance of the pool is added or
        removed."""
        known = self._pools.get(pool)
        return known.members(model) if known is not None else []

    def contexts(self, pool: str, model: str) -> frozenset[EngineTraits]:
        """Return the different contexts of the pool's instances that answer to `model`, one of its names, in tokens; 0:
        unknown."""
        known = self._pools.get(pool)
        return known.contexts(model) if known is not None else frozenset()

    def differing(self, record: InstanceRecord) -> dict[str, str]:
        """Return what an instance differs in from the most of its pool: name -> both values in words. Empty if the pool is gone,
        as that of a record may be after a pause."""
        pool = self._pools.get(record.info.model)
        return {} if pool is None else differing(record.info, pool.common())

    def lists(self, pool: str) -> object:
        """Return an identity of the pool's lists: a new object whenever an instance of the pool is added or removed."""
        known = self._pools.get(pool)
        return known.lists if known is not None else None

    def shares(self, pool: str, model: str) -> SessionShares | None:
        """Return the weights of the instances of `pool` that answer to `model`, one of its names; None if all have full
        weight."""
        if not self._weighted or (known := self._pools.get(pool)) is None:
            return None
        return known.shares(model) or None

    def has_healthy(self, pool: str) -> bool:
        """Return whether an instance of the pool may be placed on that is in by its life, and healthy by its agent."""
        known = self._pools.get(pool)
        return known is not None and known.has_healthy

    def unwanted(self, pool: str) -> Collection[str]:
        """Return the ids of the pool's instances that get no requests (_Pool.unwanted)."""
        known = self._pools.get(pool)
        return known.unwanted if known is not None else ()

    def doubts(self, instance_id: str) -> bool:
        """Return whether an error of the instance is to be compared with what another instance of its pool answers."""
        record = self._records.get(instance_id)
        return record is not None and record.life.doubted and len(self._pools[record.info.model].records) > 1

    def answers(self, instance_id: str, model: str) -> bool:
        """Return whether the instance is known and `model` is one of its names."""
        record = self._records.get(instance_id)
        return record is not None and _answers(record, model)

    def leaves_answers_to_others(self, instance_id: str, pool: str, model: str) -> bool:
        """Return whether the instance only produces KV, and another instance of `pool` answers requests for `model`."""
        record = self._records.get(instance_id)
        return (
            record is not None
            and record.info.produces_only
            and any(not record.info.produces_only for record in self.members(pool, model))
        )

    def add(self, info: InstanceInfo, stream_id: int, now: float) -> InstanceRecord:
        """Add an instance, or a new incarnation or stream of a known one; return its record. Mutates.

        A known incarnation keeps its keys, so that its agent may resume. A new incarnation starts without keys, and ends a drain.
        Orders stay.
        """
        record = self._records.get(info.instance_id)
        # The pool's lists are rebuilt when an instance is new, or changes its names, but not when an instance restarts: there may
        # be a thousand restarts.
        stays = record is not None and record.info.model == info.model and _Traits(record.info) == _Traits(info)
        if record is not None and not stays:
            self._leave_pool(record)
        if record is not None and record.info.incarnation == info.incarnation:
            record.info, record.stream_id, record.heard_at, record.lost_at = info, stream_id, now, None
            record.kept = False
            record.forget_snapshot()
        else:
            sync = ReportSync(info.instance_id, self._index, self._lower_tiers)
            sync.reset()
            order = self.orders.get(info.instance_id, NO_ORDER)
            begun = InstanceRecord(info, sync, stream_id, now, draining=self._drains(info), order=order)
            if record is None:
                record = self._records[info.instance_id] = begun
            else:
                record.become(begun)
        self._index.set_sparse(info.instance_id, info.sparse_prefixes)
        self._lower_tiers.share(info.instance_id, info.model, info.shared_storage, info.identity)
        if info.model not in self._pools:
            self._pools[info.model] = _Pool(info.model)
        pool = self._pools[info.model]
        if record.life.pool is not pool.answers:
            record.life = EngineLife(pool.answers)
            self._silent.discard(info.instance_id)
        if stays:
            pool.described(record)
        else:
            pool.add(record)
            self._name_pools()
        return record

    def forget_snapshot(self, instance_id: str) -> None:
        """Drop the candidate snapshot of an instance; no effect if the instance is unknown. Mutates."""
        if (record := self._records.get(instance_id)) is not None:
            record.forget_snapshot()

    def refresh(self, record: InstanceRecord) -> None:
        """Apply that a known instance's health or life has changed: what gateways are sent, and whose requests are to leave.
        Mutates."""
        self._pools[record.info.model].refresh(record)
        if record.life.opened and record.life.cause == SILENCE:
            self._silent.add(record.info.instance_id)
        else:
            self._silent.discard(record.info.instance_id)

    def live_anew(self, record: InstanceRecord) -> None:
        """Forget the evidence about a known instance, because its pool has another owner. Mutates."""
        record.life = EngineLife(self._pools[record.info.model].answers)
        record.forget_snapshot()
        self.refresh(record)

    def drain(self, incarnations: Mapping[str, str], moving: frozenset[str] = frozenset()) -> bool:
        """Set the draining instances: instance id -> incarnation, known or not; `moving`: those whose requests are to leave them.
        Return whether the state of any instance changes. Mutates."""
        self._drained, self._moving = incarnations, moving
        changed = [record for record in self._records.values() if record.draining is not self._drains(record.info)]
        for record in changed:
            record.draining = not record.draining
            record.forget_snapshot()
            self.refresh(record)
        return bool(changed)

    def order(self, orders: Mapping[str, InstanceOrder]) -> bool:
        """Set the orders, for every incarnation of instances known or not. Return whether any known instance changes. Mutates."""
        self.orders = orders
        self._weighted = frozenset(name for name, order in orders.items() if order.weight < 1.0)
        changed = [
            record for record in self._records.values() if record.order != orders.get(record.info.instance_id, NO_ORDER)
        ]
        for record in changed:
            record.order = orders.get(record.info.instance_id, NO_ORDER)
            record.forget_snapshot()
            self._pools[record.info.model].weigh_anew()
            self.refresh(record)
        return bool(changed)

    def _drains(self, info: InstanceInfo) -> bool:
        return self._drained.get(info.instance_id) == info.incarnation

    def empties(self, instance_id: str) -> bool:
        """Return whether operators empty the instance."""
        record = self._records.get(instance_id)
        return record is not None and instance_id in self._moving and record.draining

    def moves(self, instance_id: str) -> bool:
        """Return whether an instance's requests are to leave it: operators empty it, or its engine is silent."""
        return instance_id in self._silent or self.empties(instance_id)

    def moving(self) -> list[InstanceRecord]:
        """Return the instances that their requests are to leave."""
        if not self._moving and not self._silent:
            return []
        leaving = sorted(self._moving | self._silent)
        return [self._records[instance_id] for instance_id in leaving if self.moves(instance_id)]

    def remove(self, instance_id: str) -> None:
        """Remove an instance and its keys. Mutates."""
        record = self._records.pop(instance_id)
        self._silent.discard(instance_id)
        record.sync.reset()
        self._index.set_sparse(instance_id, False)
        self._lower_tiers.share(instance_id, "", "")
        self._leave_pool(record)
        self._name_pools()

    def pools_left(self) -> set[str]:
        """Return the pools that lost their last instance since the last call, even if they have one again. Mutates."""
        left, self._left = self._left, set()
        return left

    def pools(self) -> list[PoolInfo]:
        """Return what gateways are sent: the pools in order of names. An unchanged pool is the same object as before."""
        return [self._pools[model].info() for model in sorted(self._pools)]

    def check_invariants(self) -> None:
        """Raise AssertionError if the pools differ from the records."""
        for model, pool in self._pools.items():
            assert pool.records == [record for record in self.records() if record.info.model == model] != []
            pool.check_invariants()
        assert sum(len(pool.records) for pool in self._pools.values()) == len(self._records)
        assert self._named == {model: pool.names() for model, pool in self._pools.items()}
        for record in self._records.values():
            assert record.order == self.orders.get(record.info.instance_id, NO_ORDER)
            assert record.life.pool is self._pools[record.info.model].answers
            silent = bool(record.life.opened) and record.life.cause == SILENCE
            assert silent == (record.info.instance_id in self._silent), record.info.instance_id

    def _leave_pool(self, record: InstanceRecord) -> None:
        pool = self._pools[record.info.model]
        pool.remove(record)
        if not pool.records:
            del self._pools[record.info.model]
            self._left.add(record.info.model)

    def _name_pools(self) -> None:
        named = {model: pool.names() for model, pool in self._pools.items()}
        if named == self._named:
            return
        self._named = named
        pools_of: dict[str, list[str]] = {pool: [pool] for pool in named}
        for pool, names in sorted(named.items()):
            for name in names:
                if pool not in (pools := pools_of.setdefault(name, [])):
                    pools.append(pool)
        self._pool_of = {name: pools[0] for name, pools in pools_of.items()}
        self.shared_names = {name: pools for name, pools in sorted(pools_of.items()) if len(pools) > 1}


def _answers(record: InstanceRecord, model: str) -> bool:
    info = record.info
    return model == info.model or model in info.served_names or model in info.lora_names
