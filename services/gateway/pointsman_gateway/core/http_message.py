"""HTTP requests and responses as plain values, and the bytes of their heads."""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pointsman_gateway.core.memory_budget import Holding
from pointsman_gateway.core.request_trace import RequestTrace
from pointsman_gateway.core.request_usage import RequestUsage

JSON_FIELDS = {"Content-Type": "application/json"}
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_NO_CONTROLS = dict.fromkeys((*range(32), 127), " ")
# RFC 3986 3.2.2 and 3.2.3, without user information, and without a comma, which would join two Host fields.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")


class Headers:
    """Header fields by case-insensitive name. Several fields of one name are joined by ", "."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        self._fields: dict[str, str] = {}
        for name, value in fields:
            self.add(name, value)

    def add(self, name: str, value: str) -> None:
        """Add a field; append to its value if the name is present. Mutates."""
        name = name.lower()
        before = self._fields.get(name)
        self._fields[name] = value if before is None else f"{before}, {value}"

    def get(self, name: str, default: str = "") -> str:
        """Return the field's value, or `default` if the field is absent."""
        return self._fields.get(name.lower(), default)

    @property
    def media_type(self) -> str:
        """The media type of the body in lower case, without parameters."""
        return self.get("content-type").partition(";")[0].strip().lower()

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._fields

    def __len__(self) -> int:
        return len(self._fields)


class Source(Protocol):
    """The producer of a stream's bytes. The writer pauses it while the client does not read."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ResponseWriter(Protocol):
    """Writes one streamed response: begin, then write for each piece, then end. Ignores writes after the client disconnected."""

    chunked: bool  # the response may use chunked transfer coding
    # The client has the head of a stream (status 200), and nothing of a response: begin() may still follow, or an error event.
    opened: bool
    begun: bool  # begin() was called: there is a response
    ended: bool  # the body is complete
    lost: bool  # the client has disconnected
    # Sends bytes of the response unchanged; they must already have their chunk framing.
    send: Callable[[bytes], None]

    @property
    def full(self) -> bool:
        """Whether so much is unsent that the source is paused."""

    def ping_in_silence(self, interval_s: float, since: float, headers: dict[str, str], ping: bytes) -> None:
        """Send `ping` between two events whenever the client has had no byte for `interval_s`, and before the first one a head
        with status 200 and `headers`, unless it has one. `since`: begin of the silence, monotonic s. A writer that cannot send
        a head of its own does nothing."""

    def begin(self, status: int, headers: dict[str, str], source: Source) -> None:
        """Set the response head. It is sent with the first piece; if the stream is opened, the client has another one."""

    def go_on(self, source: Source) -> None:
        """Replace the source of the body. Raises nothing."""

    def write(self, piece: bytes) -> None:
        """Write one non-empty piece of the body."""

    def end(self) -> None:
        """End the body."""

    def abort(self) -> None:
        """Close the connection before the body ends, so that the client sees that the response is incomplete."""


@dataclass(slots=True)
class Request:
    """One request. `body` is complete before the request is handled. `held_answer` counts the buffered bytes of a response that
    is not streamed. The handler sets the other fields: `id` is internal to the gateway; `client_id` is the request's id for its
    client and its engine; `answer_fields` are header fields of every response to the request; `holder` is the client whose share
    of the memory for bodies and responses the request uses (empty: no client). `surplus`: its connection is one more than the
    server may have."""

    method: str  # as the client sent it; GET routes also get HEAD
    path: str  # as the client sent it, without the query
    query: str  # the part of the target after the question mark; empty without one
    headers: Headers  # of the client's head, without trailers
    writer: ResponseWriter  # for an answer that is streamed, and pings before it
    held_answer: Holding
    body: bytes = b""
    id: str = ""
    client_id: str = ""
    holder: bytes = b""
    surplus: bool = False
    answer_fields: dict[str, str] = field(default_factory=dict)
    model: str = ""  # the pool's name, set when the body is parsed; empty: no served model is named
    trace: RequestTrace | None = None  # None: traces are off, or the route takes no body
    usage: RequestUsage = field(default_factory=RequestUsage)  # without a tenant until the handler of an API sets it


@dataclass(slots=True)
class Response:
    """A response with its complete body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def without_controls(value: str) -> str:
    """Return a field's value with blanks for control characters, so that it cannot begin another field."""
    # Most values have no control characters, and isprintable() is faster than translate().
    return value if value.isprintable() else value.translate(_NO_CONTROLS)


def head_bytes(status: int, headers: Mapping[str, str], *framing: str) -> bytes:
    """Return the status line and fields of a response. Control characters become spaces: no value can start another field."""
    return _head([f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"], headers, framing)


def request_bytes(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> list[bytes]:
    """Return a request as pieces to write. Control characters in fields become spaces."""
    framing = [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    head = _head([f"{method} {path} HTTP/1.1", f"Host: {host}"], headers, framing)
    return [head, body] if body else [head]


def _head(lines: list[str], headers: Mapping[str, str], framing: Iterable[str]) -> bytes:
    lines += [f"{name}: {without_controls(value)}" for name, value in headers.items()]
    lines += framing
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def path_of(target: str) -> str:
    """Return the path of a request target in origin form or absolute form."""
    if target.startswith("/"):
        return target
    scheme, found, rest = target.partition("://")
    return f"/{rest.partition('/')[2]}" if found and scheme.isalpha() else target


def fault_of(method: str, version: str, url: bytes, headers: Headers, hosts: int) -> tuple[int, str, str] | None:
    """Return status, message and code of the error if a request head must be refused, else None. Heads that llhttp rejects do not
    get here. `hosts`: number of Host fields."""
    if version not in ("1.1", "1.0"):
        return 505, "Only HTTP/1.1 and HTTP/1.0 are supported.", "version_unsupported"
    if not url.isascii():
        return 400, "The request target is not ASCII.", "bad_request"
    if b"#" in url or (url == b"*" and method != "OPTIONS"):
        return 400, "The request target is not valid for this method.", "bad_request"
    if hosts > 1 or (version == "1.1" and not hosts) or not _HOST.fullmatch(headers.get("host")):
        return 400, "Exactly one valid Host header is required.", "bad_request"
    coding = headers.get("transfer-encoding", "chunked").lower()
    if coding != "chunked" or ("transfer-encoding" in headers and version == "1.0"):
        return 400, "The only supported transfer coding is chunked, in HTTP/1.1.", "bad_request"
    if headers.get("expect", "100-continue").lower() != "100-continue":
        return 417, "The only supported expectation is 100-continue.", "expectation_failed"
    return None
