"""Keeps the last bytes of a stream, from which its end and usage are read."""

from __future__ import annotations

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.streaming.parse_stream_end import StreamEnd, parse_stream_end

TAIL_BYTES = 8 << 10


class StreamTail:
    """The last TAIL_BYTES or more of a stream, kept as the received pieces, so that no byte is copied until the end."""

    __slots__ = ("_pieces", "_size", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pieces: list[bytes] = []  # a list, because an empty deque takes 0.7 KB and most tails are empty
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Add one piece, and drop pieces that the tail no longer needs. Mutates."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.pop(0))

    def stream_end(self, *more: bytes) -> StreamEnd:
        """Return how the stream ended, by the rules of its API. `more` is appended to the pieces, which do not change."""
        return parse_stream_end(self.endpoint, b"".join((*self._pieces, *more)))
