"""The last 15 minutes of a router's pools and instances, in bounded memory. Pure.

A pool always takes 10 KB and an instance 2.5 KB. Pools and instances that are gone are removed after the window has passed.
Quantiles are those of histograms (log_histogram.py), one for each bucket of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from pointsman_router.core.events_and_effects import Finished, Refused
from pointsman_router.core.history.rows import (
    INSTANCE_BUCKETS,
    INSTANCE_STEP_S,
    POOL_BUCKETS,
    POOL_STEP_S,
    WINDOW_S,
    InstanceMeasure,
    InstanceRow,
    InstanceSample,
    PoolMeasure,
    PoolRow,
    PoolSample,
)
from pointsman_router.core.placement_types import Decision

MAX_POOLS, MAX_INSTANCES = 1_000, 10_000

Row = TypeVar("Row", PoolRow, InstanceRow)


class FleetHistory:
    """The history of one router, which records since `since` (s; all times here are on one clock). `total`: the sum over the
    pools that the router owns."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.total = PoolRow()
        self.pools: dict[str, PoolRow] = {}
        self.instances: dict[str, InstanceRow] = {}

    def decided(self, decision: Decision, now: float) -> None:
        """Count a placement. Mutates."""
        # Later parts of a plan are left out: the tokens that earlier parts computed would count as hits.
        tokens = 0 if decision.previous_id else decision.request.input_tokens
        cached = decision.present_tokens if tokens else 0
        self.total.placed(tokens, cached, now)
        if (pool := _row(self.pools, decision.pool, PoolRow, MAX_POOLS, now)) is not None:
            pool.placed(tokens, cached, now)

    def refused(self, refused: Refused, now: float) -> None:
        """Count a refusal, unless another router may place the request. Mutates."""
        if refused.not_serving:
            return
        self.total.refused(now)
        if refused.pool and (pool := _row(self.pools, refused.pool, PoolRow, MAX_POOLS, now)) is not None:
            pool.refused(now)

    def ended(self, decision: Decision, finished: Finished, now: float) -> None:
        """Count a request that ended as `finished` says after `decision`. Mutates."""
        first_ms = (finished.timings_ms or {}).get("first_token")
        ttft_s = first_ms / 1e3 if first_ms else math.nan
        hits = finished.cache_hits(one_step=decision.in_one_step)
        tokens = decision.request.input_tokens if hits is not None else 0
        cached = min(hits or 0, tokens)
        self.total.ended(ttft_s, tokens, cached, now)
        if (pool := _row(self.pools, decision.pool, PoolRow, MAX_POOLS, now)) is not None:
            pool.ended(ttft_s, tokens, cached, now)
        if first_ms and (instance := self._instance(decision.instance_id, now)) is not None:
            instance.model = instance.model or decision.pool
            instance.ended(ttft_s, now)

    def sample_pool(self, model: str, sample: PoolSample, now: float) -> None:
        """Record a sample of a pool. Mutates."""
        if (pool := _row(self.pools, model, PoolRow, MAX_POOLS, now)) is not None:
            pool.sample(sample, now)

    def sample_instance(self, instance_id: str, sample: InstanceSample, now: float) -> None:
        """Record a sample of an instance. Mutates."""
        if (instance := self._instance(instance_id, now)) is not None:
            instance.sample(sample, now)

    def forget(self, now: float) -> None:
        """Remove pools and instances without a sample for the whole window; if the maximum number of rows is reached, for two
        instance steps. O(rows). Mutates."""
        _forget(self.pools, MAX_POOLS, now)
        _forget(self.instances, MAX_INSTANCES, now)

    def read_pool(self, row: PoolRow, measure: PoolMeasure, now: float) -> list[float]:
        """Return a pool's values of one measure in the buckets of `pool_buckets(now)`; NaN: unknown. May close the row's open
        bucket, as any later call would."""
        row.advance(now)
        return row.ring.read(measure, *self.pool_buckets(now))

    def read_instance(self, row: InstanceRow, measure: InstanceMeasure, now: float) -> list[float]:
        """Return an instance's values of one measure in the buckets of `instance_buckets(now)`, as `read_pool` does."""
        row.advance(now)
        return row.ring.read(measure, *self.instance_buckets(now))

    def pool_buckets(self, now: float) -> tuple[int, int]:
        """Return the first and the last bucket (each POOL_STEP_S long) that are in the window, have ended at `now`, and were at
        least partly recorded; first > last if there is none."""
        return self._buckets(POOL_STEP_S, POOL_BUCKETS, now)

    def instance_buckets(self, now: float) -> tuple[int, int]:
        """Return the first and the last bucket for instances, as `pool_buckets` does, in buckets of INSTANCE_STEP_S."""
        return self._buckets(INSTANCE_STEP_S, INSTANCE_BUCKETS, now)

    def _buckets(self, step_s: float, kept: int, now: float) -> tuple[int, int]:
        last = int(now // step_s) - 1
        return max(last - kept + 1, int(self.since // step_s)), last

    def _instance(self, instance_id: str, now: float) -> InstanceRow | None:
        return _row(self.instances, instance_id, InstanceRow, MAX_INSTANCES, now)


def _row(rows: dict[str, Row], name: str, kind: type[Row], most: int, now: float) -> Row | None:
    """Return the row called `name`, a new one if necessary; None if there are `most` rows already."""
    if (row := rows.get(name)) is None and len(rows) < most:
        row = rows[name] = kind()
        # Stands in for the first sample, so that a row that never gets one is removed, too.
        row.sampled_at = now
    return row


def _forget(rows: dict[str, Row], most: int, now: float) -> None:
    since = now - (WINDOW_S if len(rows) < most else 2 * INSTANCE_STEP_S)
    for name in [name for name, row in rows.items() if row.sampled_at < since]:
        del rows[name]


def sorted_rows(rows: dict[str, Row], model: str, after: str | None) -> Iterator[tuple[str, Row]]:
    """Yield (name, row) in ascending order of names, only those greater than `after` (None: all) and of pool `model` (empty:
    all)."""
    for name in sorted(rows):
        row = rows[name]
        of = row.model if isinstance(row, InstanceRow) else name
        if (not model or of == model) and (after is None or name > after):
            yield name, row
