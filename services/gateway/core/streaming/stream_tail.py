"""Keeps the last bytes of a stream on its way to the client, from which its end and usage are read."""

from __future__ import annotations

from pointsman.gateway.core.api import Endpoint
from pointsman.gateway.core.streaming.usage_and_end import StreamEnd, parse_stream_end

TAIL_BYTES = 8 << 10


class StreamTail:
    """The last few KiB of a stream, kept as the pieces they came in: no byte is copied until the end."""

    __slots__ = ("_pieces", "_size", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pieces: list[bytes] = []  # a deque that is empty takes 0.7 KB, and most of these are
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Take note of one piece. Mutates."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.pop(0))

    def stream_end(self, *more: bytes) -> StreamEnd:
        """What the end of the stream says, in the manner of its API, if `more` is what came after the pieces."""
        return parse_stream_end(self.endpoint, b"".join((*self._pieces, *more)))
