"""Streams that stay open only while their callers' credentials are valid: the removal of a token ends its streams."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

# Interval between two checks, s. A stream outlives its token by at most this interval and the duration of a check.
CHECK_S = 5.0
# Number of streams that are checked in one iteration of the event loop. If each stream has its own token, checking one takes up
# to a millisecond.
AT_ONCE = 4

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(eq=False, slots=True)
class _Stream:
    still_may: Callable[[], bool]
    end: Callable[[], object]


class ProvenStreams:
    """The open streams of one server. `accepted` returns all credentials that are valid now; a change starts a check of all
    streams."""

    def __init__(self, accepted: Callable[[], object]) -> None:
        self._accepted = accepted
        self._seen = accepted()
        self._streams: dict[_Stream, None] = {}
        self._checking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, still_may: Callable[[], bool], end: Callable[[], object]) -> Callable[[], None]:
        """Call `end` once when `still_may` returns false. Return a function that stops the watch; the caller must call it."""
        stream = _Stream(still_may, end)
        self._streams[stream] = None
        if self._checking is None:
            self._checking = asyncio.ensure_future(self._check_now_and_then())

        def unfollow() -> None:
            self._streams.pop(stream, None)
            if not self._streams and self._checking is not None:
                self._checking.cancel()
                self._checking = None

        return unfollow

    async def _check_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            accepted = self._accepted()
            if accepted == self._seen:
                continue
            self._seen = accepted
            for number, stream in enumerate(list(self._streams), 1):
                if stream in self._streams and not stream.still_may():
                    self._streams.pop(stream)
                    stream.end()
                if not number % AT_ONCE:
                    await asyncio.sleep(0)

    def handler(self, handler: Handler, still_may: Callable[[], bool]) -> Handler:
        """Return a copy of the stream handler `handler` whose calls end with UNAUTHENTICATED when `still_may` returns false."""

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async def serve() -> None:
                served = _behaviour(handler)(request, context)
                if inspect.isasyncgen(served):
                    async for response in served:
                        await context.write(response)
                else:
                    await served

            serving = asyncio.ensure_future(serve())
            ended = False

            def end() -> None:
                nonlocal ended
                ended = True
                serving.cancel()

            unfollow = self.follow(still_may, end)
            try:
                await asyncio.wait((serving,))
            finally:
                unfollow()
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            if ended:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this call is no longer valid")
            serving.result()

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(call, handler.request_deserializer, handler.response_serializer)


def _behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    found: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
    return found  # type: ignore[no-any-return]
