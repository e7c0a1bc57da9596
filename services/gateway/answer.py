"""The end of a stream on its way to the client, kept for what it tells. Pure."""

from __future__ import annotations

from services.gateway.dialects import Kind
from services.gateway.dialects.endings import Ending, ending_of

TAIL_BYTES = 8 << 10


class Tail:
    """The last few KiB of a stream, kept as the pieces they came in: no byte is copied until the end."""

    __slots__ = ("_pieces", "_size", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._pieces: list[bytes] = []  # a deque that is empty takes 0.7 KB, and most of these are
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Take note of one piece. Mutates."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.pop(0))

    def ending(self, *more: bytes) -> Ending:
        """What the end of the stream says, in the manner of its API, if `more` is what came after the pieces."""
        return ending_of(self.kind, b"".join((*self._pieces, *more)))
