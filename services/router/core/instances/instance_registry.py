"""What the router knows of each instance, and which instances serve a model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pointsman.router.core.instances.circuit_breaker import Circuit
from pointsman.router.core.instances.prediction_audit import PredictionAudit
from pointsman.router.core.instances.report_sync import ReportSync
from pointsman.router.core.instances.stale_reservations import IdleReports
from pointsman.router.core.prefix.exact_index import PrefixIndex
from pointsman.router.core.types import Candidate, InstanceInfo, InstanceState, Load


class CandidateSnapshot(msgspec.Struct, frozen=True, gc=False):
    """What decisions from `since` until before `until` (s) see of an instance whatever the request: a candidate that has none of
    its tokens cached, and none to compute."""

    candidate: Candidate
    block_size: int
    since: float
    until: float


@dataclass(slots=True)
class InstanceRecord:
    """One instance: identity, the state of its report, its last load. Times are in s on the router's clock.

    `candidate_snapshot` is kept from the last decision (views.py); whoever changes what it shows sets it to None.
    """

    info: InstanceInfo
    sync: ReportSync
    stream_id: int
    heard_at: float
    lost_at: float | None = None
    draining: bool = False
    load: Load | None = None
    prediction_audit: PredictionAudit = field(default_factory=PredictionAudit)
    idle_reports: IdleReports = field(default_factory=IdleReports)
    circuit: Circuit = field(default_factory=Circuit)
    candidate_snapshot: CandidateSnapshot | None = None

    @property
    def state(self) -> InstanceState:
        """The first of DRAINING, UNHEALTHY, LOST, SYNCING that holds, else READY."""
        if self.draining:
            return InstanceState.DRAINING
        if self.load is not None and not self.load.healthy:
            return InstanceState.UNHEALTHY
        if self.lost_at is not None:
            return InstanceState.LOST
        if self.follows_events and not self.sync.live:
            return InstanceState.SYNCING
        return InstanceState.READY

    @property
    def follows_events(self) -> bool:
        """Whether its keys are those of its events; otherwise the router's own placements tell."""
        return self.info.exact_prefix and not self.prediction_audit.events_rejected and not self.sync.full

    @property
    def prefix_reason(self) -> str:
        """Why its keys are not those of its events, or why they are asked for again; empty when all is well."""
        if not self.info.exact_prefix:
            return self.info.prefix_reason or "no KV events"
        if self.prediction_audit.reason:
            return self.prediction_audit.reason
        return "the router's index is full" if self.sync.full else ""


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The instances that serve one model and the names they answer to. `max_model_len` is the smallest, 0 when unknown."""

    model: str
    served_names: tuple[str, ...]
    lora_names: tuple[str, ...]
    model_root: str
    max_model_len: int
    instances: tuple[InstanceInfo, ...]


class InstanceRegistry:
    """All instances by id, and the names they can be asked for.

    `shared_names`: names that several pools answer to, each with these. Requests go to the pool of that name, or to the first by
    name."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._records: dict[str, InstanceRecord] = {}
        self._pools: dict[str, list[InstanceRecord]] = {}
        self._pool_of: dict[str, str] = {}
        self.shared_names: dict[str, list[str]] = {}
        self._members: dict[tuple[str, str], list[InstanceRecord]] = {}
        self._drained: Mapping[str, str] = {}

    def get(self, instance_id: str) -> InstanceRecord | None:
        """One instance."""
        return self._records.get(instance_id)

    def records(self) -> list[InstanceRecord]:
        """All instances, by id."""
        return [self._records[instance_id] for instance_id in sorted(self._records)]

    def pool_of(self, model: str) -> str:
        """The pool that a name belongs to (pool, served name or LoRA adapter), or ""."""
        return self._pool_of.get(model, "")

    def members(self, pool: str, model: str) -> list[InstanceRecord]:
        """The pool's instances, by id, that answer to `model`, one of its names: an adapter may be loaded on some only."""
        members = self._members.get((pool, model))
        if members is None:
            members = self._members[pool, model] = [
                record for record in self._pools.get(pool, ()) if _answers(record, model)
            ]
        return members

    def answers(self, instance_id: str, model: str) -> bool:
        """Whether the instance is known and `model` is one of its names."""
        record = self._records.get(instance_id)
        return record is not None and _answers(record, model)

    def add(self, info: InstanceInfo, stream_id: int, now: float) -> InstanceRecord:
        """Make an instance known, or a new incarnation or stream of it. Mutates.

        A known incarnation keeps its keys, so that its agent may resume; a new one starts empty, and ends a drain.
        """
        before = self._records.get(info.instance_id)
        if before is not None and before.info.incarnation == info.incarnation:
            record = before
            record.info, record.stream_id, record.heard_at, record.lost_at = info, stream_id, now, None
            record.candidate_snapshot = None
        else:
            sync = ReportSync(info.instance_id, self._index)
            sync.reset()
            record = InstanceRecord(info, sync, stream_id, now, draining=self._drains(info))
        self._records[info.instance_id] = record
        self._rebuild()
        return record

    def drain(self, incarnations: Mapping[str, str]) -> bool:
        """Let these instances, known or not, each in the incarnation given, be the ones that drain; whether that changes any.
        Mutates."""
        self._drained = incarnations
        changed = [record for record in self._records.values() if record.draining is not self._drains(record.info)]
        for record in changed:
            record.draining = not record.draining
            record.candidate_snapshot = None
        return bool(changed)

    def _drains(self, info: InstanceInfo) -> bool:
        return self._drained.get(info.instance_id) == info.incarnation

    def remove(self, instance_id: str) -> None:
        """Forget an instance and its keys. Mutates."""
        self._records.pop(instance_id).sync.reset()
        self._rebuild()

    def pools(self) -> list[PoolInfo]:
        """What gateways need to know: pools with their placeable instances."""
        return [self._pool(model, records) for model, records in sorted(self._pools.items())]

    def _pool(self, model: str, records: list[InstanceRecord]) -> PoolInfo:
        limits = [record.info.max_model_len for record in records if record.info.max_model_len]
        placeable = (InstanceState.READY, InstanceState.SYNCING, InstanceState.LOST)
        up = [record for record in records if record.state in placeable]
        # As for the router itself: where all fail, they are better than none.
        told = [record for record in up if not record.circuit.opened] or up
        return PoolInfo(
            model=model,
            served_names=tuple(sorted({name for record in records for name in record.info.served_names} - {model})),
            lora_names=tuple(sorted({name for record in records for name in record.info.lora_names})),
            model_root=next((record.info.model_root for record in records if record.info.model_root), ""),
            max_model_len=min(limits, default=0),
            instances=tuple(record.info for record in told),
        )

    def _rebuild(self) -> None:
        self._members = {}
        self._pools = {}
        for record in self.records():
            self._pools.setdefault(record.info.model, []).append(record)
        pools_of: dict[str, list[str]] = {pool: [pool] for pool in self._pools}
        for pool, records in sorted(self._pools.items()):
            for name in {name for record in records for name in (*record.info.served_names, *record.info.lora_names)}:
                if pool not in (pools := pools_of.setdefault(name, [])):
                    pools.append(pool)
        self._pool_of = {name: pools[0] for name, pools in pools_of.items()}
        self.shared_names = {name: pools for name, pools in sorted(pools_of.items()) if len(pools) > 1}


def _answers(record: InstanceRecord, model: str) -> bool:
    info = record.info
    return model == info.model or model in info.served_names or model in info.lora_names
