"""One stream of Envoy's external processing: a client's request that a proxy brings, and the answer that it takes away.

The proxy sends the request's head and body. The gateway answers with the endpoints, and with the fields and the body that the
instance gets, or with a response for the client. Then the proxy sends what the instance answers, and the gateway what the client
gets. The stream ends with the answer, or when the client leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import grpc
import grpc.aio
import structlog

from pointsman.gateway.v1 import ext_proc_pb2 as pb
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_gateway.core.ext_proc import messages
from pointsman_gateway.core.ext_proc.endpoints import Subset, served_endpoint, subset_of, target_at
from pointsman_gateway.core.http_message import Response, Source, path_of
from pointsman_gateway.core.memory_budget import Holding, MemoryBudget
from pointsman_gateway.core.request.request_events import Target
from pointsman_gateway.io.engines.engine_connection import UpstreamError, UpstreamResponse
from pointsman_gateway.io.ext_proc.addresses import Addresses
from pointsman_gateway.io.ext_proc.outgoing import Outgoing
from pointsman_gateway.io.http.server_types import (
    BODY_TOO_LARGE,
    NO_ROOM_FOR_BODY,
    SHUTTING_DOWN,
    TOO_SLOW,
    HttpHandler,
    ServerLimits,
)
from pointsman_gateway.io.request.ext_proc_request import ExtProcRequest, InnocentFailure, OtherInstanceAnswered

log = structlog.get_logger()

Context: TypeAlias = "grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]"

# Statuses of a proxy's own answers if it gets none of an instance, and the field by which Envoy tells how long an instance took,
# which those do not have. A proxy may be told to leave it out.
_PROXYS = (502, 503, 504)
_TIMED_OUT = 504
_UPSTREAM_TIME = "x-envoy-upstream-service-time"
# Field of an answer of an Envoy that had no room for the request.
_OVERLOADED = "x-envoy-overloaded"
# How long an answer may be silent once the agent of its instance is gone, s.
LOST_S = 10.0
_OUT_OF_ORDER = 500, "The proxy's messages are out of order.", "messages_out_of_order"
_WRONG_MODE = 500, "The proxy must send both bodies in the mode FULL_DUPLEX_STREAMED.", "wrong_processing_mode"


class _Refused(Exception):
    """Raised if a response answers the client before there is a request to run."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class Streams:
    """What all streams share: the handler of requests, the limits and the memory of clients, and addresses."""

    def __init__(self, handler: HttpHandler, limits: ServerLimits, bodies: MemoryBudget, answers: MemoryBudget) -> None:
        self.handler = handler
        self.limits = limits
        self.bodies = bodies
        self.answers = answers
        self.addresses = Addresses()
        self.open: set[ProxyStream] = set()


class ProxyStream:
    """One stream. It is the Proxy of its request, the Carrier of the answer, and the ResponseWriter of what the client gets."""

    chunked = False  # HTTP's framing is the proxy's
    opened = False

    def __init__(self, streams: Streams, context: Context) -> None:
        self._streams = streams
        self._context = context
        self._outgoing = Outgoing(context.write)
        self.send: Callable[[bytes], None] = self._outgoing.body
        self.begun = self.ended = self.lost = False
        self._held_body = Holding(streams.bodies)
        self._held_answer = Holding(streams.answers)
        self._target = ""  # path and query of the request
        self._fields: list[str] = []  # names of the request's fields
        self._request_trailers = False
        self._subset: Subset | None = None
        self._request: ExtProcRequest | None = None
        self._work: asyncio.Future[Response | None] | None = None
        self._reader: asyncio.Task[None] | None = None  # reads the request
        self._must_end = False
        self._disorder = False
        self._endpoints: dict[str, Target] = {}  # those that the proxy was given, the first one first
        self._answer: UpstreamResponse | None = None
        self._answer_fields: list[str] = []  # names of the answer's fields
        self._answer_trailers = False
        self._bodiless = False  # the answer has nothing after its head
        self._served = ""
        self.heard_at = 0.0  # when the last message came, monotonic s
        self._instance_lost = False
        self._head_here = asyncio.Event()
        self._readable = asyncio.Event()
        self._readable.set()

    async def run(self) -> None:
        """Carry the request to its end."""
        self._streams.open.add(self)
        self._reader = asyncio.current_task()
        try:
            request = await self._read_request()
            self._reader = None
            if request is not None:
                await self._carry(request)
        except _Refused as refused:
            await self._context.write(self._immediate(refused.response))
        except asyncio.CancelledError:
            if self._reader is None or not self._must_end:
                raise
            await self._context.write(self._immediate(self._error(*SHUTTING_DOWN)))
        finally:
            self._streams.open.discard(self)
            self._held_body.let_go()
            self._held_answer.let_go()

    def cancel(self) -> None:
        """End the request; its client gets an error."""
        self._must_end = True
        if self._work is not None:
            self._work.cancel()
        elif self._reader is not None:
            self._reader.cancel()

    def overdue(self, now: float) -> None:
        """Let an answer fail that has been silent for too long, though it was read. `now`: monotonic s."""
        answer, limit_s = self._answer, LOST_S if self._instance_lost else self._streams.limits.stall_s
        reads = answer is not None and not answer.whole and self._readable.is_set()
        if reads and now - self.heard_at > limit_s:
            self.give_up("silent")

    async def _carry(self, request: ExtProcRequest) -> None:
        self._work = asyncio.ensure_future(self._streams.handler.answer(request))
        reading = asyncio.create_task(self._read_answer())
        sending = asyncio.create_task(self._outgoing.run())
        try:
            await asyncio.wait({self._work, reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                self._end_for(reading, sending)
            await asyncio.wait({self._work})
            whole = self._send_result(self._work)
            self._outgoing.end()
            if not self.lost:
                await asyncio.wait({sending})
            if not whole and not self.lost:
                await self._context.abort(grpc.StatusCode.INTERNAL, "the answer was broken off")
        finally:
            self.lost = True
            self._outgoing.stop()
            self._work.cancel()
            reading.cancel()
            try:
                # gRPC sends no status behind a message whose sending was given up, and the stream would never end for the proxy.
                await asyncio.wait({sending}, timeout=self._streams.limits.stall_s)
            finally:
                sending.cancel()
                await asyncio.gather(self._work, reading, sending, return_exceptions=True)

    def _end_for(self, reading: asyncio.Task[bool], sending: asyncio.Task[None]) -> None:
        """End the work, since nothing more can be read or sent: the stream is over, or a message cannot be handled."""
        assert self._work is not None
        self._work.cancel()
        if sending.done():
            self.lost = True
        elif (fault := reading.exception()) is not None:
            log.warning("a message of a proxy cannot be handled", reason=f"{type(fault).__name__}: {fault}"[:200])
            self._disorder = True
        else:
            self._disorder = not reading.result()
            self.lost = not self._disorder

    # The request.

    async def _read_request(self) -> ExtProcRequest | None:
        """Read the request; None if the client has left, or the proxy ignores what it is told. Raises _Refused. Mutates."""
        limits = self._streams.limits
        try:
            async with asyncio.timeout(limits.head_s):
                message = await self._context.read()
        except TimeoutError:
            return None
        if message is END_OF_STREAM or message.observability_mode:
            return None
        if message.WhichOneof("request") != "request_headers":
            raise _Refused(self._error(*_OUT_OF_ORDER))
        head = message.request_headers
        received = messages.fields_of(head.headers)
        self._fields = [name for name, _ in received]
        if len(received) > limits.max_headers or head.ByteSize() > limits.max_head_bytes:
            raise _Refused(self._error(431, "The request's head is too large.", "head_too_large"))
        pseudo, headers = messages.head_of(received)
        self._target = pseudo.get(":path", "")
        path, query = self._path(), self._target.partition("?")[2]
        request = ExtProcRequest(pseudo.get(":method", ""), path, query, headers, self, self._held_answer, proxy=self)
        self._request = request
        refusal = self._streams.handler.admit(request)
        if refusal is None and message.HasField("protocol_config"):
            configured = message.protocol_config
            modes = {configured.request_body_mode, configured.response_body_mode}
            if modes != {pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED}:
                refusal = self._error(*_WRONG_MODE)
        if refusal is not None:
            raise _Refused(refusal)
        self._held_body.holder = self._held_answer.holder = request.holder
        self._subset = subset_of(message.metadata_context.filter_metadata)
        if head.end_of_stream:
            return request
        try:
            async with asyncio.timeout(limits.body_s):
                body = await self._read_body()
        except TimeoutError:
            raise _Refused(self._error(*TOO_SLOW)) from None
        if body is None:
            return None
        request.body = body
        return request

    async def _read_body(self) -> bytes | None:
        """Read the request's body; None if the client has left. Raises _Refused. Mutates."""
        parts: list[bytes] = []
        size = 0
        while True:
            async with asyncio.timeout(self._streams.limits.body_stall_s):
                message = await self._context.read()
            if message is END_OF_STREAM:
                return None
            kind = message.WhichOneof("request")
            if kind == "request_trailers":
                self._request_trailers = True
                return b"".join(parts)
            if kind != "request_body":
                raise _Refused(self._error(*_OUT_OF_ORDER))
            piece = message.request_body.body
            size += len(piece)
            if size > self._streams.limits.max_body_bytes:
                raise _Refused(self._error(*BODY_TOO_LARGE))
            if not self._held_body.take(len(piece)):
                raise _Refused(self._error(*NO_ROOM_FOR_BODY))
            parts.append(piece)
            if message.request_body.end_of_stream:
                return b"".join(parts)

    def _error(self, status: int, message: str, code: str) -> Response:
        return self._streams.handler.error(status, message, code, self._path())

    def _path(self) -> str:
        return path_of(self._target).partition("?")[0]

    # The instance's side (Proxy).

    @property
    def restricts(self) -> bool:
        """Whether the proxy has named a subset of the endpoints."""
        return self._subset is not None

    async def excluded(self, targets: Sequence[Target]) -> list[str]:
        """Return the ids of the instances that the proxy does not allow."""
        if (subset := self._subset) is None:
            return []
        found = await asyncio.gather(*(self._streams.addresses.of(target) for target in targets))
        return [target.instance_id for target, at in zip(targets, found, strict=True) if not subset.allows(*at)]

    async def post(
        self,
        targets: Sequence[Target],
        path: str,
        payload: bytes,
        fields: Mapping[str, str],
        every: Callable[[], Sequence[Target]],
    ) -> UpstreamResponse:
        """Have the request sent, and wait for the answer's head."""
        first = targets[0]
        if not self._endpoints:
            await self._send_request(targets, path, payload, fields)
        await self._head_here.wait()
        assert self._answer is not None
        headers = self._answer.headers
        if self._answer.status in _PROXYS and _UPSTREAM_TIME not in headers:
            if _OVERLOADED in headers or self._answer.status == _TIMED_OUT:
                raise InnocentFailure("the proxy has given the request up", 0)
            raise UpstreamError("the proxy got no answer", 0)
        answered = self._who_answered(every)
        if answered.instance_id != first.instance_id:
            raise OtherInstanceAnswered(answered)
        return self._answer

    def _who_answered(self, every: Callable[[], Sequence[Target]]) -> Target:
        """Return the instance that answered: the first of the list, unless the proxy tells of another one that is known."""
        first = next(iter(self._endpoints.values()))
        if not self._served:
            return first
        found = target_at(self._served, self._endpoints)
        if found is None:
            found = target_at(self._served, {str(self._streams.addresses.known(target)): target for target in every()})
        if found is None:
            log.warning("a proxy asked an unknown instance", chosen=first.instance_id, endpoint=self._served)
        return found or first

    def instance_lost(self) -> None:
        """Let the answer fail if it stays silent."""
        self._instance_lost = True

    async def _send_request(
        self, targets: Sequence[Target], path: str, payload: bytes, fields: Mapping[str, str]
    ) -> None:
        address = await self._streams.addresses.of(targets[0])
        if not address.host:
            raise InnocentFailure("the instance's host has no address", sent=False)
        self._endpoints[str(address)] = targets[0]
        for target in targets[1:]:
            if (address := self._streams.addresses.known(target)).host:
                self._endpoints.setdefault(str(address), target)
        changed = dict(fields) if path == self._target else {":path": path, **fields}
        self._outgoing.message(messages.destination(list(self._endpoints), self._fields, changed))
        for message in messages.request_body(payload, last=not self._request_trailers):
            self._outgoing.message(message)
        if self._request_trailers:
            self._outgoing.message(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    async def _read_answer(self) -> bool:
        """Read what the instance answers, until the stream ends: the client has left, or the proxy has lost the instance. Return
        False if a message is out of order."""
        while (message := await self._context.read()) is not END_OF_STREAM:
            self.heard_at = time.monotonic()
            if not self._take(message):
                log.warning("a proxy's messages are out of order", message=message.WhichOneof("request"))
                return False
            if not self._readable.is_set():
                await self._readable.wait()
                self.heard_at = time.monotonic()
        return True

    def _take(self, message: pb.ProcessingRequest) -> bool:
        """Handle a message; return False if it is out of order. Mutates."""
        kind, answer = message.WhichOneof("request"), self._answer
        if kind == "response_headers":
            return self._take_head(message)
        if answer is None or answer.whole or kind not in ("response_body", "response_trailers"):
            return False
        if kind == "response_trailers":
            self._answer_trailers = True
            answer.end(None)
            return True
        if piece := message.response_body.body:
            answer.take(piece) if answer.sink is None else answer.sink(piece)
        if message.response_body.end_of_stream:
            answer.end(None)
        return True

    def _take_head(self, message: pb.ProcessingRequest) -> bool:
        if self._answer is not None:
            return False
        received = messages.fields_of(message.response_headers.headers)
        self._answer_fields = [name for name, _ in received]
        pseudo, headers = messages.head_of(received)
        if not pseudo.get(":status", "").isdecimal():
            return False
        self._answer = answer = UpstreamResponse(self)
        answer.status, answer.headers = int(pseudo[":status"]), headers
        self._bodiless = message.response_headers.end_of_stream
        if self._bodiless:
            answer.end(None)
        self._served = served_endpoint(message.metadata_context.filter_metadata, message.attributes)
        self._head_here.set()
        if not self._endpoints:
            # The proxy itself has answered the client: a timeout of its own.
            self.lost = True
            assert self._work is not None
            self._work.cancel()
        return True

    # The answer that is read (Carrier).

    def pause(self) -> None:
        """Read nothing more until resume()."""
        self._readable.clear()

    def resume(self) -> None:
        """Go on reading."""
        self._readable.set()

    def give_up(self, text: str) -> None:
        """End the answer with an UpstreamError."""
        if self._answer is not None:
            self._answer.end(UpstreamError(text, self._answer.status))

    def abort(self) -> None:
        """Do nothing, as Carrier and as ResponseWriter: the proxy breaks the answer off when the stream ends."""

    # The client's side (ResponseWriter).

    @property
    def full(self) -> bool:
        """Whether so much is unsent that the source is paused."""
        return self._outgoing.full

    def ping_in_silence(self, interval_s: float, since: float, headers: dict[str, str], ping: bytes) -> None:
        """Do nothing: the head of a proxy's answer is the instance's."""

    def begin(self, status: int, headers: dict[str, str], source: Source) -> None:
        """Send the head."""
        self.begun = True
        self._send_head(status, headers)
        self.go_on(source)

    def go_on(self, source: Source) -> None:
        """Replace the source."""
        self._outgoing.pause_for(source)

    def write(self, piece: bytes) -> None:
        """Send one non-empty piece of the body."""
        self._outgoing.body(piece)

    def end(self) -> None:
        """Send the end of the body."""
        self._send_end()
        self.ended = True

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert self._answer is not None
        assert self._request is not None
        self._held_body.let_go()
        changed = None if status == self._answer.status else status
        fields = dict(headers) | self._request.answer_fields
        self._outgoing.message(messages.response_head(changed, self._answer_fields, fields))

    def _send_end(self) -> None:
        if self._answer_trailers:
            self._outgoing.message(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
        else:
            self._outgoing.end_body()

    def _send_result(self, work: asyncio.Future[Response | None]) -> bool:
        """Send what the work returned; return False for an answer that was broken off."""
        if work.cancelled():
            if self.begun:
                return self.ended
            self._send_whole(self._error(*(_OUT_OF_ORDER if self._disorder else SHUTTING_DOWN)))
            return True
        if (fault := work.exception()) is not None:
            log.error("a fault in the gateway", exc_info=fault)
            return False
        if (response := work.result()) is not None:
            self._send_whole(response)
            return True
        return self.ended

    def _send_whole(self, response: Response) -> None:
        if self.lost:
            return
        if self._answer is None or self._bodiless:
            self._outgoing.message(self._immediate(response))
            return
        self._send_head(response.status, response.headers)
        self._outgoing.body(response.body)
        self._send_end()

    def _immediate(self, response: Response) -> pb.ProcessingResponse:
        fields = self._request.answer_fields if self._request is not None else {}
        return messages.immediate(response, fields, "pointsman")
