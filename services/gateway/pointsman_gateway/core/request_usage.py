"""The usage of one request, for metrics by tenant and for the usage log."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

CLIENT_LEFT = 499  # status of a request without a response because the client disconnected
OK = "ok"  # outcome of a request whose whole answer was sent


@dataclass(slots=True)
class RequestUsage:
    """Token counts of the attempt that was answered: the engine's, or else the gateway's own. `tenant` is empty for a request
    without a tenant (a health check). `outcome` is empty for a request that was not placed. `received_at`: when the whole body
    had come, monotonic s."""

    tenant: str = ""
    api: str = ""  # the path at the engine, an Endpoint's value
    received_at: float = 0.0
    outcome: str = ""
    streamed: bool = False  # the client requested a stream, and was not refused before the placement
    prompt_tokens: int = 0  # of all prompts, cached ones too; 0 if no answer began
    cached_tokens: int = 0  # without those that the request's own steps computed; 0 if the engine reported none
    completion_tokens: int = 0  # of the whole answer, by all instances that took part


class UsageLine(msgspec.Struct):
    """One request in the usage log, without prompts, keys and sessions. `time`: when the whole body had come, Unix s.
    `request_id` is the client's X-Request-ID response header. `model` is empty if the request named no served model."""

    time: float
    tenant: str  # never empty: requests without one have no line
    request_id: str
    model: str
    api: str  # as in RequestUsage
    status: int  # HTTP status of the answer; CLIENT_LEFT: the client disconnected; 200: also a stream that broke
    outcome: str  # ok, cancelled, rejected or failed
    stream: bool  # RequestUsage.streamed
    prompt_tokens: int  # as in RequestUsage
    cached_tokens: int  # as in RequestUsage
    completion_tokens: int  # as in RequestUsage
    duration_s: float  # from `time` to the end of the answer


def outcome_of(status: int) -> str:
    """Return the outcome of a request that was not placed, in the terms used for placed requests."""
    return OK if status < 400 else "cancelled" if status == CLIENT_LEFT else "rejected" if status < 500 else "failed"
