"""What is sent to a proxy on one stream: messages, and the body of the client's answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from pointsman.gateway.v1 import ext_proc_pb2 as pb
from pointsman_gateway.core.ext_proc import messages
from pointsman_gateway.core.http_message import Source

# Unsent bytes of an answer from which its source is paused.
HIGH_WATER = 64 << 10
_END = object()


class Outgoing:
    """Sends in the order of the calls. Pieces of the body that wait for the proxy are sent as one."""

    def __init__(self, write: Callable[[pb.ProcessingResponse], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: deque[pb.ProcessingResponse | bytes | object] = deque()
        self._unsent = 0
        self._source: Source | None = None
        self._wake = asyncio.Event()
        self._last = self._stopped = False

    @property
    def full(self) -> bool:
        """Whether so much is unsent that the source is paused."""
        return self._unsent > HIGH_WATER

    def pause_for(self, source: Source) -> None:
        """Pause `source` from now on while much is unsent."""
        self._source = source

    def message(self, message: pb.ProcessingResponse) -> None:
        """Send a message."""
        self._put(message)

    def body(self, piece: bytes) -> None:
        """Send a piece of the body."""
        was_full = self.full
        self._unsent += len(piece)
        self._put(piece)
        if self.full and not was_full and self._source is not None:
            self._source.pause()

    def end_body(self) -> None:
        """Send the end of the body."""
        self._put(_END)

    def end(self) -> None:
        """Let run() return when everything is sent."""
        self._last = True
        self._wake.set()

    def stop(self) -> None:
        """Let run() return as soon as the message that is being sent is sent; drop the others."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Send until end() or stop(). What the transport raises ends it."""
        while True:
            while self._waiting:
                for message in self._next():
                    if self._stopped:
                        return
                    await self._write(message)
            if self._last or self._stopped:
                return
            self._wake.clear()
            await self._wake.wait()

    def _put(self, item: pb.ProcessingResponse | bytes | object) -> None:
        self._waiting.append(item)
        self._wake.set()

    def _next(self) -> list[pb.ProcessingResponse]:
        """Take what is sent next. Mutates."""
        if isinstance(message := self._waiting[0], pb.ProcessingResponse):
            self._waiting.popleft()
            return [message]
        pieces: list[bytes] = []
        while self._waiting and isinstance(piece := self._waiting[0], bytes):
            pieces.append(piece)
            self._waiting.popleft()
        last = bool(self._waiting) and self._waiting[0] is _END
        if last:
            self._waiting.popleft()
        was_full, body = self.full, b"".join(pieces)
        self._unsent -= len(body)
        if was_full and not self.full and self._source is not None:
            self._source.resume()
        return list(messages.response_body(body, last=last))
