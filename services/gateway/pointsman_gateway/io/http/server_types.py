"""The interface between an HTTP server and its handler, and the limits that the server sets for clients."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from pointsman_gateway.core.http_message import Request, Response


@dataclass(frozen=True)
class ServerLimits:
    """Limits for clients. `head_s` and `body_s` are the maximum times for a whole head and a whole body to arrive, s; `idle_s` is
    the maximum idle time of a connection, s."""

    max_body_bytes: int  # of one request, decompressed
    max_buffered_body_bytes: int  # of all clients' bodies together, until their answers begin
    # Of all clients' answers that are not streamed together, from their first byte until they are sent.
    max_buffered_answer_bytes: int = 256 << 20
    # Open at once; beyond it idle ones are closed, or Request.surplus is set, and SURPLUS connections later none is taken. One
    # client's requests may have three times as many as those of all leave free.
    max_connections: int = 1 << 14
    max_head_bytes: int = 32 << 10  # request target and header fields of one request
    max_headers: int = 100  # header fields of one request; more get 431
    head_s: float = 10.0
    body_s: float = 120.0
    body_stall_s: float = 15.0  # maximum time between two pieces of a body
    # More than Envoy's 1 h and balancers' 10 min: who keeps a connection for less never meets its end.
    idle_s: float = 3_900.0
    stall_s: float = 300.0  # period in which a client must read its answer at the rate below, or is disconnected
    min_read_bytes_per_s: int = 1024  # 0: one byte in each period is enough


class HttpHandler(Protocol):
    """The handler of an HTTP server's requests."""

    def admit(self, request: Request) -> Response | None:
        """Return an answer for which the body is not needed, or None to read the body and call `answer`. Must not raise."""

    def answer(self, request: Request) -> Awaitable[Response | None]:
        """Return the answer, or None if it was written to request.writer. Cancelled when the client disconnects."""

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        """Return the answer for an error found before the handler had a request; `path` as far as it is known."""


# Status, message and code of errors that a server itself finds, for HttpHandler.error().
BODY_TOO_LARGE = 413, "The request body is too large.", "body_too_large"
# Its body is not what its Content-Encoding says.
UNDECODABLE_BODY = 400, "The request body is not in its Content-Encoding.", "bad_encoding"
# The memory for the bodies of all clients has no room for it.
NO_ROOM_FOR_BODY = 503, "The gateway has no memory left for another request.", "no_room"
# The client's requests have its share of the connections.
NO_ROOM_FOR_REQUEST = (
    503,
    "This key has as many open requests as it may have beside those of others.",
    "too_many_connections",
)
TOO_SLOW = 408, "The request did not arrive in time.", "request_timeout"
# It was cancelled at the end of the drain.
SHUTTING_DOWN = 503, "The gateway is shutting down.", "shutting_down"
