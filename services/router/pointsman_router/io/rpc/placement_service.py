"""PlacementService: turns gateways' streams and unary calls into events for the router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from msgspec.structs import replace

from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from pointsman_common.core.addresses import parse_address
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.io.auth import credentials
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.ownership import Owner
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.io.convert import gateway_messages
from pointsman_router.io.convert.times import duration
from pointsman_router.io.router import GatewayStream, Router
from pointsman_router.io.rpc.duplex_stream import run_duplex
from pointsman_router.io.rpc.errors import abort, field_status, gateway_id_status, refusal_status

SessionContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.SessionRequest, placement_pb2.SessionResponse]"
PlaceContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.PlaceRequest, placement_pb2.PlaceResponse]"
FinishContext: TypeAlias = "grpc.aio.ServicerContext[placement_pb2.FinishRequest, placement_pb2.FinishResponse]"

# Minimum length of a gateway's secret, bytes.
MIN_SECRET_BYTES = 16
# Maximum length of a gateway's URL, characters; a longer one counts as not reported.
MAX_URL = 300


def address_of_peer(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer ("ipv4:10.0.0.1:4711", "ipv6:%5B::1%5D:4711"); empty if it has none."""
    kind, _, address = unquote(peer).partition(":")
    return parse_address(address).host if kind in ("ipv4", "ipv6") else ""


class PlacementService(placement_pb2_grpc.PlacementServiceServicer):
    """The service that gateways use. Places requests of the pools that this replica owns, and names the owner of the others."""

    def __init__(self, router: Router, may_be: Callable[[str, Sequence[str], str], bool]) -> None:
        """`may_be(authorization, names, gateway_id)` returns whether a caller with this authorization header and a certificate
        with these names may use the gateway id."""
        self._router = router
        self._may_be = may_be

    async def Session(self, requests: object, context: SessionContext) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one gateway's stream until either side ends."""
        first = await context.read()
        if first is END_OF_STREAM:
            return
        hello = first.hello
        if first.WhichOneof("kind") != "hello" or not hello.gateway_id:
            await abort(context, field_status("hello", "the first message must be a hello with a gateway_id"))
        if len(hello.secret) < MIN_SECRET_BYTES:
            await abort(context, field_status("hello.secret", f"{MIN_SECRET_BYTES} random bytes or more are required"))
        authorization, names = credentials(context)
        if not self._may_be(authorization, names, hello.gateway_id):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"this gateway may not use the id {hello.gateway_id!r}"
            )
        if not self._router.gateway_claims.claim(hello.gateway_id, hello.secret, time.monotonic()):
            await abort(context, gateway_id_status(hello.gateway_id))
        stream = GatewayStream(hello.url if len(hello.url) <= MAX_URL else "", address_of_peer(context.peer()))
        welcome = placement_pb2.GatewayWelcome(
            router_id=self._router.settings.router_id,
            epoch=self._router.store.epoch,
            key_scheme=KEY_SCHEME,
            accounts_usage=True,
        )
        await context.write(placement_pb2.SessionResponse(welcome=welcome))
        opening = await gateway_messages.gateway_hello(hello)
        if not self._router.gateway_claims.opened(hello.gateway_id, hello.secret, time.monotonic()):
            await abort(context, gateway_id_status(hello.gateway_id))
        self._router.opened(opening, stream)
        ended = await run_duplex(
            self._read(hello.gateway_id, context),
            self._write(stream, context),
            lambda: self._router.closed(hello.gateway_id, stream),
        )
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure

    async def Place(  # noqa: N802
        self, request: placement_pb2.PlaceRequest, context: PlaceContext
    ) -> placement_pb2.PlaceResponse:
        """Place one request under a lease. A held request is answered within the call's deadline."""
        if (fault := gateway_messages.request_fault(request.request)) is not None:
            await abort(context, field_status(f"request.{fault[0]}", fault[1]))
        asked = gateway_messages.placement_request(request.request)
        answer = await self._router.placed(asked, context.time_remaining(), request.request.traceparent)
        if isinstance(answer, ev.Refused):
            await abort(context, refusal_status(answer, self._router.owner_elsewhere(answer)))
        return placement_pb2.PlaceResponse(
            placement=gateway_messages.placement_to_wire(self._router.state, answer),
            lease=duration(self._router.state.settings.place_lease_s),
        )

    async def Finish(  # noqa: N802
        self, request: placement_pb2.FinishRequest, context: FinishContext
    ) -> placement_pb2.FinishResponse:
        """End a request and release its reservation."""
        if not request.finished.request_id:
            await abort(context, field_status("finished.request_id", "must not be empty"))
        if not request.finished.outcome:
            await abort(context, field_status("finished.outcome", "must say how the request ended"))
        state = self._router.state
        request_id, pool = request.finished.request_id, state.instances.pool_of(request.model)
        if state.reservations.get(request_id) is None and state.held_requests.queue.get(request_id) is None:
            asked = [pool] if pool else [known.model for known in state.instances.pools()]
            elsewhere = next((model for model in asked if not state.owned.owns(model)), "")
            if elsewhere:
                refused = not_serving(
                    request_id, elsewhere, "the request is not known here; another router may have placed it"
                )
                await abort(context, refusal_status(refused, self._router.owner_elsewhere(refused)))
        self._router.submit(ev.GatewayReported("", gateway_messages.finished(request.finished)))
        return placement_pb2.FinishResponse()

    async def _read(self, gateway_id: str, context: SessionContext) -> None:
        while (message := await context.read()) is not END_OF_STREAM:
            for request in message.batch.requests if message.HasField("batch") else (message,):
                if request.HasField("hello"):
                    again = await gateway_messages.gateway_hello(request.hello)
                    self._router.submit(replace(again, gateway_id=gateway_id))
                else:
                    self._take(gateway_id, request)

    def _take(self, gateway_id: str, message: placement_pb2.SessionRequest) -> None:
        match message.WhichOneof("kind"):
            case "place":
                if (fault := gateway_messages.request_fault(message.place)) is not None:
                    request_id, why = message.place.request_id, f"{fault[0]}: {fault[1]}"
                    self._router.refuse(ev.Refused(request_id, "INVALID_ARGUMENT", why, gateway_id=gateway_id))
                    return
                asked = gateway_messages.placement_request(message.place)
                self._router.place(ev.PlaceRequested(asked, gateway_id), message.place.traceparent)
                return
            case "step_done":
                event: ev.Event = ev.GatewayReported(gateway_id, gateway_messages.step_done(message.step_done))
            case "open_stream":
                event = ev.StreamOpened(gateway_id, gateway_messages.open_stream(message.open_stream))
            case "first_token":
                event = ev.GatewayReported(gateway_id, gateway_messages.first_token(message.first_token))
            case "finished":
                event = ev.GatewayReported(gateway_id, gateway_messages.finished(message.finished))
            case "heard":
                event = gateway_messages.heard(message.heard)
            case "end_session":
                ended = message.end_session
                event = ev.SessionEnded(ended.tenant, ended.session_id, gateway_id)
            case "owner_claim":
                claim = message.owner_claim
                owner = Owner(claim.owner.router_id, claim.owner.address, claim.owner.epoch)
                self._router.store.claimed(claim.model, owner)
                return
            case "usage":
                self._router.account(gateway_id, message.usage)
                return
            case _:
                return
        self._router.submit(event)

    async def _write(self, stream: GatewayStream, context: SessionContext) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while replies := await stream.batch_queue.take():
                batch = placement_pb2.SessionResponseBatch(responses=replies) if len(replies) > 1 else None
                await context.write(placement_pb2.SessionResponse(batch=batch) if batch else replies[0])
