"""FleetService's history methods: the last 15 minutes of pools and instances."""

from __future__ import annotations

import itertools
import math
import time
from operator import itemgetter
from typing import Any

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.enum_words import word
from pointsman_router.core.history.fleet_history import FleetHistory, sorted_rows
from pointsman_router.core.history.rows import (
    INSTANCE_STEP_S,
    POOL_STEP_S,
    WINDOW_S,
    InstanceMeasure,
    PoolMeasure,
    PoolRow,
)
from pointsman_router.io.convert.times import duration, timestamp
from pointsman_router.io.rpc.errors import abort, field_status
from pointsman_router.io.rpc.paged_lists import PagedLists, in_turns
from pointsman_router.io.rpc.pages import MAX_PAGE, MAX_PAGE_BYTES

# Maximum number of pools of a page. All series of one take 9 kB.
MAX_POOLS_PAGE = MAX_PAGE_BYTES // 9_000

Series = tuple[fleet_pb2.PoolMeasure.ValueType, PoolMeasure]


class HistoryLists(PagedLists):
    """The methods ListPoolHistories and ListInstanceHistories. They pause in between, so that placements are not delayed."""

    async def ListPoolHistories(  # noqa: N802
        self, request: fleet_pb2.ListPoolHistoriesRequest, context: Any
    ) -> fleet_pb2.ListPoolHistoriesResponse:
        """Return the pools' series ordered by model, and their total."""
        size, after = await self._page(request, str, context)
        size = min(size, MAX_POOLS_PAGE)
        wanted = [(wire, await _pool_measure(wire, context)) for wire in sorted(set(request.measures))] or _ALL
        history, now = self._router.history, time.monotonic()
        rows = sorted_rows(history.pools, self._pool(request.model), after)
        found = list(itertools.islice(rows, size + 1))
        answer = fleet_pb2.ListPoolHistoriesResponse(
            **self._times(history.pool_buckets(now), POOL_STEP_S, now),
            next_page_token=self._next_page(found, size, itemgetter(0), request),
        )
        answered = [(answer.pools.add(model=name), row) for name, row in found[:size]]
        if not request.model and after is None:
            answer.total.SetInParent()
            answered.append((answer.total, history.total))
        async for (wire, row), measure in in_turns(itertools.product(answered, wanted)):
            _add_series(wire, row, measure, history, now)
        for wire, row in answered:
            if row.owned_since is not None:
                wire.owned_since.CopyFrom(_wall(row.owned_since, now))
        return answer

    async def ListInstanceHistories(  # noqa: N802
        self, request: fleet_pb2.ListInstanceHistoriesRequest, context: Any
    ) -> fleet_pb2.ListInstanceHistoriesResponse:
        """Return the instances' values of one measure, ordered by id."""
        size, after = await self._page(request, str, context, default=MAX_PAGE)
        name = word(fleet_pb2.InstanceMeasure, request.measure)
        if name not in InstanceMeasure.__members__:
            await abort(context, field_status("measure", "must be a value of InstanceMeasure"))
        measure = InstanceMeasure[name]
        history, now = self._router.history, time.monotonic()
        rows = sorted_rows(history.instances, self._pool(request.model), after)
        found = list(itertools.islice(rows, size + 1))
        answer = fleet_pb2.ListInstanceHistoriesResponse(
            **self._times(history.instance_buckets(now), INSTANCE_STEP_S, now),
            next_page_token=self._next_page(found, size, itemgetter(0), request),
        )
        async for instance_id, row in in_turns(found[:size]):
            values = history.read_instance(row, measure, now)
            answer.instances.add(
                instance_id=instance_id,
                model=row.model,
                instance_known=self._router.state.instances.get(instance_id) is not None,
                values=values if _some(values) else (),
            )
        return answer

    def _times(self, buckets: tuple[int, int], step_s: float, now: float) -> dict[str, Any]:
        """Return the time fields that both responses have. `buckets`: numbers of the first and the last bucket."""
        first, last = buckets
        return {
            "start_time": _wall(first * step_s, now),
            "end_time": _wall((last + 1) * step_s, now),
            "step": duration(step_s),
            "window": duration(WINDOW_S),
            "observed_since": _wall(self._router.history.since, now),
        }

    def _pool(self, model: str) -> str:
        # A pool without instances has only its own name: its other names came from the instances.
        return self._router.state.instances.pool_of(model) or model


_ALL: list[Series] = [(fleet_pb2.PoolMeasure.Value(f"POOL_MEASURE_{measure.name}"), measure) for measure in PoolMeasure]


async def _pool_measure(wire: fleet_pb2.PoolMeasure.ValueType, context: Any) -> PoolMeasure:
    name = word(fleet_pb2.PoolMeasure, wire)
    if name not in PoolMeasure.__members__:
        await abort(context, field_status("measures", "must be values of PoolMeasure"))
    return PoolMeasure[name]


def _add_series(wire: fleet_pb2.PoolHistory, row: PoolRow, series: Series, history: FleetHistory, now: float) -> None:
    measure, of = series
    values = history.read_pool(row, of, now)
    if _some(values):
        wire.series.add(measure=measure, values=values)


def _some(values: list[float]) -> bool:
    return not all(map(math.isnan, values))


def _wall(at: float, now: float) -> Any:
    """Convert `at`, s on the monotonic clock that now shows `now`, to a wall clock timestamp, rounded to ms."""
    return timestamp(round(time.time() - now + at, 3))
