"""Spans as plain values, and span contexts from and for `traceparent` headers (W3C Trace Context). Pure."""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TEXT = 128

Value = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's place in its trace. It is sent as `traceparent` to the callee that continues the trace."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """Value of the `traceparent` header, version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"

    def child(self, name: str) -> SpanContext:
        """Return the context of a child span. Each child needs a different `name`.

        The span id is a hash of the parent's id and `name`, so the context need not be stored while the span is open.
        """
        return SpanContext(self.trace_id, xxh3_64_intdigest(name.encode(), self.span_id) or 1, self.sampled)


def parse_traceparent(traceparent: str) -> SpanContext | None:
    """Return the span context in a header; None if the header is invalid. Source: W3C Trace Context, section 3.2."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


class SpanKind(enum.Enum):
    """The side of a call that a span describes."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event inside a span; `at_ns` is unix ns."""

    name: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span."""

    name: str  # of the operation: "POST ROUTE", "place", "chat MODEL"
    context: SpanContext  # the span's own ids
    parent_id: int  # 0 for a trace's first span
    kind: SpanKind  # SERVER: it answers the call; CLIENT: it makes it
    start_ns: int  # unix ns
    end_ns: int  # unix ns
    attributes: Mapping[str, Value]  # by OpenTelemetry's names or pointsman.*; as known_attributes() returns them
    events: tuple[SpanEvent, ...] = ()  # within the span, in the order of time
    error: str = ""  # empty if the call succeeded


def start_trace(traceparent: str, sample_ratio: float, rng: random.Random) -> tuple[SpanContext, int]:
    """Return a span context for a request with the header `traceparent`, and the id of the client's span (0: none).

    The header decides whether the request is sampled. Of the requests without a valid header, the share `sample_ratio` is.
    """
    parent = parse_traceparent(traceparent)
    span_id = rng.getrandbits(64) or 1
    if parent is not None:
        return SpanContext(parent.trace_id, span_id, parent.sampled), parent.span_id
    return SpanContext(rng.getrandbits(128) or 1, span_id, rng.random() < sample_ratio), 0


def known_attributes(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return `values` without None and empty texts; texts are cut to MAX_TEXT characters."""
    return {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None and value != ""
    }
