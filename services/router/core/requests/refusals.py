"""Refusals that say nothing against the request. Pure."""

from __future__ import annotations

from pointsman.router.core import events_and_effects as ev

# How soon to ask again where nothing is wrong but the moment, in s.
NOT_SERVING_RETRY_S = 0.1


def not_serving(request_id: str, pool: str, why: str, gateway_id: str = "") -> ev.Refused:
    """The answer to a request that is to be sent again: nothing is wrong with it but the moment, or the router it asked."""
    return ev.Refused(request_id, "UNAVAILABLE", why, NOT_SERVING_RETRY_S, gateway_id, not_serving=True, pool=pool)
