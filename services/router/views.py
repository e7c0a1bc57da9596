"""What a policy gets to see: the fleet as it is for one request, at one moment. Pure.

Most of what is seen of an instance does not depend on the request, and does not change between one decision and the next. It is
kept (InstanceRecord.sight) until an event concerns the instance or until a moment comes at which time alone changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from services.common.keys import KEY_TOKENS
from services.router.affinity import Affinity
from services.router.circuit import CIRCUIT_OPEN
from services.router.domain import (
    Candidate,
    FleetView,
    InstanceInfo,
    InstanceState,
    KvRole,
    PlacementRequest,
    Prefilling,
)
from services.router.fleet import Fleet, InstanceRecord, Sight
from services.router.migrations import Migrations
from services.router.prefills import Prefills
from services.router.reservations import Reservations
from services.router.saturation import SATURATED, Limits
from services.router.truth import Truth

EXCLUDED_STATES = {InstanceState.DRAINING: "draining", InstanceState.UNHEALTHY: "unhealthy"}
FAILED_BEFORE = "failed_before"


class Views:
    """Makes FleetViews. Changes nothing but what the records keep for the next one. `stale_report_s`: engines' own figures are
    not used when older."""

    def __init__(
        self,
        fleet: Fleet,
        truth: Truth,
        reservations: Reservations,
        affinity: Affinity,
        migrations: Migrations,
        prefills: Prefills,
        limits: Limits,
        stale_report_s: float,
    ) -> None:
        self._fleet = fleet
        self._truth = truth
        self._reservations = reservations
        self._affinity = affinity
        self._migrations = migrations
        self._prefills = prefills
        self.limits = limits
        self._stale_report_s = stale_report_s

    def view(self, request: PlacementRequest, pool: str, turn: int, now: float) -> FleetView:
        """All instances of `pool` that answer to the request's model. O(instances + look-ups of the prompt's keys)."""
        sights = self._sights(self._fleet.members(pool, request.model), now)
        blocks, credited = self._truth.beliefs(request.keys, [sight.candidate for sight in sights])
        tokens = request.input_tokens
        # An engine reuses whole blocks of its own size, and always computes the last token itself.
        reusable = max(tokens - 1, 0)
        candidates = []
        for sight in sights:
            candidate = sight.candidate
            if found := blocks.get(candidate.instance_id):
                cached = found * KEY_TOKENS if found * KEY_TOKENS < reusable else reusable
                cached -= cached % sight.block_size
                candidate = structs.replace(candidate, cached_tokens=cached, new_tokens=tokens - cached)
            else:
                candidate = structs.replace(candidate, new_tokens=tokens)
            candidates.append(candidate)
        # What few requests need: instances that failed this one, and tokens that rest on credit.
        for number, candidate in enumerate(candidates if credited or request.exclude else ()):
            instance_id = candidate.instance_id
            if instance_id in request.exclude and candidate.excluded in ("", SATURATED, CIRCUIT_OPEN):
                candidate = candidates[number] = structs.replace(candidate, excluded=FAILED_BEFORE)
            if instance_id in credited:
                confirmed = (blocks[instance_id] - credited[instance_id]) * KEY_TOKENS
                extra = max(candidate.cached_tokens - confirmed, 0)
                candidates[number] = structs.replace(candidate, credited_tokens=extra)
        if not any(_may_serve(candidate) for candidate in candidates):
            # Better an instance that may fail than none.
            candidates = [
                structs.replace(one, excluded="") if one.excluded == CIRCUIT_OPEN else one for one in candidates
            ]
        owner = self._affinity.owner(pool, request.session, now) if request.session_id else ""
        kinds = {candidate.prefilling.hardware for candidate in candidates}
        curves = {kind: self._prefills.curve(pool, kind) for kind in sorted(kinds)}
        return FleetView(tuple(candidates), owner, turn, now, curves, self._prefills.usual(pool))

    def has_room(self, pool: str, now: float) -> bool:
        """Whether any instance of `pool` may be placed on."""
        seen = [sight.candidate for sight in self._sights(self._fleet.members(pool, pool), now)]
        if any(not candidate.excluded for candidate in seen):
            return True
        return not any(map(_may_serve, seen)) and any(candidate.excluded == CIRCUIT_OPEN for candidate in seen)

    def check_invariants(self) -> None:
        """Raise AssertionError when what is kept of an instance is not what would be seen anew."""
        for record in self._fleet.records():
            kept = record.sight
            if kept is not None and record.info.instance_id not in self._reservations.touched:
                assert kept == self._look(record, kept.since), record.info.instance_id

    def _sights(self, members: Sequence[InstanceRecord], now: float) -> list[Sight]:
        for instance_id in self._reservations.touched:
            if (record := self._fleet.get(instance_id)) is not None:
                record.sight = None
        self._reservations.touched.clear()
        return [
            sight
            if (sight := record.sight) is not None and sight.since <= now < sight.until
            else self._see(record, now)
            for record in members
        ]

    def _prefilling(self, record: InstanceRecord) -> Prefilling:
        info = record.info
        queue, rests = [], []
        prefilling = self._reservations.prefilling(info.instance_id)
        for one in prefilling:
            there = one.cached_tokens + one.new_tokens
            if (pending := one.pending_tokens) > 0:
                queue.append((pending, one.cached_tokens + one.prefilled_tokens))
            if one.input_tokens > there:
                rests.append((one.request_id, one.input_tokens - there, there))
        return Prefilling(
            queue=tuple(queue),
            moved_at=self._prefills.moved_at(info.instance_id) if queue else 0.0,
            rests=tuple(rests),
            requests=len(prefilling),
            chunk_limit=info.prefill_chunk_limit,
            block_size=info.block_size,
            hardware=info.hardware,
        )

    def _see(self, record: InstanceRecord, now: float) -> Sight:
        record.sight = sight = self._look(record, now)
        return sight

    def _look(self, record: InstanceRecord, now: float) -> Sight:
        info, load, state = record.info, record.load, record.state
        counters = self._reservations.counters(info.instance_id)
        fresh_until = load.sampled_at + self._stale_report_s if load else float("-inf")
        stale = now > fresh_until
        saturated = self.limits.saturated(counters.num_requests, None if stale else load)
        changes_at = (
            fresh_until,
            record.circuit.until,
            self._migrations.next_end(info.instance_id, now),
            *self._truth.source_changes_at(record),
        )
        return Sight(
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
                or (CIRCUIT_OPEN if record.circuit.open(now) else SATURATED if saturated else ""),
                recent_migrations=self._migrations.count(info.instance_id, now),
                kv_capacity_tokens=info.kv_capacity_tokens,
                stale=stale,
                prefix_source=self._truth.source(record, now),
                kv_gives=_kv_way(info, KvRole.PRODUCER),
                kv_takes=_kv_way(info, KvRole.CONSUMER),
                prefilling=self._prefilling(record),
            ),
            block_size=info.block_size,
            since=now,
            until=min((moment for moment in changes_at if moment >= now), default=float("inf")),
        )


def _kv_way(info: InstanceInfo, side: KvRole) -> str:
    """How KV goes out of an instance (`side` PRODUCER) or comes in; empty when it does not."""
    kv = info.kv_transfer
    if kv is None or kv.role not in (KvRole.BOTH, side):
        return ""
    return f"{kv.protocol}/{info.block_size}/{kv.layout}"


def _may_serve(candidate: Candidate) -> bool:
    """Whether a request goes there now, or once it is less busy."""
    return candidate.excluded in ("", SATURATED)
