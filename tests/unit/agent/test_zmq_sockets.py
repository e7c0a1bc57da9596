"""Which address family ZMQ uses, and step loads over IPv6."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

import msgspec
import pytest
import zmq.asyncio

from pointsman_agent.core.step_load import StepLoad
from pointsman_agent.io.engine_monitor import EngineMonitor
from pointsman_agent.io.step_load_receiver import receive_step_loads
from pointsman_agent.io.zmq_sockets import needs_ipv6
from pointsman_connector import engine_plugin, step_load
from tests.support.processes.process import free_port
from tests.support.waiting import eventually

NAMES = {"four": ["10.0.0.1"], "six": ["fd00::1"], "both": ["fd00::1", "10.0.0.1"]}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that can be looked up."""
    ask = socket.getaddrinfo

    def answer(host: Any, *how: Any, **more: Any) -> Any:
        if host == "none":
            raise socket.gaierror
        return [found for address in NAMES.get(host, [host]) for found in ask(address, *how, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(engine_plugin, "getaddrinfo", answer)


@pytest.mark.parametrize(
    ("endpoint", "ipv6"),
    [
        ("tcp://10.0.0.1:5557", False),
        ("tcp://[fd00::1]:5557", True),
        ("tcp://four:5557", False),
        ("tcp://six:5557", True),
        ("tcp://both:5557", False),
        ("ipc:///run/kv/events", False),
        ("inproc://loads", False),
    ],
)
async def test_ipv6_is_used_where_there_is_no_ipv4(endpoint: str, ipv6: bool) -> None:
    assert await needs_ipv6(endpoint, unknown=not ipv6) is ipv6
    assert await asyncio.to_thread(engine_plugin._needs_ipv6, endpoint) is ipv6


async def test_all_interfaces_are_those_of_both_families_and_an_unknown_name_is_as_the_caller_says() -> None:
    assert await needs_ipv6("tcp://*:9108", unknown=False)
    assert await needs_ipv6("tcp://none:9108", unknown=True)
    assert not await needs_ipv6("tcp://none:9108", unknown=False)


class Monitor:
    """What the receiver uses of an engine's monitor."""

    def __init__(self) -> None:
        self.running = 0

    def is_from_this_engine(self, load: StepLoad) -> bool:
        return True

    def step_load_received(self, load: StepLoad) -> None:
        self.running = load.running


@pytest.mark.parametrize(
    ("listens", "host"), [("[::1]", "[::1]"), ("*", "[::1]"), ("*", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")]
)
async def test_the_connector_pushes_loads_to_an_address_of_either_family(
    listens: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, monitor = free_port(), Monitor()
    context = zmq.asyncio.Context()
    engines: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: engines)
    receiving = asyncio.create_task(
        receive_step_loads(context, f"tcp://{listens}:{port}", [cast(EngineMonitor, monitor)])
    )
    pushing = engine_plugin._connected(f"tcp://{host}:{port}")
    try:
        load = step_load.StepLoad("7f", 0, 7, 0, 0.5, 0, step_load.StepTotals())

        def received() -> bool:
            with contextlib.suppress(zmq.Again):
                pushing.send(msgspec.msgpack.encode(load), zmq.NOBLOCK)
            return monitor.running == 7

        await eventually(received, "the load")
    finally:
        pushing.close(linger=0)
        receiving.cancel()
        await asyncio.wait([receiving])
        context.destroy(linger=0)
        engines.destroy(linger=0)
