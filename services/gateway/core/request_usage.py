"""What one request has used, for metrics by tenant and for the usage log."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

CLIENT_LEFT = 499  # the status that stands for no answer, because the client had left


@dataclass(slots=True)
class RequestUsage:
    """Tokens of the attempt that was answered, as its engine counted them, or else as seen here. `tenant` is empty for a request
    that is nobody's (a health check), `outcome` for one that was not placed; `received_at`: monotonic s."""

    tenant: str = ""
    api: str = ""
    received_at: float = 0.0
    outcome: str = ""
    streamed: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageLine(msgspec.Struct):
    """One request in the usage log. No prompts, no keys, no sessions. `time` is unix s of its arrival; `request_id` is what the
    client was told as X-Request-ID; `model` is empty where the request named none that is served."""

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
    """How a request ended that was not placed, in the words of placed ones."""
    return "ok" if status < 400 else "cancelled" if status == CLIENT_LEFT else "rejected" if status < 500 else "failed"
