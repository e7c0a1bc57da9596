"""A synthetic past for a router's history, so that tests need not wait for one."""

from __future__ import annotations

import math
import random
import time

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.history.rows import POOL_STEP_S, InstanceSample, PoolSample
from pointsman_router.core.placement_types import Decision
from pointsman_router.io.router import Router

SAMPLE_S = POOL_STEP_S / 2


def give_past(router: Router, seconds: float = 600.0, gap: tuple[float, float] = (0.0, 0.0)) -> FleetHistory:
    """Replace the router's history by a synthetic one of the last `seconds`, and return that history.

    It consists of the router's instances and a request that the router has decided. It has no samples between the two times of
    `gap`, in s ago. Load grows with an instance's position in the router's list.
    """
    now, rng = time.monotonic(), random.Random(1)
    records = router.state.instances.records()
    [logged] = list(router.decisions.newest(lambda _: True))[:1]
    placed = [_placed_on(logged.decision, record.info.instance_id) for record in records]
    history = router.history = FleetHistory(now - seconds)
    counters = [0] * len(records)
    for number in range(int(seconds / SAMPLE_S)):
        at = now - seconds + number * SAMPLE_S
        if gap[0] >= now - at > gap[1]:
            continue
        wave = 0.5 + 0.4 * math.sin(number / 24.0)
        for index, record in enumerate(records):
            busy = wave * (index + 1) / len(records)
            counters[index] += 1_000
            history.sample_instance(
                record.info.instance_id,
                InstanceSample(
                    record.info.model,
                    record.info.incarnation,
                    round(20 * busy + rng.random()),
                    round(15 * busy),
                    busy,
                    counters[index],
                    int(counters[index] * (1.0 - busy)),
                ),
                at,
            )
            if rng.random() < busy:
                predicted = int(placed[index].request.input_tokens * (1.0 - 0.7 * busy))
                history.decided(replace(placed[index], cached_tokens=predicted), at)
                took = {"first_token": 100.0 + 900.0 * busy * rng.random()}
                history.ended(
                    placed[index], ev.Finished("past", "OK", cached_tokens=int(0.9 * predicted), timings_ms=took), at
                )
        if number % 40 == 7:
            history.refused(ev.Refused("past", "RESOURCE_EXHAUSTED", "full", pool="m"), at)
        held = max(int(20 * wave) - 10, 0)
        sample = PoolSample(
            True, held, int(100 * wave), int(90_000 * wave), 2.0 * wave, 0.8 * wave, min(wave * 1.1, 1.0)
        )
        history.sample_pool("m", sample, at)
        history.total.sample(sample, at)
    return history


def _placed_on(decision: Decision, instance_id: str) -> Decision:
    [step] = decision.result.steps[-1:]
    return replace(decision, result=replace(decision.result, steps=(replace(step, instance_id=instance_id),)))
