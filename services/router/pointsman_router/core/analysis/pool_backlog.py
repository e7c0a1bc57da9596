"""Computes the backlog of pools: how long a new request waits until its prefill begins, in seconds of prefill per instance. Pure.

A replica can compute it only for the pools that it owns, since only the owner knows a pool's open requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import chain

from pointsman_router.core.instances.instance_registry import InstanceRegistry, PoolInfo
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import PlacementRequest, route_class
from pointsman_router.core.policy.prefills_ahead import MAX_DONE_SHARE
from pointsman_router.core.prefill_curve import PrefillCurve, PrefillWork, token_pairs
from pointsman_router.core.requests.hold_queue import HoldQueue

# Lightest first, which is the order in which requests leave the router's queue.
ROUTE_CLASSES = ("LIGHT", "MEDIUM", "HEAVY")


@dataclass(slots=True)
class _Waiting:
    """Sums over prefills that are not placed yet, from which any prefill curve computes seconds: requests, tokens, token
    pairs."""

    requests: int = 0
    tokens: float = 0.0
    pairs: float = 0.0

    def add(self, new: int, cached: int, length: int) -> None:
        """Count one prefill of `new` tokens after `cached` ones (`length`: as in token_pairs). Mutates."""
        if new > 0:
            self.requests += 1
            self.tokens += new
            self.pairs += token_pairs(new, cached, length)

    def seconds(self, curve: PrefillCurve) -> float:
        """Return the seconds that these prefills take one after another."""
        return curve.base_s * self.requests + curve.token_s * self.tokens + curve.pair_s * self.pairs


class PoolBacklogs:
    """Computes the backlog of pools from the router's state; changes nothing."""

    def __init__(
        self,
        instances: InstanceRegistry,
        reservations: Reservations,
        prefill_observer: PrefillObserver,
        queue: HoldQueue,
        parked: HoldQueue,
    ) -> None:
        self._instances = instances
        self._reservations = reservations
        self._prefill_observer = prefill_observer
        self._queue = queue
        self._parked = parked

    def at(self, now: float) -> dict[str, Mapping[str, float]]:
        """Return pool -> route class -> seconds until a new request of that class would begin its prefill if the work were spread
        evenly, at `now` (s on the router's clock). O(placeable instances + held and parked requests + prompts placed in part).

        backlog(class) = (placed + held(class)) / max(instances, 1)
        placed      seconds of prefill, by the learned curve of pool and hardware, that are left of the prompts placed on the
                    pool's placeable instances; of an instance's first prompt, the time since it last progressed counts as done,
                    up to MAX_DONE_SHARE of its cost
        held(class) seconds of prefill of the requests in the router's queue, of parked sessions' first prompts, and of those
                    parts of sliced prompts that are not placed yet, of `class` or a lighter one; by the mean of the curves over
                    the instances
        instances   the placeable instances that gateways know (PoolInfo.instances)

        Engines compute prompts in order of arrival, so a new request waits for all that is placed, whatever its class.
        The router's queue is shortest first, so there it waits for its own class and lighter ones. HEAVY is therefore the whole
        backlog of the pool, and LIGHT <= MEDIUM <= HEAVY. A request's class is by what is left of it now.
        Not included: ageing, priorities and tenants in the queue, decodes, and waits for KV memory.

        Before the first observed prefill the curve is the default one, as for policies. A pool without a placeable instance is
        computed as if it had one. A pool with neither instances nor held requests is absent. Source: a queue's unfinished work
        (Kleinrock, Queueing Systems, volume 1, 1975) over its servers, in the seconds by which `foresight` places.
        """
        parts = self.in_parts(now)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                backlogs: dict[str, Mapping[str, float]] = end.value
                return backlogs

    def in_parts(self, now: float) -> Generator[None, None, dict[str, Mapping[str, float]]]:
        """As `at`, but yields after each instance, so that the caller can handle events in between; the generator returns the
        result."""
        waiting = self._held()
        backlogs: dict[str, Mapping[str, float]] = {}
        for pool in self._instances.pools():
            held = waiting.pop(pool.model, {})
            backlogs[pool.model] = yield from self._backlog(pool, held, now)
        for model, held in waiting.items():
            # A pool whose last instance is gone, and whose requests wait for another.
            backlogs[model] = _by_class(held, self._prefill_observer.curve(model, ""), 0.0, 1)
        return backlogs

    def _held(self) -> dict[str, dict[str, _Waiting]]:
        """Return pool -> class -> the prefills still to be placed."""
        waiting: dict[str, dict[str, _Waiting]] = {}
        for held in chain(self._queue, self._parked):
            _add(waiting.setdefault(held.pool, {}), held.new_tokens, held.request)
        for partial in self._reservations.partial_prefills():
            # Between two slices the request is in the queue, and is counted above.
            if self._queue.get(partial.request_id) is None:
                _add(waiting.setdefault(partial.pool, {}), partial.remainder_tokens, partial)
        return waiting

    def _backlog(
        self, pool: PoolInfo, held: dict[str, _Waiting], now: float
    ) -> Generator[None, None, Mapping[str, float]]:
        kinds = Counter(info.hardware for info in pool.instances.values()) or Counter(("",))
        curves = {kind: self._prefill_observer.curve(pool.model, kind) for kind in kinds}
        placed = 0.0
        for instance_id, info in pool.instances.items():
            if self._reservations.prefills(instance_id):
                placed += self._placed_s(instance_id, curves[info.hardware], now)
            yield
        return _by_class(held, _mean_curve(curves, kinds), placed, max(len(pool.instances), 1))

    def _placed_s(self, instance_id: str, curve: PrefillCurve, now: float) -> float:
        """Return the seconds that are left of the open prefills of an instance."""
        first = self._reservations.first_prefill(instance_id)
        if first is None:
            return 0.0
        sums = self._reservations.counters(instance_id)
        left = (
            curve.base_s * sums.pending_prefills
            + curve.token_s * sums.pending_prefill_tokens
            + curve.pair_s * sums.pending_pairs
        )
        first_s = curve.work_s(PrefillWork(first.pending_tokens, first.pending_pairs))
        since = max(now - self._prefill_observer.advanced_at(instance_id), 0.0)
        return left - min(since, MAX_DONE_SHARE * first_s)


def _add(waiting: dict[str, _Waiting], new: int, of: PlacementRequest | Reservation) -> None:
    tokens = of.input_tokens
    waiting.setdefault(route_class(new, tokens), _Waiting()).add(new, tokens - new, of.sequence_length)


def _mean_curve(curves: Mapping[str, PrefillCurve], kinds: Mapping[str, int]) -> PrefillCurve:
    """Return the mean curve over all instances; the mean of coefficients is exact, since seconds are linear in them."""
    total = sum(kinds.values())
    return PrefillCurve(
        base_s=sum(curves[kind].base_s * count for kind, count in kinds.items()) / total,
        token_s=sum(curves[kind].token_s * count for kind, count in kinds.items()) / total,
        pair_s=sum(curves[kind].pair_s * count for kind, count in kinds.items()) / total,
    )


def _by_class(held: Mapping[str, _Waiting], curve: PrefillCurve, placed: float, instances: int) -> Mapping[str, float]:
    backlogs, work = {}, placed
    for name in ROUTE_CLASSES:
        work += held[name].seconds(curve) if name in held else 0.0
        backlogs[name] = work / instances
    return backlogs
