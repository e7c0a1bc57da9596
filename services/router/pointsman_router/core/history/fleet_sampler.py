"""Samples all pools and instances for the history, in parts, because a large fleet takes milliseconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pointsman_router.core.analysis.pool_backlog import PoolBacklogs
from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.history.rows import InstanceSample, PoolSample
from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.core.router_state import RouterState


@dataclass(slots=True)
class _Sums:
    """Sums over the instances of one or several pools."""

    open_requests: int = 0  # placed, each sequence of a request counted; of owned pools only
    pending_tokens: int = 0  # prompt tokens placed and not computed yet; of owned pools only
    reports: int = 0  # number of those that are fresh
    kv_usage: float = 0.0  # over the fresh reports
    kv_max: float = math.nan  # over the fresh reports

    def add_kv(self, usage: float) -> None:
        """Count one fresh report. Mutates."""
        self.kv_usage += usage
        self.kv_max = usage if not self.reports else max(self.kv_max, usage)
        self.reports += 1


def take_sample(state: RouterState, history: FleetHistory, now: float) -> Iterator[None]:
    """Record a sample of all pools and instances in `history`, at `now` (s on the state's clock). Yields after each instance, so
    that the caller can handle events in between. The parts are then as far apart in time as the caller's pauses."""
    backlogs = yield from PoolBacklogs(
        state.instances,
        state.reservations,
        state.prefill_observer,
        state.held_requests.queue,
        state.parked_requests.queue,
    ).in_parts(now)
    sums: dict[str, _Sums] = {pool: _Sums() for pool in backlogs}
    total = _Sums()
    for record in state.instances.records():
        sample = _instance(state, record, now)
        history.sample_instance(record.info.instance_id, sample, now)
        for pool_sums in (sums.setdefault(sample.model, _Sums()), total):
            if not math.isnan(sample.open_requests):
                counters = state.reservations.counters(record.info.instance_id)
                pool_sums.open_requests += counters.num_requests
                pool_sums.pending_tokens += counters.pending_prefill_tokens
            if not math.isnan(sample.kv_usage) and (pool_sums is not total or state.owned.owns(sample.model)):
                pool_sums.add_kv(sample.kv_usage)
        yield
    for model, pool_sums in sums.items():
        queue = state.held_requests.queue
        history.sample_pool(
            model, _pool(state.owned.owns(model), pool_sums, queue.count(model), backlogs.get(model)), now
        )
        yield
    # The total's backlog is the longest of the pools, since a request waits in one pool only.
    longest = max(
        (classes for model, classes in backlogs.items() if state.owned.owns(model)),
        key=lambda classes: classes["HEAVY"],
        default=None,
    )
    held = len(state.held_requests.queue)
    history.total.sample(_pool(state.owned.any, total, held, longest), now)
    history.forget(now)


def _instance(state: RouterState, record: InstanceRecord, now: float) -> InstanceSample:
    info, load = record.info, record.load
    owned = state.owned.owns(info.model)
    open_requests = float(state.reservations.counters(info.instance_id).num_requests) if owned else math.nan
    if load is None or now > load.sampled_at + state.settings.stale_report_s:
        return InstanceSample(info.model, info.incarnation, open_requests, math.nan, math.nan)
    return InstanceSample(
        info.model,
        info.incarnation,
        open_requests,
        math.nan if load.running is None else float(load.running),
        math.nan if load.kv_usage is None else load.kv_usage,
        None if load.prefix_cache_hits is None else load.prefix_cache_queries,
        load.prefix_cache_hits or 0,
    )


def _pool(owned: bool, sums: _Sums, held: int, backlog: Mapping[str, float] | None) -> PoolSample:
    return PoolSample(
        owned,
        held,
        sums.open_requests,
        sums.pending_tokens,
        # HEAVY is the whole backlog: no request waits longer.
        0.0 if backlog is None else backlog["HEAVY"],
        sums.kv_usage / sums.reports if sums.reports else math.nan,
        sums.kv_max,
    )
