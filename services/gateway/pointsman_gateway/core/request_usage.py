"""The usage of one request, for metrics by tenant and for the usage log."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

CLIENT_LEFT = 499  # status of a request without a response because the client disconnected
OK = "ok"  # outcome of a request whose whole answer was sent


@dataclass(slots=True)
class RequestUsage:
    """Token counts of the attempt that was answered: the engine's, or else the gateway's own. `tenant` is empty for a request
    without a tenant (a health check). `outcome` is empty for a request that was not placed. `received_at`: monotonic s."""

    tenant: str = ""
    api: str = ""
    received_at: float = 0.0
    outcome: str = ""
    streamed: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageLine(msgspec.Struct):
    """One request in the usage log, without prompts, keys and sessions. `time` is the arrival time in Unix s. `request_id` is the
    client's X-Request-ID response header. `model` is empty if the request named no served model."""

    time: float
    tenant: str
    request_id: str
    model: str
    api: str
    status: int
    outcome: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    duration_s: float


def outcome_of(status: int) -> str:
    """Return the outcome of a request that was not placed, in the terms used for placed requests."""
    return OK if status < 400 else "cancelled" if status == CLIENT_LEFT else "rejected" if status < 500 else "failed"
