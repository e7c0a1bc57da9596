"""Results of the doctor's checks, and requests to engines."""

from __future__ import annotations

import email.utils
import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, ClassVar

from pointsman.agent.v1 import agent_pb2
from pointsman_common.io.direct_http import open_directly

# Timeout of a call or an HTTP request, s.
TIMEOUT_S = 10.0
# Maximum number of engines, or gateways, that are asked at the same time. From a machine that reaches none of a thousand engines
# each takes TIMEOUT_S.
ASKED_AT_ONCE = 64
# Difference of clocks above which it is a finding, s.
CLOCK_SKEW_S = 2.0


class UnreadableAnswer(OSError):
    """An HTTP request was answered, but with something else than a JSON object."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: its level, what was found, and what to change."""

    OK: ClassVar[str] = "ok"  # nothing to do
    WARN: ClassVar[str] = "warn"  # worth a look; the exit status stays 0
    FAIL: ClassVar[str] = "fail"  # must be changed; makes the exit status 1

    level: str  # OK, WARN or FAIL
    check: str  # its subject: "router", "model NAME", an instance's id, a URL
    found: str  # phrase for the table; may contain texts of engines
    advice: str = ""  # phrase in the imperative, or what follows; empty: none


@dataclass(frozen=True)
class EngineAccess:
    """Access to engines: the API key for engines with --api-key, and the trusted authorities for HTTPS (None: the system's)."""

    api_key: str = ""
    tls: ssl.SSLContext | None = None

    def headers(self, instance: agent_pb2.Instance) -> dict[str, str]:
        """Return the headers of a request to an instance."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if instance.HasField("data_parallel_rank"):
            headers["X-data-parallel-rank"] = str(instance.data_parallel_rank)
        return headers


def reason_of_request(error: OSError) -> str:
    """Return why an HTTP request got no answer, as a phrase."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(cause, TimeoutError):
        return "it does not answer in time"
    if isinstance(cause, socket.gaierror):
        return "its host name is unknown"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: set POINTSMAN_TLS_CA ({cause.verify_message})"
    return str(cause)


def skew(date: str | None) -> float | None:
    """Return by how much the clock that wrote an HTTP Date header is ahead of this one, s; None without a header with a date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time() if date else None
    except (ValueError, OverflowError):
        return None


def clock(name: str, ahead_s: float | None) -> Iterator[Finding]:
    """Yield a finding if the clock of `name` is ahead of this one, or behind, by `ahead_s` s (None: unknown)."""
    if ahead_s is not None and abs(ahead_s) > CLOCK_SKEW_S:
        yield Finding(
            Finding.WARN,
            name,
            f"its clock differs by {ahead_s:+.0f} s",
            "run NTP, so that logs of several nodes can be compared",
        )


def complete(
    instance: agent_pb2.Instance, body: dict[str, Any], access: EngineAccess, timeout_s: float = TIMEOUT_S
) -> tuple[dict[str, Any], float | None]:
    """Send a completion request to an instance. Return its answer, and its clock's skew (see `skew`). Raises OSError: for an
    error status urllib.error.HTTPError, for an answer that is no JSON object UnreadableAnswer."""
    headers = {"Content-Type": "application/json", **access.headers(instance)}
    payload = json.dumps({"model": instance.model, **body}).encode()
    request = urllib.request.Request(f"{instance.url}/v1/completions", data=payload, headers=headers)
    with open_directly(request, timeout_s, access.tls) as answer:
        return json_object(answer), skew(answer.headers.get("Date"))


def json_object(answer: HTTPResponse) -> dict[str, Any]:
    """Return the JSON object in the body of an answer. Raises UnreadableAnswer if it has none, or OSError."""
    try:
        body = json.load(answer)
    except (HTTPException, ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UnreadableAnswer("its answer is no JSON object")
    return body
