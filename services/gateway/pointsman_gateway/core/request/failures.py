"""The error responses for requests that fail through no fault of the client."""

from __future__ import annotations

from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.request.request_events import (
    BREAKS_INSTANCES,
    DEADLINE_EXCEEDED,
    INTERNAL,
    PLACEMENT_TIMEOUT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    FailRequest,
)

# google.rpc.Code -> HTTP status, error code. The gateway itself sets INTERNAL and PLACEMENT_TIMEOUT.
_FAILURES = {
    RESOURCE_EXHAUSTED: (429, "saturated"),
    UNAVAILABLE: (503, "no_instance"),
    INTERNAL: (502, "instance_failed"),
    PLACEMENT_TIMEOUT: (503, "placement_timeout"),
    BREAKS_INSTANCES: (500, "breaks_instances"),
    DEADLINE_EXCEEDED: (504, "first_token_too_late"),
}
# Header of a 429 for the place, from 1, that the request had among the new sessions that waited.
QUEUE_PLACE_HEADER = "X-Pointsman-Queue-Place"


def error_for(failure: FailRequest) -> ApiRequestError:
    """Return the error response for `failure`."""
    status, code = _FAILURES.get(failure.code, (503, "unavailable"))
    fields = {QUEUE_PLACE_HEADER: str(failure.place)} if failure.place else {}
    if failure.code == BREAKS_INSTANCES:
        # OpenAI's and Anthropic's clients heed it: none should send the request again by itself.
        fields["X-Should-Retry"] = "false"
    return ApiRequestError(status, failure.message, code=code, retry_after_s=failure.retry_after_s, fields=fields)
