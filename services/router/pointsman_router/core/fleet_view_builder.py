"""Builds the FleetView that a policy decides on: the fleet as one request sees it at one moment. Pure.

Most of what a view says of an instance does not depend on the request, and does not change between two decisions. This part is
kept (InstanceRecord.candidate_snapshot) until an event concerns the instance, or until a time at which time alone changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, Use, compatible
from pointsman_router.core.instances.engine_life import CIRCUIT_OPEN, NOT_ANSWERING, SIGN_S
from pointsman_router.core.instances.instance_registry import CandidateSnapshot, InstanceRecord, InstanceRegistry
from pointsman_router.core.instances.saturation import SATURATED, SaturationLimits
from pointsman_router.core.instances.session_shares import CANARY, LEAST_WEIGHTS, SessionShares
from pointsman_router.core.kv_load import LoadPrice, LoadPrices
from pointsman_router.core.learning.fetches import Fetches
from pointsman_router.core.learning.pool_facts import PoolChoices
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.load.recent_migrations import Migrations
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import (
    NONE_REFUSED,
    NOTHING_UNSEEN,
    Candidate,
    EngineTraits,
    FleetView,
    InstanceInfo,
    InstanceState,
    KvRole,
    PlacementRequest,
    PoolFacts,
    PrefillBacklog,
)
from pointsman_router.core.policy.ways import ANSWERING
from pointsman_router.core.prefill_curve import NO_PREFILLS, PrefillCurve, PrefillSums
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerBlocks
from pointsman_router.core.shortlist import MAX_FULL_VIEW, KeptLoads, PoolLoads, Shortlist

UNHEALTHY = "unhealthy"
EXCLUDED_STATES = {
    InstanceState.CORDONED: "cordoned",
    InstanceState.DRAINING: "draining",
    InstanceState.SUSPENDED: "suspended",
}
FAILED_BEFORE = "failed_before"
# Why a request must not be placed on an instance that would get others: its context does not hold the prompt, or it is known to
# differ from the engines that began the answer.
CONTEXT, OTHER_IDENTITY = "context", "other_identity"


class FleetViewBuilder:
    """Builds FleetViews. Changes nothing but cached data. `stale_report_s`: age up to which engines' own figures are used, s."""

    def __init__(
        self,
        instances: InstanceRegistry,
        prefix_knowledge: PrefixKnowledge,
        reservations: Reservations,
        affinity: Affinity,
        migrations: Migrations,
        prefill_observer: PrefillObserver,
        pool_choices: PoolChoices,
        fetches: Fetches,
        held_for: Callable[[str, str], Mapping[str, int]],
        limits: SaturationLimits,
        stale_report_s: float,
    ) -> None:
        """`held_for(pool, request_id)`: how many requests, other than this one, are held for each instance of a pool."""
        self._instances = instances
        self._prefix_knowledge = prefix_knowledge
        self._reservations = reservations
        self._affinity = affinity
        self._migrations = migrations
        self._prefill_observer = prefill_observer
        self.limits = limits
        self._stale_report_s = stale_report_s
        self._loads = KeptLoads(reservations)
        self._pool_choices = pool_choices
        self._fetches = fetches
        self._held_for = held_for

    def least_new(self, request: PlacementRequest, pool: str, now: float) -> int:
        """Return the least tokens of a request's prompt that an instance of `pool` has to compute. Costs as much as view()."""
        candidates = self.view(request, pool, 0, now, shortlisted=True).candidates
        return min((candidate.new_tokens for candidate in candidates), default=request.input_tokens)

    def view(
        self,
        request: PlacementRequest,
        pool: str,
        decision_number: int,
        now: float,
        *,
        shortlisted: bool = False,
        only: str = "",
    ) -> FleetView:
        """Return a view of all instances of `pool` that answer to the request's model; with `shortlisted`, of
        a shortlist of them if they are more than MAX_FULL_VIEW; with `only`, of this one. O(instances considered + look-ups of
        the prompt's keys)."""
        self._follow_reservations()
        owner = self._affinity.owner(pool, request.session, now) if request.session_id else ""
        tokens = request.input_tokens
        # An engine reuses whole blocks of its own size, and always computes the last token itself.
        reusable = max(tokens - 1, 0)
        keys = request.keys if len(request.keys) * KEY_TOKENS <= reusable else request.keys[: reusable // KEY_TOKENS]
        members, unseen = self._instances.members(pool, request.model), NOTHING_UNSEEN
        known: Mapping[PrefixIndex, Mapping[str, int]] = {}
        shares = self._instances.shares(pool, request.model)
        drawn = shares.drawn(pool, request.session or request.request_id) if shares else ()
        if only:
            record = self._instances.get(only)
            members = [record] if record is not None and self._instances.answers(only, request.model) else []
        elif shortlisted and len(members) > MAX_FULL_VIEW:
            loads = self._loads.of(pool, self._instances.lists(pool), members)
            shortlist = self._shortlist(pool, loads, request, keys, shares, (*drawn, owner), decision_number, now)
            if shortlist.members:
                members, known = shortlist
                unseen = loads.unseen(members, self._instances.unwanted(pool))
        snapshots = self._snapshots(members, now)
        seen = [snapshot.candidate for snapshot in snapshots]
        # A shortlist has other instances each time.
        session = "" if known or only else request.session
        blocks, provisional, lower = self._prefix_knowledge.match(keys, seen, known, session)
        priced = self._pricer(pool) if lower else None
        candidates = []
        found_at = blocks.get
        for snapshot in snapshots:
            candidate = snapshot.candidate
            instance_id, cached = candidate.instance_id, 0
            found = found_at(instance_id, 0)
            if found:
                cached = found * KEY_TOKENS if found * KEY_TOKENS < reusable else reusable
                cached -= cached % snapshot.block_size + snapshot.uncertain_tokens
            if priced is not None and instance_id in lower:
                candidate = priced(snapshot, found, lower[instance_id], reusable, tokens)
            elif cached > 0:
                candidate = replace(candidate, cached_tokens=cached, new_tokens=tokens - cached)
            else:
                candidate = replace(candidate, new_tokens=tokens)
            candidates.append(candidate)
        # Needed by few requests only: instances that failed this request before, and provisional tokens.
        for number, candidate in enumerate(candidates if provisional or request.exclude else ()):
            instance_id = candidate.instance_id
            if instance_id in request.exclude and candidate.excluded in _MAY_BE_PLACED:
                candidate = candidates[number] = replace(candidate, excluded=FAILED_BEFORE)
            if instance_id in provisional:
                confirmed = (blocks[instance_id] - provisional[instance_id]) * KEY_TOKENS
                extra = max(candidate.cached_tokens - candidate.kv_load.credit_tokens - confirmed, 0)
                candidates[number] = replace(candidate, provisional_tokens=extra)
        if (unfit := self._unfit(request, pool)) is not None:
            candidates = [
                replace(candidate, excluded=why)
                if candidate.excluded in _MAY_BE_PLACED and (why := unfit(candidate.traits))
                else candidate
                for candidate in candidates
            ]
        if (own := self._reservations.partial_prefill(request.request_id)) is not None:
            candidates = [
                _with_own_remainder(candidate, own) if candidate.instance_id == own.instance_id else candidate
                for candidate in candidates
            ]
        if self._fetches:
            candidates = [
                replace(candidate, transfers=moved)
                if (moved := self._fetches.transfers(candidate.instance_id, keys, now)) is not None
                else candidate
                for candidate in candidates
            ]
        if held := self._held_for(pool, request.request_id):
            candidates = [
                replace(candidate, held_for=held[candidate.instance_id]) if candidate.instance_id in held else candidate
                for candidate in candidates
            ]
        for side, failing in zip(("kv_gives", "kv_takes"), self._fetches.failing(now), strict=True):
            if failing:
                candidates = [
                    replace(candidate, **{side: ""}) if candidate.instance_id in failing else candidate
                    for candidate in candidates
                ]
        if request.single_instance:
            candidates = [replace(candidate, kv_gives="", kv_takes="") for candidate in candidates]
        if candidates and candidates[0].produces_only and all(candidate.produces_only for candidate in candidates):
            candidates = [replace(candidate, produces_only=False) for candidate in candidates]
        if (forgiven := _forgiven(candidates)) is not None:
            candidates = [
                replace(candidate, excluded="") if candidate.excluded == forgiven else candidate
                for candidate in candidates
            ]
        if shares:
            withheld = shares.withheld(candidates, drawn, owner)
            candidates = [
                replace(candidate, excluded=CANARY) if candidate.instance_id in withheld else candidate
                for candidate in candidates
            ]
        kinds = {candidate.prefill_backlog.hardware for candidate in candidates}
        curves = {kind: self._prefill_observer.curve(pool, kind) for kind in sorted(kinds)}
        mean_work = self._prefill_observer.mean_work(pool)
        facts = self._pool_choices.facts(pool, now)
        fetch_price: LoadPrice | UnsetType = UNSET
        if request.sliceable_tokens and any(candidate.kv_gives for candidate in candidates):
            fetch_price = self._fetches.price(pool, max(snapshot.kv_token_bytes for snapshot in snapshots))
        return FleetView(tuple(candidates), owner, decision_number, now, curves, mean_work, unseen, facts, fetch_price)

    def facts(self, pool: str, now: float) -> PoolFacts:
        """Return what is known of `pool` as a whole, as it is used to choose its policy."""
        return self._pool_choices.facts(pool, now)

    def _pricer(self, pool: str) -> Callable[[CandidateSnapshot, int, LowerBlocks, int, int], Candidate]:
        """Return a function that returns the candidate of a snapshot for a prompt of `tokens`, `reusable` of which may be cached:
        it has `found` blocks on its GPU, and the blocks `below` after them in lower tiers."""
        known: dict[tuple[str, int], tuple[LoadPrices, PrefillCurve]] = {}

        def priced(
            snapshot: CandidateSnapshot, found: int, below: LowerBlocks, reusable: int, tokens: int
        ) -> Candidate:
            candidate, block = snapshot.candidate, snapshot.block_size
            kind = candidate.prefill_backlog.hardware, snapshot.kv_token_bytes
            if kind not in known:
                known[kind] = (
                    self._prefill_observer.load_prices(pool, *kind),
                    self._prefill_observer.curve(pool, kind[0]),
                )
            prices, curve = known[kind]
            # An engine loads whole blocks of its own size, too.
            device = min(found * KEY_TOKENS, reusable) // block * block
            hosted = min((found + below.host) * KEY_TOKENS, reusable) // block * block
            stored = min((found + below.host + below.storage) * KEY_TOKENS, reusable) // block * block
            load = prices.load(device, hosted - device, stored - hosted, curve)
            cached = device + load.credit_tokens
            return replace(candidate, cached_tokens=cached, new_tokens=tokens - cached, kv_load=load)

        return priced

    def has_room(self, pool: str, model: str, now: float) -> bool:
        """Return whether a request for `model`, one of the names of `pool`, can be placed on any instance."""
        excluded = self._excluded(pool, model, now)
        return "" in excluded or (SATURATED not in excluded and (UNHEALTHY in excluded or CIRCUIT_OPEN in excluded))

    def saturated(self, pool: str, model: str, now: float) -> bool:
        """Return whether `model` is a name of `pool` that no instance has room for, and at least one of them is saturated."""
        if self._instances.pool_of(model) != pool or self.has_room(pool, model, now):
            return False
        return SATURATED in self._excluded(pool, model, now)

    def _excluded(self, pool: str, model: str, now: float) -> set[str]:
        """Return the reasons for which instances of `pool` that answer to `model` are excluded; "" stands for a placeable one."""
        self._follow_reservations()
        seen = [snapshot.candidate for snapshot in self._snapshots(self._instances.members(pool, model), now)]
        return {candidate.excluded for candidate in seen if not candidate.produces_only} or {
            candidate.excluded for candidate in seen
        }

    def forget_pool(self, pool: str) -> None:
        """Drop what is kept of a pool that was removed. Mutates."""
        self._loads.forget_pool(pool)

    def check_invariants(self) -> None:
        """Raise AssertionError if a kept snapshot differs from one that is built anew."""
        for record in self._instances.records():
            kept = record.candidate_snapshot
            if kept is not None and record.info.instance_id not in self._reservations.touched:
                assert kept == self._snapshot(record, kept.since), record.info.instance_id
        self._loads.changed(self._reservations.touched)
        self._loads.check_invariants()

    def _follow_reservations(self) -> None:
        """Drop the snapshots of instances whose open requests have changed."""
        touched = self._reservations.touched
        for instance_id in touched:
            if (record := self._instances.get(instance_id)) is not None:
                record.candidate_snapshot = None
        self._loads.changed(touched)
        touched.clear()

    def _shortlist(
        self,
        pool: str,
        loads: PoolLoads,
        request: PlacementRequest,
        keys: Sequence[int],
        shares: SessionShares | None,
        named: Sequence[str],
        decision_number: int,
        now: float,
    ) -> Shortlist:
        """Return the instances of a large pool to consider: those that are `named`, and the best of those that are eligible."""

        def chosen(eligible: Callable[[InstanceRecord], bool]) -> Shortlist:
            return loads.chosen(keys, self._prefix_knowledge.indexes(), named, decision_number, eligible, sends)

        placeable = frozenset(("",)) if self._instances.has_healthy(pool) else frozenset(("", UNHEALTHY))
        unfit = self._unfit(request, pool)

        def candidate_of(record: InstanceRecord) -> Candidate:
            snapshot = record.candidate_snapshot
            if snapshot is None or not snapshot.since <= now < snapshot.until:
                snapshot = self._refresh(record, now)
            return snapshot.candidate

        def sends(record: InstanceRecord) -> bool:
            candidate = candidate_of(record)
            asked = request.sliceable_tokens and candidate.instance_id not in request.exclude
            return bool(asked and candidate.kv_gives) and candidate.excluded in ANSWERING

        def eligible(record: InstanceRecord) -> bool:
            candidate = candidate_of(record)
            return (
                candidate.excluded in placeable
                and not candidate.produces_only
                and candidate.instance_id not in request.exclude
                and not (unfit is not None and unfit(record.info.traits))
            )

        def of_weight(least: float, shares: SessionShares) -> Shortlist:
            return chosen(lambda candidate: shares.weight(candidate.info.instance_id) >= least and eligible(candidate))

        if shares is None:
            return chosen(eligible)
        return next(
            (found for least in LEAST_WEIGHTS if (found := of_weight(least, shares)).members), Shortlist([], {})
        )

    def _unfit(self, request: PlacementRequest, pool: str) -> Callable[[EngineTraits | UnsetType], str] | None:
        """Return a function that returns why an engine must not get a request, "" if it may; None if every engine may.

        A prompt that no engine of the pool holds goes to any of them: its length may be an estimate, and an engine says best what
        is wrong with it."""
        contexts, begun = self._instances.contexts(pool, request.model), request.begun_by
        resumed = request.resumed and begun != UNKNOWN_IDENTITY
        if len(contexts) < 2 and not resumed:
            return None
        tokens, output = request.context_tokens, request.max_output_tokens
        held = [context.holds(tokens, output) for context in contexts]
        limited = not all(held) and any(held)
        if not limited and not resumed:
            return None

        def why(traits: EngineTraits | UnsetType) -> str:
            if traits is UNSET:
                return ""
            if resumed and not compatible(begun, traits.identity, Use.ANSWER):
                return OTHER_IDENTITY
            return CONTEXT if limited and not traits.holds(tokens, output) else ""

        return why

    def _snapshots(self, members: Sequence[InstanceRecord], now: float) -> list[CandidateSnapshot]:
        # Here and in _shortlist(), a call for each instance would cost more than the rest.
        return [
            snapshot
            if (snapshot := record.candidate_snapshot) is not None and snapshot.since <= now < snapshot.until
            else self._refresh(record, now)
            for record in members
        ]

    def _prefill_backlog(self, record: InstanceRecord) -> PrefillBacklog:
        info = record.info
        queue, unlisted = self._reservations.queue(info.instance_id)
        remainders, unlisted_remainders = self._reservations.remainders(info.instance_id)
        return PrefillBacklog(
            queue=queue,
            advanced_at=self._prefill_observer.advanced_at(info.instance_id) if queue else 0.0,
            remainders=remainders,
            requests=self._reservations.num_prefills(info.instance_id),
            chunk_limit=info.long_prefill_token_threshold,
            block_size=info.block_size,
            hardware=info.hardware,
            unlisted=unlisted,
            unlisted_remainders=unlisted_remainders,
            answer_began_at=self._reservations.answer_began_at(info.instance_id),
        )

    def _refresh(self, record: InstanceRecord, now: float) -> CandidateSnapshot:
        record.candidate_snapshot = snapshot = self._snapshot(record, now)
        return snapshot

    def _snapshot(self, record: InstanceRecord, now: float) -> CandidateSnapshot:
        info, load, state, life = record.info, record.load, record.state, record.life
        kv = info.kv_transfer
        counters = self._reservations.counters(info.instance_id)
        fresh_until = load.sampled_at + self._stale_report_s if load else -inf
        stale = now > fresh_until
        saturated = self.limits.saturated(counters.num_requests, None if stale else load)
        changes_at = (
            fresh_until,
            life.until,
            life.alone_until,
            life.sign_at + SIGN_S if life.opened or state is InstanceState.UNHEALTHY else -inf,
            self._migrations.next_end(info.instance_id, now),
            *self._prefix_knowledge.source_changes_at(record),
        )
        return CandidateSnapshot(
            candidate=Candidate(
                instance_id=info.instance_id,
                incarnation=info.incarnation,
                state=state,
                cached_tokens=0,
                new_tokens=0,
                num_requests=counters.num_requests,
                pending_prefill_tokens=counters.pending_prefill_tokens,
                ongoing_decode_tokens=counters.ongoing_decode_tokens,
                ongoing_tokens=counters.ongoing_tokens,
                running=load.running if load else 0,
                waiting=load.waiting if load else 0,
                kv_usage=load.kv_usage if load else 0.0,
                reported_at=load.sampled_at if load else None,
                excluded=EXCLUDED_STATES.get(state)
                or life.excluded(now, agent_gone=record.lost_at is not None)
                # What answers is alive, whatever its agent says.
                or (UNHEALTHY if state is InstanceState.UNHEALTHY and now > life.sign_at + SIGN_S else "")
                or (SATURATED if saturated else ""),
                recent_migrations=self._migrations.count(info.instance_id, now),
                kv_capacity_tokens=info.kv_capacity_tokens,
                stale=stale,
                prefix_source=self._prefix_knowledge.source(record, now),
                kv_gives=_kv_kind(info, KvRole.PRODUCER),
                kv_takes=_kv_kind(info, KvRole.CONSUMER),
                kv_url=kv.bootstrap_url if kv is not None else "",
                kv_engine_id=kv.engine_id if kv is not None else "",
                kv_refuses=kv.refused if kv is not None else NONE_REFUSED,
                prefill_backlog=self._prefill_backlog(record),
                produces_only=info.produces_only,
                traits=info.traits,
            ),
            block_size=info.block_size,
            uncertain_tokens=info.uncertain_blocks * info.block_size,
            kv_token_bytes=info.kv_token_bytes,
            since=now,
            until=min([moment for moment in changes_at if moment >= now], default=inf),
        )


def _kv_kind(info: InstanceInfo, side: KvRole) -> str:
    """Return the kind of KV that an instance can send (`side` PRODUCER) or receive (CONSUMER); empty if it cannot."""
    kv = info.kv_transfer
    if kv is None or kv.role not in (KvRole.BOTH, side):
        return ""
    return info.kv_kind


def _with_own_remainder(candidate: Candidate, own: Reservation) -> Candidate:
    """Return `candidate`, where a slice of the request's own prompt is computed, with the rest of this prompt listed among its
    remainders instead of included in the sums."""
    backlog, others = candidate.prefill_backlog, candidate.prefill_backlog.unlisted_remainders
    if not others.prefills or own.remainder in backlog.remainders:
        return candidate
    _, left, there = own.remainder
    backlog = replace(
        backlog,
        remainders=(own.remainder, *backlog.remainders),
        unlisted_remainders=PrefillSums(
            others.prefills - 1, others.tokens - left, others.pairs - left * (2 * there + left)
        )
        if others.prefills > 1
        else NO_PREFILLS,
    )
    return replace(candidate, prefill_backlog=backlog)


_MAY_BE_PLACED = frozenset(("", SATURATED, UNHEALTHY, CIRCUIT_OPEN, NOT_ANSWERING))


def _forgiven(candidates: Sequence[Candidate]) -> str | None:
    """Return the reason for exclusion that does not count, since all instances that could serve have it; None: all count.

    That an agent calls an engine unhealthy counts only while another one is healthy: agents that reach no engine's metrics would
    take a working pool out. An instance that may fail is better than none, one that answers nothing (NOT_ANSWERING) is not."""
    found = set()
    for candidate in candidates:
        if not candidate.produces_only:
            if candidate.excluded in ("", SATURATED) and candidate.state is not InstanceState.UNHEALTHY:
                return None
            found.add(candidate.excluded)
    if UNHEALTHY in found:
        return UNHEALTHY
    return CIRCUIT_OPEN if CIRCUIT_OPEN in found and not found & {"", SATURATED} else None
