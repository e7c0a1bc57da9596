"""Refusals whose cause is the router's state, not the request. Pure."""

from __future__ import annotations

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.requests.retry_after import RetryAfter

# Retry-after time of a not_serving refusal, s. Its cause usually ends soon.
NOT_SERVING_RETRY_S = 0.1


def not_serving(request_id: str, pool: str, why: str, gateway_id: str = "") -> ev.Refused:
    """Return a refusal that makes the gateway send the request again: only the moment, or the router asked, was wrong."""
    return ev.Refused(request_id, "UNAVAILABLE", why, NOT_SERVING_RETRY_S, gateway_id, not_serving=True, pool=pool)


class Refusals:
    """Refusals of requests that waited or would have to, with the time after which their clients should retry. `least_s`: minimum
    of this time, s. `held`, `parked`: how long requests of each stage waited lately."""

    def __init__(self, least_s: float) -> None:
        self.held = RetryAfter(least_s)
        self.parked = RetryAfter(least_s)

    def no_room(
        self, request: PlacementRequest, pool: str, gateway_id: str, why: str, waited_s: float = 0.0
    ) -> ev.Refused:
        """Return the refusal of a request for which no instance has room and that has waited for `waited_s`."""
        retry_after_s = self.held.seconds(pool, request.priority, waited_s)
        message = f"every instance of {pool!r} is at its limit ({why})"
        return ev.Refused(request.request_id, "RESOURCE_EXHAUSTED", message, retry_after_s, gateway_id, pool=pool)

    def not_admitted(
        self, request: PlacementRequest, pool: str, gateway_id: str, place: int, record: AdmissionRecord | None
    ) -> ev.Refused:
        """Return the refusal of a request whose session is not admitted. `place`: among those that waited, from 1; 0 if it did
        not wait."""
        retry_after_s = self.parked.seconds(pool, request.priority)
        where = f" It was number {place} of those that wait." if place else ""
        message = f"the caches of {pool!r} have no room for another session.{where} A retry keeps its turn."
        return ev.Refused(
            request.request_id,
            "RESOURCE_EXHAUSTED",
            message,
            retry_after_s,
            gateway_id,
            pool=pool,
            place=place,
            admission=record,
        )

    def expire(self, now: float) -> None:
        """Drop waiting times that no longer matter. Mutates."""
        self.held.expire(now)
        self.parked.expire(now)
