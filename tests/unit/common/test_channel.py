"""Every gRPC server of the project, fakes in tests included, permits the keepalive and sizes that its clients use."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import _async as async_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pointsman_common.io.channel import CHANNEL_OPTIONS, SERVER_OPTIONS, open_channel
from tests.support.fakes.name_server import name_server
from tests.support.tcp_proxies import Link
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
# The first serves OpenTelemetry exporters only. The second shows what happens to a client without the server options.
OTHERS = {"tests/support/fakes/span_collector.py", "tests/unit/common/test_channel.py"}


def test_servers_permit_what_clients_ask_for() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.http2.max_ping_strikes"] == 0, "on a busy machine delayed pings arrive close together"
    assert server["grpc.max_receive_message_length"] == client["grpc.max_receive_message_length"]


def calls(of: str) -> Iterator[tuple[str, ast.Call]]:
    """Where grpc's function `of` is called, and how."""
    for folder in ("services", "lab", "bench", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if f"{of}(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (f"grpc.{of}", f"grpc.aio.{of}"):
                    yield path.relative_to(ROOT).as_posix(), node


def test_every_server_takes_these_options() -> None:
    seen = 0
    for path, call in calls("server"):
        if path in OTHERS:
            continue
        options = next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "options"), "")
        assert "SERVER_OPTIONS" in options, (
            f"{path}:{call.lineno}: grpc's own would end a client's pings (too_many_pings)"
        )
        seen += 1
    assert seen >= 3


def test_services_dial_in_one_place() -> None:
    dialling = {path for of in ("insecure_channel", "secure_channel") for path, _ in calls(of)}
    assert {path for path in dialling if not path.startswith("tests/")} == {
        "services/common/pointsman_common/io/channel.py"
    }


async def test_pings_that_other_servers_refuse_are_permitted() -> None:
    """gRPC's own options end the connection at the fourth ping: with CHANNEL_OPTIONS after 20 s of silence, here after 3."""
    async with AsyncExitStack() as stack:

        async def leaves_ready(server: grpc.aio.Server) -> asyncio.Future[None]:
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            often = list((dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 100}).items())
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=often))
            await channel.channel_ready()
            left = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
            stack.callback(left.cancel)
            return left

        ours = await leaves_ready(grpc.aio.server(options=SERVER_OPTIONS))
        others = await leaves_ready(grpc.aio.server())
        async with asyncio.timeout(20):
            await others
        await asyncio.sleep(1.0)
        assert not ours.done()


async def test_a_router_that_is_slow_to_answer_a_connection_is_reached() -> None:
    """A busy machine, or a handshake across zones, takes seconds: a call without wait_for_ready must not fail before that."""
    async with AsyncExitStack() as stack:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(async_health.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        link = await stack.enter_async_context(Link(port))
        link.delay_s = 0.5
        channel = await stack.enter_async_context(open_channel(link.address))
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_router_whose_name_moves_is_followed() -> None:
    """gRPC's own minimum between two lookups of a name is 30 s."""
    async with AsyncExitStack() as stack:
        names = await stack.enter_async_context(name_server("127.0.0.2"))
        port = 0
        servers = []
        for address in ("127.0.0.2", "127.0.0.3"):
            server = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(async_health.HealthServicer(), server)
            port = server.add_insecure_port(f"{address}:{port}")
            await server.start()
            stack.push_async_callback(server.stop, None)
            servers.append(server)
        channel = open_channel(f"dns://127.0.0.1:{names.port}/router.test:{port}")
        await stack.enter_async_context(channel)

        async def answers() -> bool:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        assert await answers()
        names.address = "127.0.0.3"
        await servers[0].stop(None)
        await eventually(answers, "the router answers at its new address", within_s=20.0)
