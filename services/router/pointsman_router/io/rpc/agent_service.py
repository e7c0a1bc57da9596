"""AgentService: turns the messages on agents' streams into events for the router."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core import key_report_wire
from pointsman_common.core.addresses import Address, address_of_url, parse_address
from pointsman_common.io.auth import credentials, is_loopback
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.absent_engines import MAX_ENGINES
from pointsman_router.io.convert import instance_and_load_messages
from pointsman_router.io.router import AgentStream, Router
from pointsman_router.io.rpc.duplex_stream import run_duplex
from pointsman_router.io.rpc.turn_budget import TurnBudget

AGENT_SERVICE = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
# Longest time that agents' messages may block the event loop per turn, s. The unit of work is a message, or PIECE_KEYS keys of
# a snapshot chunk.
REPORTS_BUDGET_S = 0.0005

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, agent_pb2.ReportResponse]"


def add_agent_service(service: AgentService, server: grpc.aio.Server) -> None:
    """Register the service like the generated add_AgentServiceServicer_to_server, but receive messages as bytes. gRPC would parse
    the messages of all agents in one turn of the event loop."""
    handlers = {
        "Report": grpc.stream_stream_rpc_method_handler(
            service.Report, response_serializer=agent_pb2.ReportResponse.SerializeToString
        ),
        "ReportAbsentEngines": grpc.unary_unary_rpc_method_handler(
            service.ReportAbsentEngines,
            request_deserializer=agent_pb2.ReportAbsentEnginesRequest.FromString,
            response_serializer=agent_pb2.ReportAbsentEnginesResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(AGENT_SERVICE, handlers),))
    # The generated code calls this method, but grpc's type stubs lack it.
    server.add_registered_method_handlers(AGENT_SERVICE, handlers)  # type: ignore[attr-defined]


class AgentService:
    """The service that agents report to. Each instance has its own stream."""

    def __init__(self, router: Router, may_report: Callable[[str, Sequence[str], str], bool]) -> None:
        """`may_report(authorization, names, name)` returns whether an agent with this authorization header and a certificate
        with these names may report `name`: an instance id, or a HOST:PORT."""
        self._router = router
        self._may_report = may_report
        self._stream_ids = itertools.count(1)
        self._turns = TurnBudget(REPORTS_BUDGET_S)

    async def Report(self, requests: object, context: Context) -> None:  # noqa: N802
        """Read the agent's messages and write the router's, until either side ends."""
        stream_id = next(self._stream_ids)
        stream = self._router.agents[stream_id] = AgentStream()
        ended = await run_duplex(
            self._read(stream_id, context), self._write(stream, context), lambda: self._lost(stream_id)
        )
        refusal = ended[1]
        if isinstance(refusal, ev.RefuseReport):
            code = grpc.StatusCode.ABORTED if refusal.replaced else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, refusal.reason)
        if refusal is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router is stopping")
        if isinstance(ended[0], _NotYours):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(ended[0]))
        if isinstance(ended[0], _ProtocolError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(ended[0]))
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure

    async def ReportAbsentEngines(  # noqa: N802
        self, request: agent_pb2.ReportAbsentEnginesRequest, context: Any
    ) -> agent_pb2.ReportAbsentEnginesResponse:
        """Note an agent's engines without an instance."""
        shown, names = credentials(context)
        engines = []
        for engine in request.engines[:MAX_ENGINES]:
            if self._may_report(shown, names, engine.instance_id):
                if not (_is_of(engine) or self._may_report(shown, names, str(_shown_address(engine.url)))):
                    # An agent must not show operators an address that it may not report.
                    engine.url = f"http://{engine.instance_id}"
                engines.append(instance_and_load_messages.absent_engine(engine))
        # No agent replaces what one with other credentials has reported, whatever name it gives.
        reporter = hash((shown, names, request.agent_id))
        self._router.absent_engines.reported(reporter, engines, time.monotonic())
        return agent_pb2.ReportAbsentEnginesResponse()

    async def _read(self, stream_id: int, context: Context) -> None:
        instance_id = ""
        while (message := await context.read()) is not END_OF_STREAM:
            parsed = await self._turns.run(partial(_parsed, message))
            for piece in range(key_report_wire.pieces(parsed)):
                take = partial(self._take, stream_id, instance_id, parsed, piece, context)
                instance_id = await self._turns.run(take)

    def _take(
        self, stream_id: int, instance_id: str, message: agent_pb2.ReportRequest, piece: int, context: Context
    ) -> str:
        """Submit the event for one piece of an agent's message. `instance_id` is the instance that the stream reports ("" before
        the hello). Return the stream's instance id after the message. Raises _ProtocolError or _NotYours."""
        kind = message.WhichOneof("kind")
        if kind == "hello":
            if instance_id:
                raise _ProtocolError("a second hello on one stream")
            self._check_right(context, message.hello.instance)
            instance_id = self._router.agents[stream_id].instance_id = message.hello.instance.instance_id
            event: ev.Event = ev.AgentHello(
                stream_id,
                instance_and_load_messages.instance_info(message.hello.instance),
                message.hello.key_scheme,
                message.hello.oldest_seq,
                message.hello.latest_seq,
                message.hello.report_interval_ms / 1e3,
                message.hello.accepts_pace,
                message.hello.agent_id,
            )
        elif not instance_id:
            raise _ProtocolError("the first message must be a hello")
        elif kind == "load":
            event = ev.LoadReported(
                stream_id, instance_id, instance_and_load_messages.load(message.load, time.monotonic())
            )
        elif kind == "goodbye":
            event = ev.AgentGoodbye(stream_id, instance_id)
        elif (about_keys := key_report_wire.key_message(message, piece)) is not None:
            event = ev.KeysReported(stream_id, instance_id, about_keys)
        else:
            return instance_id
        self._router.submit(event)
        return instance_id

    def _check_right(self, context: Context, instance: agent_pb2.Instance) -> None:
        """Raise _NotYours unless the agent may report this instance id, and the addresses that prompts and KV requests go to."""
        shown, names = credentials(context)
        address = _address(instance.url)
        for name in (instance.instance_id, str(address)):
            if not self._may_report(shown, names, name):
                raise _NotYours(f"this agent may not report {name}")
        bootstrap = _address(instance.kv_transfer.bootstrap_url)
        # Other engines fetch the instance's KV from the bootstrap address. Any port on the instance's host is allowed.
        if bootstrap.host and bootstrap.host != address.host and not self._may_report(shown, names, str(bootstrap)):
            raise _NotYours(f"this agent may not report {bootstrap} as the address to fetch KV from")

    async def _write(self, stream: AgentStream, context: Context) -> ev.RefuseReport | None:
        while isinstance(reply := await stream.replies.get(), agent_pb2.ReportResponse):
            await context.write(reply)
        return reply

    def _lost(self, stream_id: int) -> None:
        instance_id = self._router.agents.pop(stream_id).instance_id
        record = self._router.state.instances.get(instance_id)
        if record is not None and record.stream_id == stream_id and record.lost_at is None:
            self._router.submit(ev.AgentLost(stream_id, instance_id))


def _address(url: str) -> Address:
    """Return host and port of `url`; an empty host if it has none. Raises _ProtocolError if it is no URL."""
    try:
        return address_of_url(url)
    except ValueError as error:
        raise _ProtocolError(f"{url!r} is no URL: {error}") from None


def _shown_address(url: str) -> Address:
    """Return host and port of `url`; an empty host if it has none or is no URL."""
    try:
        return parse_address(str(address_of_url(url)))
    except ValueError:
        return Address("", 0)


def _is_of(engine: agent_pb2.AbsentEngine) -> bool:
    """Return whether an engine's URL is its instance's address, or one of the agent's own machine."""
    address = _shown_address(engine.url)
    return str(address) == engine.instance_id or is_loopback(str(address))


def _parsed(raw: bytes) -> agent_pb2.ReportRequest:
    try:
        message = agent_pb2.ReportRequest.FromString(raw)
    except DecodeError as error:
        raise _ProtocolError(f"not a ReportRequest: {error}") from None
    if fault := key_report_wire.delta_fault(message.delta):
        raise _ProtocolError(fault)
    return message


class _NotYours(Exception):
    """The agent's token or certificate does not permit this instance or address."""


class _ProtocolError(Exception):
    """The agent violates the protocol."""
