"""A stream of server-sent events on its way to the client: cut at events only, without the usage that only we asked for. Pure."""

from __future__ import annotations

import msgspec

from services.gateway.answer import Tail

MAX_HELD_BYTES = 64 << 10  # of an event whose end has not come; more goes out as it is
_ENDS = (b"\n\n", b"\r\n\r\n")


class EventStream:
    """What of a stream goes out, and when.

    Only whole events do, so that an error event can follow whenever the instance fails; the bytes of those that go out are the
    instance's own. `withhold_usage` keeps back the events with usage and without choices. `tail` takes note of everything.
    """

    def __init__(self, tail: Tail, *, withhold_usage: bool = False) -> None:
        self.torn = False  # part of an event is out, its end is not
        self._tail = tail
        self._withhold = withhold_usage
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What of the stream so far can go out now, perhaps nothing. Mutates."""
        if self._held:
            piece, self._held = self._held + piece, b""
        if piece.endswith(_ENDS):
            self.torn = False
        elif end := max(piece.rfind(one) + len(one) if one in piece else 0 for one in _ENDS):
            piece, self._held = piece[:end], piece[end:]
            self.torn = False
        elif len(piece) <= MAX_HELD_BYTES and not self.torn:
            self._held = piece
            return b""
        else:
            self.torn = True
        self._tail.add(piece)
        if self._withhold and b'"usage"' in piece:
            return _without_usage(piece)
        return piece

    def rest(self) -> bytes:
        """What is left at the stream's end, when its last event has none. Mutates."""
        held, self._held = self._held, b""
        if held:
            self.torn = True
            self._tail.add(held)
        return held


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
