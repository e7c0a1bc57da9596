"""A gateway in the router's process: its calls do what they do over gRPC, and `pointsman serve` serves like two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.io.channel import END_OF_STREAM, open_channel
from pointsman_common.io.local_calls import MAX_UNREAD, LocalChannel, LocalServer
from pointsman_common.io.settings import Tokens
from pointsman_router.io.main import RouterServer
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.waiting import WITHIN_S, eventually

WAYS = pytest.mark.parametrize("way", ["grpc", "local"])


@asynccontextmanager
async def router(way: str, **settings: Any) -> AsyncIterator[tuple[RouterServer, Client, Client]]:
    """Run a router; yield it, a client over gRPC for agents, and the gateway's client."""
    async with running(**settings) as (server, client):
        gateway: Any = LocalChannel(server.local)
        yield server, client, client if way == "grpc" else Client(gateway)


@WAYS
async def test_requests_are_placed_and_end(way: str) -> None:
    async with router(way) as (server, agent, gateway):
        await Report(agent).join("a")
        session = Session(gateway)
        welcome = await session.hello()
        assert welcome.router_id == server.settings.router_id
        assert set((await session.fleet()).pools) == {"m"}
        placed = await session.place("r")
        assert placed.step.instance.instance_id == "a"
        await session.send(finished=placement_pb2.Finished(request_id="r", outcome=placement_pb2.OUTCOME_OK))
        await eventually(lambda: not len(server.router.state.reservations), "nothing is open")
        unary = await gateway.placement.Place(
            placement_pb2.PlaceRequest(
                request=placement_pb2.PlacementRequest(request_id="u", model="m", input_tokens=9)
            ),
            timeout=WITHIN_S,
        )
        assert unary.placement.step.instance.instance_id == "a"
        explained = await gateway.fleet.Explain(
            fleet_pb2.ExplainRequest(request=placement_pb2.PlacementRequest(request_id="e", model="m", input_tokens=9))
        )
        assert explained.decision.outcome == fleet_pb2.DECISION_OUTCOME_DRY_RUN
        await session.call.done_writing()
        while await session.call.read() is not END_OF_STREAM:
            pass


@WAYS
async def test_errors_have_the_same_status_and_details(way: str) -> None:
    async with router(way) as (_, _, gateway):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.placement.Place(placement_pb2.PlaceRequest(), timeout=WITHIN_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(refused.value)
        info = error_details_pb2.ErrorInfo()
        assert any(detail.Unpack(info) for detail in details)
        assert info.reason == "INVALID_FIELD"
        session: Any = gateway.placement.Session
        call = session()
        await call.write(placement_pb2.SessionRequest(hello=placement_pb2.GatewayHello()))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello" in str(ended.value.details())


@WAYS
async def test_a_stream_that_is_cancelled_leaves_nothing(way: str) -> None:
    async with router(way) as (server, agent, gateway):
        await Report(agent).join("a")
        session = Session(gateway)
        await session.hello()
        await session.place("r")
        assert session.call.cancel()
        await eventually(lambda: not len(server.router.state.reservations), "its reservations are released")
        again = Session(gateway)
        await again.hello()
        await again.place("again")


@WAYS
async def test_a_bound_token_restricts_the_gateways_id(
    way: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POINTSMAN_GATEWAY_TOKEN", raising=False)
    file = tmp_path / "gateways"
    file.write_text("G gw-*\n")
    tokens = Tokens(agent_token="A", operator_token="O", token_dir=None)
    async with running(tokens, gateways_file=file) as (server, _), open_channel(f"127.0.0.1:{server.port}") as over:
        channel: Any = LocalChannel(server.local) if way == "local" else over
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await Session(Client(channel, "G"), "other").hello()
        assert (await Session(Client(channel, "G"), "gw-1").hello()).router_id


async def test_a_servicers_fault_ends_the_call_and_unread_messages_are_bounded() -> None:
    server = LocalServer()

    async def echo(_: object, context: Any) -> None:
        while (message := await context.read()) is not END_OF_STREAM:
            if message == "fault":
                raise ZeroDivisionError
            await context.write(message)

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_registered_method_handlers("s", {"Echo": handler})
    call: Any = LocalChannel(server).stream_stream("/s/Echo")()
    # Nobody reads the answers: the writer waits when both directions are full.
    count = 5 * MAX_UNREAD
    sent: list[int] = []

    async def write() -> None:
        for number in range(count):
            await call.write(number)
            sent.append(number)

    writing = asyncio.create_task(write())
    for _ in range(4 * count):
        await asyncio.sleep(0)
    assert 2 * MAX_UNREAD <= len(sent) <= 2 * MAX_UNREAD + 1
    assert [await call.read() for _ in range(count)] == list(range(count))
    await writing
    await call.write("fault")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() is grpc.StatusCode.UNKNOWN
    with pytest.raises(asyncio.InvalidStateError):
        await call.write("late")
    missing: Any = LocalChannel(server).stream_stream("/s/Other")()
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await missing.read()
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
