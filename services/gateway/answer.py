"""The end of a stream on its way to the client, kept for what it tells. Pure."""

from __future__ import annotations

from collections import deque

from services.gateway.dialects import Kind
from services.gateway.dialects.endings import Ending, ending_of

TAIL_BYTES = 8 << 10
TAIL_CHUNKS = 4  # each holds an event at least, and no API's ending is told by more


class Tail:
    """The last few KiB of a stream, kept as the pieces they came in: no byte is copied until the end."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.events = 0
        self._pieces: list[bytes] = []  # a deque that is empty takes 0.7 KB, and most of these are
        self._size = 0
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)  # behind the pieces

    def add(self, piece: bytes) -> None:
        """Take note of one piece. Mutates."""
        self.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
        for one in (*self._chunks, piece):
            self._pieces.append(one)
            self._size += len(one)
        self._chunks.clear()
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.pop(0))

    def add_chunk(self, chunk: bytes) -> None:
        """Take note of whole events within the framing of their HTTP chunk, whose lines are nobody's data. Mutates."""
        self.events += chunk.count(b"\ndata:")
        self._chunks.append(chunk)

    def ending(self, more: bytes = b"") -> Ending:
        """What the end of the stream says, in the manner of its API; with `more`, what it would say if that came next."""
        return ending_of(self.kind, b"".join((*self._pieces, *self._chunks, more)))
