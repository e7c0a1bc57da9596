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
    max_buffered_answer_bytes: int = (
        256 << 20
    )  # of all clients' answers that are not streamed together, from their first byte until they are sent
    max_connections: int = (
        1 << 14
    )  # open at once; beyond it idle ones are closed, or Request.surplus is set, and SURPLUS connections later none is taken. One
    # client's requests may have three times as many as those of all leave free
    max_head_bytes: int = 32 << 10  # request target and header fields of one request
    max_headers: int = 100  # header fields of one request; more get 431
    head_s: float = 10.0
    body_s: float = 120.0
    body_stall_s: float = 15.0  # maximum time between two pieces of a body
    idle_s: float = (
        3_900.0  # more than Envoy's 1 h and balancers' 10 min: who keeps a connection for less never meets its end
    )
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


def body_too_large(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request whose body exceeds max_body_bytes."""
    return handler.error(413, "The request body is too large.", "body_too_large", path)


def undecodable_body(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request whose body is not what its Content-Encoding says."""
    return handler.error(400, "The request body is not in its Content-Encoding.", "bad_encoding", path)


def no_room_for_body(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request for whose body the memory of all clients has no room."""
    return handler.error(503, "The gateway has no memory left for another request.", "no_room", path)


def no_room_for_request(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request of a client whose requests have its share of the connections."""
    message = "This key has as many open requests as it may have beside those of others."
    return handler.error(503, message, "too_many_connections", path)


def too_slow(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request that was not complete in time."""
    return handler.error(408, "The request did not arrive in time.", "request_timeout", path)


def shutting_down(handler: HttpHandler, path: str) -> Response:
    """Return the answer to a request that was cancelled at the end of the drain."""
    return handler.error(503, "The gateway is shutting down.", "shutting_down", path)
