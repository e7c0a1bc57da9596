"""Signals that a fleet may be scaled on: figures of one moment, as Prometheus would read them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pointsman_router.core.analysis.pool_backlog import PoolBacklogs
from pointsman_router.core.placement_types import Load
from pointsman_router.core.router_state import RouterState

# (the pool's owner, the pool, its engines' loads, now in s): returns the figure, or None if there is none.
Signal = Callable[[RouterState, str, Sequence[Load], float], float | None]


def backlog_seconds(router: RouterState, pool: str, loads: Sequence[Load], now: float) -> float | None:
    """`max by (model) (pointsman_router_backlog_seconds)`: seconds of prefill for each placeable instance."""
    backlogs = PoolBacklogs(
        router.instances,
        router.reservations,
        router.prefill_observer,
        router.held_requests.queue,
        router.parked_requests.queue,
    ).at(now)
    return max(backlogs[pool].values()) if pool in backlogs else None


def requests_waiting(router: RouterState, pool: str, loads: Sequence[Load], now: float) -> float | None:
    """`sum(vllm:num_requests_waiting)`: the default signal of vLLM's production-stack (helm/templates/scaledobject-vllm.yaml),
    with a threshold of 5 for each replica."""
    return float(sum(load.waiting or 0 for load in loads))


def kv_usage(router: RouterState, pool: str, loads: Sequence[Load], now: float) -> float | None:
    """`avg(vllm:kv_cache_usage_perc)`, 0 to 1: the other signal in KServe's and llm-d's guides."""
    return sum(load.kv_usage or 0.0 for load in loads) / len(loads) if loads else None


class AverageOverTime:
    """`avg_over_time` of another signal: the mean of its last `readings` figures, or of all if there are fewer."""

    def __init__(self, signal: Signal, readings: int) -> None:
        self._signal = signal
        self._last: deque[float] = deque(maxlen=readings)

    def __call__(self, router: RouterState, pool: str, loads: Sequence[Load], now: float) -> float | None:
        """Return the mean including the present figure. Mutates."""
        if (figure := self._signal(router, pool, loads, now)) is not None:
            self._last.append(figure)
        return sum(self._last) / len(self._last) if self._last else None
