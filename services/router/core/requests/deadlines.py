"""Whether a request can still have its first token when its client needs it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pointsman.router.core.instances.saturation import SATURATED
from pointsman.router.core.types import FleetView, PlacementRequest

# A curve tells the mean, and is known after so many prefills; no prefill is taken to need less than this share of it.
SURE_SAMPLES, SURE_SHARE = 50, 0.5

# (pool, hardware): how many prefills the curve of such instances was learned from.
CurveSamples = Callable[[str, str], int]


def least_prefill_s(request: PlacementRequest, pool: str, view: FleetView, samples: CurveSamples) -> float:
    """Seconds that the prefill of `request` takes at the least on any instance of `view`, saturated ones too, queues left out.

    SURE_SHARE of the least cost by the learned curves. 0 where that is not certain: the tokens are only estimated (no keys), a
    curve is not known yet, what an instance has cached is not known from its events, or not all instances are in the view.
    """
    if not request.keys or view.unseen.instances:
        return 0.0
    least = inf
    for one in view.candidates:
        if one.excluded not in ("", SATURATED):
            continue
        hardware = one.prefill_backlog.hardware
        if not one.exact or samples(pool, hardware) < SURE_SAMPLES or hardware not in view.curves:
            return 0.0
        least = min(least, SURE_SHARE * view.curves[hardware].cost_s(one.new_tokens, one.cached_tokens))
    return 0.0 if least == inf else least


def lateness(left_s: float, least_s: float) -> str:
    """Why no first token can come within `left_s`, when computing its prompt takes `least_s` at least; empty where one can."""
    if left_s <= 0:
        return "the first token did not come within the time that X-Pointsman-TTFT-Timeout allows"
    if left_s <= least_s:
        return f"its first token is needed within {left_s:.2f} s, and its prompt takes {least_s:.2f} s at least"
    return ""
