"""Decides whether a request can still get its first token before its client's deadline. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from msgspec import UNSET

from pointsman_router.core.instances.saturation import SATURATED
from pointsman_router.core.placement_types import FleetView, PlacementRequest
from pointsman_router.core.policy.ways import can_send

# SURE_SAMPLES: number of prefills after which a learned curve is used. SURE_SHARE: lower bound of a prefill's time, as a share of
# the curve's value, since a curve predicts the mean.
SURE_SAMPLES, SURE_SHARE = 50, 0.5

# (pool, hardware) -> number of prefills from which the curve of these instances was learned.
CurveSamples = Callable[[str, str], int]


def least_prefill_s(request: PlacementRequest, pool: str, view: FleetView, samples: CurveSamples) -> float:
    """Return a lower bound of the prefill time of `request` on any instance of `view`, saturated ones too, in s, without
    queueing, and without the transfer where its prefix may be fetched from an instance that gets no requests.

    The bound is SURE_SHARE of the least cost by the learned curves. It is 0 if the cost is uncertain: the tokens are only
    estimated (no keys), a curve is not known yet, an instance's cached tokens are not known from its events, or the view does
    not have all instances.
    """
    if not request.keys or view.unseen.instances:
        return 0.0
    least = inf
    for candidate in view.candidates:
        if candidate.excluded not in ("", SATURATED) and (view.fetch_price is UNSET or not can_send(candidate)):
            continue
        hardware = candidate.prefill_backlog.hardware
        if not candidate.exact or samples(pool, hardware) < SURE_SAMPLES or hardware not in view.curves:
            return 0.0
        least = min(
            least,
            SURE_SHARE
            * view.curves[hardware].cost_s(
                request.input_tokens - candidate.present_tokens, candidate.present_tokens, request.sequence_length
            ),
        )
    return 0.0 if least == inf else least


def lateness(left_s: float, least_s: float) -> str:
    """Return why no first token can come within `left_s` if the prefill takes at least `least_s`; empty if one can."""
    if left_s <= 0:
        return "the first token did not come within the time that X-Pointsman-TTFT-Timeout allows"
    if left_s <= least_s:
        return f"its first token is needed within {left_s:.2f} s, but its prefill takes at least {least_s:.2f} s"
    return ""
