"""What a gateway says of a router that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
import structlog.testing

from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from pointsman_common.io.channel import SERVER_OPTIONS, open_channel
from pointsman_gateway.io.routing import router_stream
from pointsman_gateway.io.routing.router_stream import RouterSession
from tests.support.fakes.name_server import name_server
from tests.support.processes.process import free_port
from tests.support.router import running
from tests.support.waiting import eventually


def session_with(address: str, hello: Callable[[], placement_pb2.GatewayHello]) -> RouterSession:
    return RouterSession(
        address,
        tuple,
        hello,
        on_up=lambda _: None,
        on_down=lambda _: None,
        on_message=lambda *_: None,
        reached=lambda *_: False,
        dial=open_channel,
    )


@pytest.mark.parametrize("startup_s", [0.0, 3_600.0])
async def test_a_router_that_may_be_starting_is_no_warning(startup_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "STARTUP_S", startup_s)
    attempts: list[None] = []

    def hello() -> placement_pb2.GatewayHello:
        attempts.append(None)
        return placement_pb2.GatewayHello()

    session = session_with(f"127.0.0.1:{free_port()}", hello)
    with structlog.testing.capture_logs() as logs:
        session.start()
        await eventually(lambda: len(attempts) > 2, "it has dialled three times")
        await session.close(0.0)
    said = [(entry["event"], entry["reason"]) for entry in logs if entry["log_level"] == "warning"]
    reason = "cannot be reached: nothing listens there"
    assert said == ([] if startup_s else [("no session with the router", reason)])


async def test_a_router_whose_name_is_looked_up_slowly_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a machine's first name server does not answer: the lookup takes longer than a router may take to welcome."""
    monkeypatch.setattr(router_stream, "WELCOME_S", 0.5)
    async with running() as (server, _), name_server("127.0.0.1") as names:
        names.delay_s = 1.0
        address = f"dns://127.0.0.1:{names.port}/router.test:{server.port}"
        session = session_with(address, lambda: placement_pb2.GatewayHello(gateway_id="g", secret=bytes(16)))
        session.start()
        try:
            await eventually(lambda: session.connected, "the router has welcomed the gateway")
        finally:
            await session.close(0.0)


async def test_a_router_that_is_reached_and_does_not_welcome_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "WELCOME_S", 0.1)
    greeted: list[None] = []

    class Silent(placement_pb2_grpc.PlacementServiceServicer):
        async def Session(self, _: Any, context: Any) -> None:  # type: ignore[override]
            await context.read()
            greeted.append(None)
            await asyncio.Event().wait()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    placement_pb2_grpc.add_PlacementServiceServicer_to_server(Silent(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    session = session_with(f"127.0.0.1:{port}", placement_pb2.GatewayHello)
    try:
        with structlog.testing.capture_logs() as logs:
            session.start()
            await eventually(lambda: len(greeted) > 1, "it has greeted twice")
            await session.close(0.0)
    finally:
        await server.stop(None)
    assert "no welcome in time" in [entry.get("reason") for entry in logs]
