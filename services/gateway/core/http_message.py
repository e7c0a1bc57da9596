"""HTTP requests and answers as plain values, and the bytes of their heads."""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pointsman.gateway.core.memory_budget import Holding
from pointsman.gateway.core.request_trace import RequestTrace
from pointsman.gateway.core.request_usage import RequestUsage

_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_NO_CONTROLS = dict.fromkeys((*range(32), 127), " ")
# RFC 3986 3.2.2 and 3.2.3, without user information; no comma either, which joins two hosts in one.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")


class Headers:
    """Header fields by name, whatever its case. Fields that came several times are joined by ", "."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        self._fields: dict[str, str] = {}
        for name, value in fields:
            self.add(name, value)

    def add(self, name: str, value: str) -> None:
        """One more field. Mutates."""
        name = name.lower()
        before = self._fields.get(name)
        self._fields[name] = value if before is None else f"{before}, {value}"

    def get(self, name: str, default: str = "") -> str:
        """The field's value, `default` without one."""
        return self._fields.get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._fields

    def __len__(self) -> int:
        return len(self._fields)


class Source(Protocol):
    """Where a stream's bytes come from, told to wait while the client does not read."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ResponseWriter(Protocol):
    """What one streamed answer is written to, piece by piece: begin, write, end. After the client left nothing is written."""

    @property
    def chunked(self) -> bool:
        """Whether the client takes chunks."""

    @property
    def begun(self) -> bool:
        """Whether the head is set."""

    @property
    def ended(self) -> bool:
        """Whether the body is whole."""

    @property
    def lost(self) -> bool:
        """Whether the client has left."""

    @property
    def send(self) -> Callable[[bytes], None]:
        """Takes bytes of the answer as they are, with the framing that they need."""

    def begin(self, status: int, headers: dict[str, str], source: Source) -> None:
        """Set the head, which leaves with the first piece."""

    def write(self, piece: bytes) -> None:
        """One non-empty piece of the body."""

    def end(self) -> None:
        """The body is whole."""

    def abort(self) -> None:
        """Close the connection in the middle: the client sees that the answer is not whole."""


@dataclass(slots=True)
class Request:
    """One request. `body` is whole when the request is to be answered; `held_answer` counts what is held of a whole answer. The
    handler notes the others: `id` is ours alone, `client_id` what the request is called towards its client and its engine,
    `answer_fields` the header fields that every answer to it carries, `holder` the client whose share of the memory for bodies
    and answers it takes (empty: nobody's in particular)."""

    method: str
    path: str  # as the client wrote it, without the query
    query: str
    headers: Headers
    writer: ResponseWriter
    held_answer: Holding
    body: bytes = b""
    id: str = ""
    client_id: str = ""
    holder: bytes = b""
    answer_fields: dict[str, str] = field(default_factory=dict)
    model: str = ""
    trace: RequestTrace | None = None
    usage: RequestUsage = field(default_factory=RequestUsage)

    @property
    def media_type(self) -> str:
        """The body's type in lower case, without parameters."""
        return self.headers.get("content-type").partition(";")[0].strip().lower()


@dataclass(slots=True)
class Response:
    """A whole answer."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _clean(value: str) -> str:
    # Most values need no look at each of their letters.
    return value if value.isprintable() else value.translate(_NO_CONTROLS)


def head_bytes(status: int, headers: Mapping[str, str], *framing: str) -> bytes:
    """Status line and fields of an answer. Control characters become blanks: no value can begin a field of its own."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {_clean(value)}" for name, value in headers.items()]
    lines += framing
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def request_bytes(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> list[bytes]:
    """A request, as pieces to write. Control characters in fields become blanks."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {_clean(value)}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
    return [head, body] if body else [head]


def path_of(target: str) -> str:
    """The path of a request target, in origin or absolute form."""
    if target.startswith("/"):
        return target
    scheme, found, rest = target.partition("://")
    return f"/{rest.partition('/')[2]}" if found and scheme.isalpha() else target


def fault_of(method: str, version: str, url: bytes, headers: Headers, hosts: int) -> tuple[int, str, str] | None:
    """Status, message and code where a head must be refused; what llhttp refuses by itself never comes here. `hosts`: how many
    Host fields it has."""
    if version not in ("1.1", "1.0"):
        return 505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.", "version_unsupported"
    if not url.isascii():
        return 400, "The request target is not ASCII.", "bad_request"
    if b"#" in url or (url == b"*" and method != "OPTIONS"):
        return 400, "The request target is none of this method.", "bad_request"
    if hosts > 1 or (version == "1.1" and not hosts) or not _HOST.fullmatch(headers.get("host")):
        return 400, "One Host header is needed.", "bad_request"
    coding = headers.get("transfer-encoding", "chunked").lower()
    if coding != "chunked" or ("transfer-encoding" in headers and version == "1.0"):
        return 400, "The only transfer coding is chunked, in HTTP/1.1.", "bad_request"
    if headers.get("expect", "100-continue").lower() != "100-continue":
        return 417, "The only expectation is 100-continue.", "expectation_failed"
    return None
