"""The interface between an HTTP server and its handler, and the limits that the server holds clients to."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from pointsman.gateway.core.http_message import Request, Response


@dataclass(frozen=True)
class ServerLimits:
    """What clients may take: bytes, header fields, seconds. The deadlines for head and body are for the whole of each."""

    max_body_bytes: int
    max_buffered_body_bytes: int  # of the bodies of all clients together, until their answers begin
    max_buffered_answer_bytes: int = (
        256 << 20
    )  # of all whole answers together, from their first byte until they are sent
    max_head_bytes: int = 32 << 10
    max_headers: int = 100
    head_s: float = 10.0
    body_s: float = 120.0
    body_stall_s: float = 15.0  # between two pieces of a body
    idle_s: float = 75.0
    stall_s: float = 300.0  # in which a client takes its answer at the rate below, or is given up
    min_read_bytes_per_s: int = 1024


class HttpHandler(Protocol):
    """What is served."""

    def admit(self, request: Request) -> Response | None:
        """An answer that needs no body, or None to read the body and ask `answer`. Must not raise."""

    def answer(self, request: Request) -> Awaitable[Response | None]:
        """The answer; None when it went out through request.outgoing. Cancelled when the client leaves."""

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        """An answer to what never became a request; `path` as far as it is known."""
