"""Filters a stream of server-sent events on its way to the client.

The filter cuts the stream only between events, removes usage that only the gateway requested, and redacts an engine's errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pointsman_gateway.core.api import (
    STREAM_FAILED,
    Endpoint,
    ErrorFormat,
    begins_with_error,
    error_event,
    redact_error_event,
    reports_error,
    was_aborted,
)
from pointsman_gateway.core.json_object import json_object
from pointsman_gateway.core.streaming.id_comments import end_of_comment, ids_in, incomplete, without_comments
from pointsman_gateway.core.streaming.parse_stream_end import StreamEnd, StreamTail

# Maximum size of a held incomplete event, bytes. A longer one is sent in parts.
MAX_HELD_BYTES = 64 << 10
# The same where usage is corrected, which needs the whole event: the last one of a response has all of the answer. Usage in a
# longer event is the engine's.
MAX_CORRECTED_BYTES = 2 << 20
# Maximum size of held events that one comment tells of, bytes. Longer ones are sent, and the answer is no longer continued.
MAX_TOLD_BYTES = 8 << 20
# Size of a token's id in a record, and by which the memory for a record grows, bytes.
RECORD_TOKEN_BYTES = 6
RECORD_STEP = RECORD_TOKEN_BYTES * 8_192
_ENDS = (b"\n\n", b"\r\n\r\n")
EVENT_END = re.compile(rb"(\r?\n\r?\n)")
_COMMENT = ord(":")
_HAS_TEXT = re.compile(rb'"(?:content|text)": ?"[^"]')
_TELLS_OF_ERROR = re.compile(rb'"error"|event: ?error')


class SseFilter:
    """Selects the bytes of a stream that are sent to the client.

    Only whole events are sent, so that an error event can follow whenever the instance fails. Except for errors, the events are
    byte for byte the instance's, but for those with usage if there is `correct_usage`. `hide_usage` drops events that have usage
    and no choices. The filter keeps the tail of the stream, from which its end and usage are read.

    With `tells` the instance may tell the token ids of its events in comments (id_comments.py), which are not sent. They are
    collected in `record` if another instance can go on with the answer, else it is None. Beyond `record_limit` bytes it asks
    `more` for memory for RECORD_STEP bytes, and is None if there is none. If the instance does not tell, the
    events themselves may be collected in `texts`, from their "choices" on, up to `texts_limit` bytes. While another instance can
    go on, an error of this one is not sent either: the stream is cut before it.
    """

    # A chunk touches all of these fields. They are few because with many open streams none is in the CPU cache.
    __slots__ = (
        "_cut",
        "_held",
        "_hide_usage",
        "_passed",
        "_tail",
        "correct_usage",
        "count",
        "mid_event",
        "more",
        "record",
        "record_limit",
        "tells",
        "texts",
        "texts_limit",
    )

    def __init__(self, endpoint: Endpoint, *, hide_usage: bool = False, tells: bool = False) -> None:
        self.tells = tells
        self.record: bytearray | None = None
        self.record_limit = RECORD_STEP
        self.more: Callable[[int], bool] = bool
        self.texts: bytearray | None = None
        self.texts_limit = 0
        self.correct_usage: Callable[[bytes], bytes] | None = None
        self._cut = False  # nothing more is sent of this instance's answer
        self.count = 0  # events with data, including dropped ones
        self.mid_event = False  # part of an event has been sent, but not its end
        self._tail = StreamTail(endpoint)
        # The last chunk that passed unchanged: the stream may end with it, or it may have the finish reason.
        self._passed = b""
        self._hide_usage = hide_usage
        self._held = b""

    def pass_whole(self, chunk: bytes) -> bytes:
        """Return what is sent of `chunk`, an HTTP chunk with its framing: all but a comment that tells token ids. If nothing is
        returned, the chunk's body must be passed to feed(). Mutates.

        Whole events are sent that contain no error, no abort and no usage. Called for nearly every token.
        """
        # `in` and endswith() take twice as long as find() and a slice.
        if (
            self._held
            or self._cut
            or self.mid_event
            or chunk[-5:] != b"}\n\n\r\n"
            or chunk.find(b"error") >= 0
            or chunk.find(b'"abort"') >= 0
            or chunk.find(b'"usage"') >= 0
        ):
            return b""
        # The lines of the framing do not start with "data:".
        events_here = chunk.count(b"\ndata:")
        if self.tells:
            # The comment follows the line with the chunk's size.
            at = chunk.find(b"\n") + 1
            if chunk.find(b"\n:", at) >= 0:
                return b""
            if chunk[at] == _COMMENT:
                if not (end := end_of_comment(chunk, at)):
                    return b""
                if self.record is not None:
                    self.record += chunk[at : end - 2].partition(b"x")[0]
                    if len(self.record) > self.record_limit:
                        self._grow()
                events = chunk[end:]
                chunk = b"%x\r\n%b" % (len(events) - 2, events)
            elif (texts := self.texts) is not None:
                if events_here == 1 and len(texts) < self.texts_limit:
                    texts += chunk[chunk.find(b'"choices"') : -2]
                else:
                    self._add_text(chunk[:-2])
        self.count += events_here
        self._passed = chunk
        return chunk

    def feed(self, piece: bytes) -> bytes:
        """Add a piece of the stream; return the bytes that can be sent now, possibly none. Mutates."""
        if self._cut:
            return b""
        if self._held:
            piece, self._held = self._held + piece, b""
        mid_event = self.mid_event
        if piece.endswith(_ENDS):
            self.mid_event = False
        elif end := max(piece.rfind(end_mark) + len(end_mark) if end_mark in piece else 0 for end_mark in _ENDS):
            piece, self._held = piece[:end], piece[end:]
            self.mid_event = False
        elif len(piece) <= (MAX_HELD_BYTES if self.correct_usage is None else MAX_CORRECTED_BYTES) and not mid_event:
            self._held = piece
            return b""
        elif not mid_event and begins_with_error(piece):
            # An error event that is too long to hold must not be sent unredacted. The held rest is no valid JSON, for which
            # redact_error_event() returns a fixed message.
            self._held = piece[:MAX_HELD_BYTES] + piece[-3:]
            return b""
        else:
            self.mid_event = True
        if self.tells and not self.mid_event:
            # A comment tells of the events behind it, and they are sent all at once.
            last = piece.rfind(b"\n\n:")
            begin = last + 2 if last >= 0 else 0
            if piece[begin] == _COMMENT and incomplete(piece[begin:]):
                if len(piece) - begin + len(self._held) <= MAX_TOLD_BYTES:
                    piece, self._held = piece[:begin], piece[begin:] + self._held
                else:
                    self.record = None
        return self._let_out(piece, mid_event) if piece else b""

    def flush(self) -> bytes:
        """Return the held bytes at the end of the stream, if the last event is incomplete. Mutates."""
        held, self._held = self._held, b""
        if (self.record is not None or self.texts is not None) and not self.stream_end(held).complete:
            return b""
        if held:
            held, self.mid_event = self._let_out(held, self.mid_event), True
        return held

    def _grow(self) -> None:
        """Ask for memory for the record, which has grown beyond its limit. Mutates."""
        while self.record is not None and len(self.record) > self.record_limit:
            if self.more(RECORD_STEP):
                self.record_limit += RECORD_STEP
            else:
                self.record = None

    def _add_text(self, events: bytes) -> None:
        """Collect whole events; all are dropped if they are too many, or if an event is sent in parts. Mutates."""
        assert self.texts is not None
        for event in events.split(b"\n\n")[:-1]:
            if event[:1] != b":":
                self.texts += event[max(event.find(b'"choices"'), 0) :] + b"\n\n"
        if self.mid_event or len(self.texts) > self.texts_limit:
            self.texts = None

    @property
    def has_text(self) -> bool:
        """Whether what the client got is known by its events, and ends with a whole one."""
        return bool(self.texts) and not self.mid_event

    @property
    def can_continue(self) -> bool:
        """Whether what the client got is known by its tokens, and ends with a whole event."""
        return self.record is not None and _has_ids(self.record) and not self.mid_event

    def begin_again(self) -> None:
        """Go on with the answer of another instance, whose first event follows what the client has. Mutates."""
        self._held, self._cut = b"", False

    def failure_event(self) -> bytes:
        """Return the event that ends the stream if the instance failed."""
        event = error_event(STREAM_FAILED, self._tail.endpoint.error_format, "instance_failed", self._next_number())
        return b"\n\n" + event if self.mid_event else event

    def stream_end(self, more: bytes = b"") -> StreamEnd:
        """Return how the stream ended; with `more`, how it would have ended with these bytes appended."""
        return self._tail.stream_end(self._passed, more)

    def _let_out(self, piece: bytes, mid_event: bool) -> bytes:
        """Return `piece` as the client may see it. `mid_event`: it begins in the middle of an event. Mutates."""
        if b"error" in piece or was_aborted(self._tail.endpoint.error_format, piece):
            piece = self._without_errors(EVENT_END.split(piece), mid_event)
        if self.tells:
            if self.record is not None:
                self.record += ids_in(piece)
                if len(self.record) > self.record_limit:
                    self._grow()
            piece = without_comments(piece)
            if self.texts is not None:
                self._add_text(piece)
        self.count += piece.count(b"\ndata:") + piece.startswith(b"data:")
        if self._passed:
            self._tail.add(self._passed)
            self._passed = b""
        self._tail.add(piece)
        if b'"usage"' in piece:
            if self._hide_usage:
                piece = _without_usage(piece)
            if self.correct_usage is not None:
                piece = self.correct_usage(piece)
        return piece

    def _without_errors(self, events: list[bytes], mid_event: bool) -> bytes:
        """Return events, each followed by its end, as one piece in which the instance's errors are redacted; up to the first
        error, if another instance can go on. Mutates."""
        form = self._tail.endpoint.error_format
        for at in range(2 if mid_event else 0, len(events), 2):
            event = events[at]
            if not (_TELLS_OF_ERROR.search(event) or was_aborted(form, event)):
                continue
            # The comment of the error's event goes with it: the client gets neither.
            told = self.record is not None and at >= 2 and events[at - 2].startswith(b":")
            kept = b"".join(events[: at - 2 if told else at])
            known = self.record is not None and _has_ids(self.record + ids_in(kept))
            known = known or (self.texts is not None and _HAS_TEXT.search(self.texts + kept) is not None)
            if known and reports_error(form, event):
                self._cut, self._held, self.mid_event = True, b"", False
                return kept
            events[at] = redact_error_event(form, event, self._next_number(kept))
        return b"".join(events)

    def _next_number(self, behind: bytes = b"") -> int:
        """Return the sequence number of the event after the bytes `behind`; 0 for APIs that do not number events."""
        numbered = self._tail.endpoint.error_format is ErrorFormat.RESPONSES
        return self.stream_end(behind).sequence_number + 1 if numbered else 0


def _has_ids(record: bytes | bytearray) -> bool:
    return bool(record.strip(b":."))


def _without_usage(piece: bytes) -> bytes:
    """Return the whole events in `piece` without those that have usage and no choices."""
    *parts, rest = EVENT_END.split(piece)
    events = zip(parts[::2], parts[1::2], strict=True)
    return b"".join(event + end for event, end in events if not _is_usage(event)) + (b"" if _is_usage(rest) else rest)


def _is_usage(event: bytes) -> bool:
    if not (event := event.strip()).startswith(b"data:") or b'"usage"' not in event:
        return False
    found = json_object(event[5:])
    return found.get("choices") == [] and isinstance(found.get("usage"), dict)
