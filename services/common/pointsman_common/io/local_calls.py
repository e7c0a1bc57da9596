"""Calls of gRPC services in the same process: the same stubs and servicers, without a connection and without serialization.

A call over gRPC costs some 50 us of CPU for each message at either end. In a process that is both ends, a LocalServer has the
services and a LocalChannel calls them. Messages are passed by reference: a sender must not change a message after it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog

from pointsman_common.io.auth import Metadata
from pointsman_common.io.channel import END_OF_STREAM

log = structlog.get_logger()

# A handler's behaviors are coroutine functions in grpc.aio; grpc-stubs types the synchronous ones only.
Handler: TypeAlias = Any

# Maximum number of messages that are sent and not read yet, as gRPC's flow control bounds them.
MAX_UNREAD = 16


class LocalServer:
    """The services that LocalChannels of this process can call. Replaces a grpc.aio.Server for add_..._to_server functions.

    Callers are not authenticated, since they are this process; a servicer that checks its caller's credentials still does.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignored: generated code also calls add_registered_method_handlers, with the same methods."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service's methods. Mutates."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def handler(self, method: str) -> Handler | None:
        """Return the handler of a method by its full name; None if there is none."""
        return self._handlers.get(method)


class LocalChannel:
    """Calls a LocalServer of this event loop. Replaces a grpc.aio.Channel for unary methods and for bidirectional streams."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server

    async def __aenter__(self) -> LocalChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def stream_stream(self, method: str, *_: object, **__: object) -> Callable[..., LocalStream]:
        """As grpc.aio.Channel.stream_stream, without iterators of requests: they are written."""

        def start(request_iterator: None = None, *, metadata: Metadata = ()) -> LocalStream:
            handler = self._server.handler(method)
            return LocalStream(None if handler is None else handler.stream_stream, method, metadata)

        return start

    def unary_unary(self, method: str, *_: object, **__: object) -> Callable[..., Awaitable[Any]]:
        """As grpc.aio.Channel.unary_unary."""

        async def call(request: object, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            handler = self._server.handler(method)
            if handler is None or handler.unary_unary is None:
                raise _unimplemented(method)
            context = LocalContext(metadata, timeout)
            try:
                async with asyncio.timeout(timeout):
                    return await handler.unary_unary(request, context)
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            except _Aborted as aborted:
                raise aborted.error from None
            except Exception as fault:
                raise _fault(method, fault) from None

        return call

    def unary_stream(self, method: str, *_: object, **__: object) -> Callable[..., Any]:
        """Not supported: the returned function raises AioRpcError."""
        return _not_supported(method)

    def stream_unary(self, method: str, *_: object, **__: object) -> Callable[..., Any]:
        """Not supported: the returned function raises AioRpcError."""
        return _not_supported(method)


class LocalContext:
    """The servicer's side of a call: the part of grpc.aio.ServicerContext that this project's servicers use."""

    def __init__(self, metadata: Metadata, timeout_s: float | None = None) -> None:
        self._metadata = metadata
        self._until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self.requests: asyncio.Queue[Any] = asyncio.Queue(MAX_UNREAD)
        self.responses: asyncio.Queue[Any] = asyncio.Queue(MAX_UNREAD)
        self._all_read = False

    def invocation_metadata(self) -> Metadata:
        """As gRPC's."""
        return self._metadata

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Return no certificate: there is no connection."""
        return {}

    def peer(self) -> str:
        """Return an empty name: there is no connection."""
        return ""

    def time_remaining(self) -> float | None:
        """As gRPC's: s, or None without a timeout."""
        return None if self._until is None else max(self._until - asyncio.get_running_loop().time(), 0.0)

    async def read(self) -> Any:
        """As gRPC's: the next message, or END_OF_STREAM."""
        if not self._all_read:
            message = await self.requests.get()
            self._all_read = message is END_OF_STREAM
            return message
        return END_OF_STREAM

    async def write(self, message: object) -> None:
        """As gRPC's."""
        await self.responses.put(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """As gRPC's."""
        raise _Aborted(_error(code, details, trailing_metadata))

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """As gRPC's, which only its synchronous server has."""
        raise _Aborted(_error(status.code, status.details, status.trailing_metadata))


class LocalStream:
    """The caller's side of a bidirectional stream: the part of grpc.aio.StreamStreamCall that this project's clients use."""

    def __init__(self, serve: Callable[..., Awaitable[None]] | None, method: str, metadata: Metadata) -> None:
        self._context = LocalContext(metadata)
        self._task = asyncio.create_task(self._serve(serve, method))
        self._end: BaseException | None = None
        self._ended = False

    async def wait_for_connection(self) -> None:
        """As gRPC's; there is no connection to wait for."""

    async def read(self) -> Any:
        """Return the next message, or END_OF_STREAM at the stream's end. Raises AioRpcError for another end than OK."""
        if not self._ended:
            message = await self._context.responses.get()
            if not isinstance(message, _End):
                return message
            self._ended, self._end = True, message.error
        if self._end is not None:
            raise self._end
        return END_OF_STREAM

    async def write(self, message: object) -> None:
        """Send a message. Raises asyncio.InvalidStateError after the stream's end, as gRPC does."""
        if self._task.done():
            raise asyncio.InvalidStateError("the stream has ended")
        if not self._context.requests.full():
            self._context.requests.put_nowait(message)
            return
        putting = asyncio.ensure_future(self._context.requests.put(message))
        try:
            await asyncio.wait((putting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()

    async def done_writing(self) -> None:
        """Mark the end of the messages of this side."""
        if not self._task.done():
            await self.write(END_OF_STREAM)

    def cancel(self) -> bool:
        """End the stream at once. Returns whether it was still open."""
        return self._task.cancel()

    async def _serve(self, serve: Callable[..., Awaitable[None]] | None, method: str) -> None:
        error: BaseException | None = None
        try:
            if serve is None:
                raise _Aborted(_unimplemented(method))
            await serve(None, self._context)
        except asyncio.CancelledError:
            error = _error(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except _Aborted as aborted:
            error = aborted.error
        except Exception as fault:
            error = _fault(method, fault)
        if self._context.responses.full() and error is not None:
            # The reader may have left. Messages that were not read by then are lost, as with gRPC.
            self._context.responses.get_nowait()
        await self._context.responses.put(_End(error))


class _End:
    """Marks the end of a stream's messages; `error`: None if its status is OK."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Aborted(Exception):
    """Raised in a servicer by LocalContext.abort()."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(str(error))
        self.error = error


def _error(code: grpc.StatusCode, details: str, trailing: Any = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*(trailing or ())), details, None)


def _unimplemented(method: str) -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNIMPLEMENTED, f"Method not found: {method}")


def _fault(method: str, fault: Exception) -> grpc.aio.AioRpcError:
    log.exception("a fault in a call within this process", method=method, exc_info=fault)
    return _error(grpc.StatusCode.UNKNOWN, f"Unexpected {type(fault).__name__}: {fault}")


def _not_supported(method: str) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> NoReturn:
        raise _unimplemented(method)

    return call
