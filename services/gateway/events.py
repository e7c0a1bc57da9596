"""A stream of server-sent events on its way to the client: cut at events only, without the usage that only we asked for, and
with no more of an engine's failure than a client may see. Pure."""

from __future__ import annotations

import re

import msgspec

from services.gateway.answer import Tail
from services.gateway.dialects import CUT_SHORT, Form, Kind, begins_with_error, engine_event, error_event, given_up
from services.gateway.dialects.endings import Ending

MAX_HELD_BYTES = 64 << 10  # of an event whose end has not come; more goes out as it is
_ENDS = (b"\n\n", b"\r\n\r\n")
_END = re.compile(rb"(\r?\n\r?\n)")
_TELLS_OF_ERROR = re.compile(rb'"error"|event: ?error')


class EventStream:
    """What of a stream goes out, and when.

    Only whole events do, so that an error event can follow whenever the instance fails; the bytes of those that go out are the
    instance's own, but for its errors. `withhold_usage` keeps back the events with usage and without choices. Of everything so
    much is kept as tells how the stream ended.
    """

    # What a chunk meets on its way, and all of it: with many streams open none of it is in the processor's cache.
    __slots__ = ("_held", "_keeps", "_passed", "_tail", "_withhold", "count", "torn")

    def __init__(self, kind: Kind, *, withhold_usage: bool = False) -> None:
        self.count = 0  # events with data, those that were kept back included
        self.torn = False  # part of an event is out, its end is not
        self._tail = Tail(kind)
        # The last chunk that passed, where it may tell the end. OpenAI's last event is no JSON, and does not pass.
        self._keeps = kind.form is not Form.OPENAI
        self._passed = b""
        self._withhold = withhold_usage
        self._held = b""

    def passes(self, chunk: bytes) -> bool:
        """Whether `chunk`, an HTTP chunk in its framing, goes out as it came: whole events in which nothing can be in the way,
        and that tell nothing that has to be known of the stream. Else its body is to be fed. Called for nearly every token, with
        bytes that are in no cache any more when they are kept. Mutates."""
        # find() and a slice, not `in` and endswith(): those take twice as long.
        if (
            self._held
            or self.torn
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
        torn = self.torn
        if piece.endswith(_ENDS):
            self.torn = False
        elif end := max(piece.rfind(one) + len(one) if one in piece else 0 for one in _ENDS):
            piece, self._held = piece[:end], piece[end:]
            self.torn = False
        elif len(piece) <= MAX_HELD_BYTES and not torn:
            self._held = piece
            return b""
        elif not torn and begins_with_error(piece):
            # It must not go out as it is, nor be kept whole. What is cut is no JSON, which engine_event() has a sentence for.
            self._held = piece[:MAX_HELD_BYTES] + piece[-3:]
            return b""
        else:
            self.torn = True
        return self._let_out(piece, torn)

    def rest(self) -> bytes:
        """What is left at the stream's end, when its last event has none. Mutates."""
        held, self._held = self._held, b""
        if held:
            held, self.torn = self._let_out(held, self.torn), True
        return held

    def failure(self) -> bytes:
        """The event that ends the stream when its instance has failed."""
        event = error_event(CUT_SHORT, self._tail.kind.form, "instance_failed", self._next_number())
        return b"\n\n" + event if self.torn else event

    def ending(self, more: bytes = b"") -> Ending:
        """How the stream has ended, if it has; with `more`, how it would have if that came next."""
        return self._tail.ending(self._passed, more)

    def _let_out(self, piece: bytes, torn: bool) -> bytes:
        """`piece` as it may be seen; `torn`: it begins in the middle of an event."""
        if b"error" in piece or given_up(piece):
            events = _END.split(piece)
            for at in range(2 if torn else 0, len(events), 2):
                if _TELLS_OF_ERROR.search(events[at]) or given_up(events[at]):
                    events[at] = engine_event(
                        self._tail.kind.form, events[at], self._next_number(b"".join(events[:at]))
                    )
            piece = b"".join(events)
        self.count += piece.count(b"\ndata:") + piece.startswith(b"data:")
        if self._passed:
            self._tail.add(self._passed)
            self._passed = b""
        self._tail.add(piece)
        if self._withhold and b'"usage"' in piece:
            return _without_usage(piece)
        return piece

    def _next_number(self, behind: bytes = b"") -> int:
        """The number of the event that comes `behind` these bytes, where events are numbered."""
        return self.ending(behind).sequence_number + 1 if self._tail.kind.form is Form.RESPONSES else 0


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
