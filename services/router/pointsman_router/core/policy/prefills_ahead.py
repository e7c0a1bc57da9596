"""The prefills that a new prompt waits for on an instance. Pure."""

from __future__ import annotations

from pointsman_router.core.placement_types import PrefillBacklog
from pointsman_router.core.prefill_curve import PrefillCurve

# Maximum share of a prefill's predicted cost that counts as done while no event reports its end.
MAX_DONE_SHARE = 0.9


def _backlog(work: PrefillBacklog, curve: PrefillCurve, now: float) -> float:
    """Return the seconds of prefill that are open on an instance."""
    if not work.queue:
        return 0.0
    done = min(max(now - work.advanced_at, 0.0), MAX_DONE_SHARE * curve.cost_s(*work.queue[0]))
    return curve.total_s(work.queue) + curve.sums_s(work.unlisted) - done


def prefills_ahead(work: PrefillBacklog, curve: PrefillCurve, new: int, now: float) -> tuple[float, float]:
    """Return the seconds of prefill that are open on an instance, and how many of these a prompt of `new` tokens waits for.
    Prefills that are not listed all count as their mean."""
    backlog = _backlog(work, curve, now)
    if not (limit := work.chunk_limit) or not backlog:
        return backlog, backlog
    costs = [curve.cost_s(left, there) for left, there in work.queue]
    costs[0] -= min(max(now - work.advanced_at, 0.0), MAX_DONE_SHARE * costs[0])
    rounds = -(-new // limit)
    wait = sum(
        min(cost, rounds * curve.cost_s(min(limit, left), there))
        for cost, (left, there) in zip(costs, work.queue, strict=True)
    )
    if work.unlisted.prefills:
        left, there = work.unlisted.mean()
        in_chunks = rounds * work.unlisted.prefills * curve.cost_s(min(limit, left), there)
        wait += min(curve.sums_s(work.unlisted), in_chunks)
    return backlog, wait
