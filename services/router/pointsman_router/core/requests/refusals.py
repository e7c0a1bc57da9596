"""Refusals whose cause is the router's state, not the request. Pure."""

from __future__ import annotations

from pointsman_router.core import events_and_effects as ev

# Retry-after time of a not_serving refusal, s. Its cause usually ends soon.
NOT_SERVING_RETRY_S = 0.1


def not_serving(request_id: str, pool: str, why: str, gateway_id: str = "") -> ev.Refused:
    """Return a refusal that makes the gateway send the request again: only the moment, or the router asked, was wrong."""
    return ev.Refused(request_id, "UNAVAILABLE", why, NOT_SERVING_RETRY_S, gateway_id, not_serving=True, pool=pool)
