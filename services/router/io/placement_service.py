"""PlacementService: gateways' streams, and the unary form, into events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeAlias

import grpc
import grpc.aio

from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from services.common.channel import END_OF_STREAM
from services.common.keys import KEY_SCHEME
from services.router import events as ev
from services.router.io import convert
from services.router.io.errors import abort, refusal_status
from services.router.io.runtime import GatewayStream, Router

SessionContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.SessionRequest, placement_pb2.SessionResponse]"
PlaceContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.PlaceRequest, placement_pb2.PlaceResponse]"
FinishContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.FinishRequest, placement_pb2.FinishResponse]"


class PlacementService(placement_pb2_grpc.PlacementServiceServicer):
    """Answers where requests go, while this replica owns the fleet's log."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Session(self, requests: object, context: SessionContext) -> None:  # type: ignore[override]  # noqa: N802
        """One gateway's stream; ends with UNAVAILABLE when another replica takes over."""
        await self._must_own(context)
        first = await context.read()
        if first is END_OF_STREAM:
            return
        hello = first.hello
        if first.WhichOneof("kind") != "hello" or not hello.gateway_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello with a gateway_id")
        stream = GatewayStream()
        stream.send(
            welcome=placement_pb2.GatewayWelcome(
                router_id=self._router.settings.router_id, epoch=self._router.store.epoch, key_scheme=KEY_SCHEME
            )
        )
        stream.send(fleet=self._router.fleet())
        self._router.opened(convert.gateway_hello(hello), stream)
        reader = asyncio.ensure_future(self._read(hello.gateway_id, context))
        writer = asyncio.ensure_future(self._write(stream, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            ended = await asyncio.gather(reader, writer, return_exceptions=True)
            self._router.closed(hello.gateway_id, stream)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure
        await self._must_own(context)

    async def Place(  # noqa: N802
        self, request: placement_pb2.PlaceRequest, context: PlaceContext
    ) -> placement_pb2.PlaceResponse:
        """One placement under a lease; a request that is held is answered within the call's deadline."""
        await self._must_own(context)
        if not request.request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request.request_id must not be empty")
        answer = await self._router.placed(convert.placement_request(request.request), context.time_remaining())
        if isinstance(answer, ev.Refused):
            await abort(context, refusal_status(answer))
        return placement_pb2.PlaceResponse(
            placement=convert.placement_to_wire(self._router.state, answer),
            lease=convert.duration(self._router.settings.place_lease_s),
        )

    async def Finish(  # noqa: N802
        self, request: placement_pb2.FinishRequest, context: FinishContext
    ) -> placement_pb2.FinishResponse:
        """Release what Place reserved."""
        await self._must_own(context)
        self._router.submit(convert.finished(request.finished))
        return placement_pb2.FinishResponse()

    async def _must_own(
        self, context: grpc.aio.ServicerContext[object, object] | SessionContext | PlaceContext | FinishContext
    ) -> None:
        if not self._router.owns:
            owner = self._router.store.owner or "nobody yet"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this replica stands by; the owner is {owner}")

    async def _read(self, gateway_id: str, context: SessionContext) -> None:
        while (message := await context.read()) is not END_OF_STREAM:
            match message.WhichOneof("kind"):
                case "place":
                    event: ev.Event = ev.PlaceRequested(convert.placement_request(message.place), gateway_id)
                case "step_done":
                    done = message.step_done
                    event = ev.StepDone(done.request_id, done.step_index, done.ok)
                case "first_token":
                    event = ev.FirstToken(message.first_token.request_id)
                case "finished":
                    event = convert.finished(message.finished)
                case _:
                    continue
            self._router.submit(event)

    async def _write(self, stream: GatewayStream, context: SessionContext) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (reply := await stream.replies.get()) is not None:
                await context.write(reply)
