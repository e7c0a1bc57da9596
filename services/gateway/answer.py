"""The end of a stream on its way to the client, kept for what it tells. Pure."""

from __future__ import annotations

from collections import deque

from services.gateway.dialects import Kind
from services.gateway.dialects.endings import Ending, ending_of

TAIL_BYTES = 8 << 10


class Tail:
    """The last few KiB of a stream, kept as the pieces they came in: no byte is copied until the end."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self.events = 0

    def add(self, piece: bytes) -> None:
        """Take note of one piece. Mutates."""
        self.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def ending(self) -> Ending:
        """What the end of the stream says, in the manner of its API."""
        return ending_of(self._kind, b"".join(self._pieces))
