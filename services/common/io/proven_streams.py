"""Streams that stay open only while what their callers have shown proves a right: a token that is taken away ends them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

# A stream outlives its token by so long at most, and the time that looking at all streams takes.
CHECK_S = 5.0
# Streams looked at in one turn: where each has a token of its own, a look takes up to a millisecond.
AT_ONCE = 4

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(eq=False, slots=True)
class _Stream:
    still_may: Callable[[], bool]
    end: Callable[[], object]


class ProvenStreams:
    """The open streams of one server. `accepted` tells all that is accepted now: streams are looked at when it has changed."""

    def __init__(self, accepted: Callable[[], object]) -> None:
        self._accepted = accepted
        self._seen = accepted()
        self._streams: dict[_Stream, None] = {}
        self._checking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, still_may: Callable[[], bool], end: Callable[[], object]) -> Callable[[], None]:
        """Call `end`, once, when `still_may` is not true any more; until what is returned is called, which must be done."""
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
        """`handler`, of streams, whose calls end with UNAUTHENTICATED when `still_may` is not true any more."""

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
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this call is not valid any more")
            serving.result()

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(call, handler.request_deserializer, handler.response_serializer)


def _behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    found: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
    return found  # type: ignore[no-any-return]
