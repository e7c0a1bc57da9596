"""The error responses for requests that fail through no fault of the client."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman_gateway.core.request.request_events import (
    BREAKS_INSTANCES,
    DEADLINE_EXCEEDED,
    INTERNAL,
    PLACEMENT_TIMEOUT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    FailRequest,
)

# Default Retry-After of a 429 or 503, s.
RETRY_S = 1.0


@dataclass(frozen=True)
class FailureAnswer:
    """An error response: HTTP status, the error's type and code, and the seconds after which the client may retry (None: no
    Retry-After)."""

    status: int
    type: str
    code: str
    retry_after_s: float | None


# google.rpc.Code -> HTTP status, error type, error code. The gateway itself sets INTERNAL and PLACEMENT_TIMEOUT.
_FAILURES = {
    RESOURCE_EXHAUSTED: (429, "rate_limit_error", "saturated"),
    UNAVAILABLE: (503, "server_error", "no_instance"),
    INTERNAL: (502, "server_error", "instance_failed"),
    PLACEMENT_TIMEOUT: (503, "server_error", "placement_timeout"),
    BREAKS_INSTANCES: (500, "server_error", "breaks_instances"),
    DEADLINE_EXCEEDED: (504, "server_error", "first_token_too_late"),
}


def answer_to(failure: FailRequest) -> FailureAnswer:
    """Return the error response for `failure`."""
    status, type_, code = _FAILURES.get(failure.code, (503, "server_error", "unavailable"))
    wait_s = failure.retry_after_s
    if wait_s is None and status in (429, 503):
        wait_s = RETRY_S
    return FailureAnswer(status, type_, code, wait_s)
