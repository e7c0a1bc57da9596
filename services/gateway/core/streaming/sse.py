"""Filters a stream of server-sent events on its way to the client.

It is cut at events only, without the usage that only we asked for, and with no more of an engine's failure than a client may see.
"""

from __future__ import annotations

import re

import msgspec

from pointsman.gateway.core.api import (
    STREAM_FAILED,
    Endpoint,
    ErrorFormat,
    begins_with_error,
    error_event,
    redact_error_event,
    was_aborted,
)
from pointsman.gateway.core.streaming.stream_tail import StreamTail
from pointsman.gateway.core.streaming.usage_and_end import StreamEnd

MAX_HELD_BYTES = 64 << 10  # of an event whose end has not come; more goes out as it is
_ENDS = (b"\n\n", b"\r\n\r\n")
_END = re.compile(rb"(\r?\n\r?\n)")
_TELLS_OF_ERROR = re.compile(rb'"error"|event: ?error')


class SseFilter:
    """What of a stream goes out, and when.

    Only whole events do, so that an error event can follow whenever the instance fails; the bytes of those that go out are the
    instance's own, but for its errors. `hide_usage` keeps back the events with usage and without choices. Of everything so
    much is kept as tells how the stream ended.
    """

    # What a chunk meets on its way, and all of it: with many streams open none of it is in the processor's cache.
    __slots__ = ("_held", "_hide_usage", "_keeps", "_passed", "_tail", "count", "mid_event")

    def __init__(self, endpoint: Endpoint, *, hide_usage: bool = False) -> None:
        self.count = 0  # events with data, those that were kept back included
        self.mid_event = False  # part of an event is out, its end is not
        self._tail = StreamTail(endpoint)
        # The last chunk that passed, where it may tell the end. OpenAI's last event is no JSON, and does not pass.
        self._keeps = endpoint.error_format is not ErrorFormat.OPENAI
        self._passed = b""
        self._hide_usage = hide_usage
        self._held = b""

    def pass_unchanged(self, chunk: bytes) -> bool:
        """Whether `chunk`, an HTTP chunk in its framing, goes out as it came: whole events in which nothing can be in the way,
        and that tell nothing that has to be known of the stream. Else its body is to be fed. Called for nearly every token, with
        bytes that are in no cache any more when they are kept. Mutates."""
        # find() and a slice, not `in` and endswith(): those take twice as long.
        if (
            self._held
            or self.mid_event
            or chunk[-5:] != b"}\n\n\r\n"
            or chunk.find(b"error") >= 0
            or chunk.find(b'"abort"') >= 0
            or chunk.find(b'"usage"') >= 0
        ):
            return False
        # The framing's lines are nobody's data.
        self.count += chunk.count(b"\ndata:")
        if self._keeps:
            self._passed = chunk
        return True

    def feed(self, piece: bytes) -> bytes:
        """What of the stream so far can go out now, perhaps nothing. Mutates."""
        if self._held:
            piece, self._held = self._held + piece, b""
        mid_event = self.mid_event
        if piece.endswith(_ENDS):
            self.mid_event = False
        elif end := max(piece.rfind(one) + len(one) if one in piece else 0 for one in _ENDS):
            piece, self._held = piece[:end], piece[end:]
            self.mid_event = False
        elif len(piece) <= MAX_HELD_BYTES and not mid_event:
            self._held = piece
            return b""
        elif not mid_event and begins_with_error(piece):
            # It must not go out as it is, nor be kept whole. What is cut is no JSON, which redact_error_event() has a sentence
            # for.
            self._held = piece[:MAX_HELD_BYTES] + piece[-3:]
            return b""
        else:
            self.mid_event = True
        return self._let_out(piece, mid_event)

    def flush(self) -> bytes:
        """What is left at the stream's end, when its last event has none. Mutates."""
        held, self._held = self._held, b""
        if held:
            held, self.mid_event = self._let_out(held, self.mid_event), True
        return held

    def failure_event(self) -> bytes:
        """The event that ends the stream when its instance has failed."""
        event = error_event(STREAM_FAILED, self._tail.endpoint.error_format, "instance_failed", self._next_number())
        return b"\n\n" + event if self.mid_event else event

    def stream_end(self, more: bytes = b"") -> StreamEnd:
        """How the stream has ended, if it has; with `more`, how it would have if that came next."""
        return self._tail.stream_end(self._passed, more)

    def _let_out(self, piece: bytes, mid_event: bool) -> bytes:
        """`piece` as it may be seen; `torn`: it begins in the middle of an event."""
        if b"error" in piece or was_aborted(piece):
            events = _END.split(piece)
            for at in range(2 if mid_event else 0, len(events), 2):
                if _TELLS_OF_ERROR.search(events[at]) or was_aborted(events[at]):
                    events[at] = redact_error_event(
                        self._tail.endpoint.error_format, events[at], self._next_number(b"".join(events[:at]))
                    )
            piece = b"".join(events)
        self.count += piece.count(b"\ndata:") + piece.startswith(b"data:")
        if self._passed:
            self._tail.add(self._passed)
            self._passed = b""
        self._tail.add(piece)
        if self._hide_usage and b'"usage"' in piece:
            return _without_usage(piece)
        return piece

    def _next_number(self, behind: bytes = b"") -> int:
        """The number of the event that comes `behind` these bytes, where events are numbered."""
        return (
            self.stream_end(behind).sequence_number + 1
            if self._tail.endpoint.error_format is ErrorFormat.RESPONSES
            else 0
        )


def _without_usage(piece: bytes) -> bytes:
    """`piece`, whole events, without those that carry usage and no choice."""
    return b"\n\n".join(event for event in piece.split(b"\n\n") if not _is_usage(event.strip()))


def _is_usage(event: bytes) -> bool:
    if not event.startswith(b"data:") or b'"usage"' not in event:
        return False
    try:
        found = msgspec.json.decode(event[5:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("choices") == [] and isinstance(found.get("usage"), dict)
