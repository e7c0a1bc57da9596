"""What a gateway says of a router that does not answer."""

from __future__ import annotations

import pytest
import structlog.testing

from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import open_channel
from pointsman_gateway.io.routing import router_stream
from pointsman_gateway.io.routing.router_stream import RouterSession
from tests.support.processes.process import free_port
from tests.support.waiting import eventually


@pytest.mark.parametrize("startup_s", [0.0, 3_600.0])
async def test_a_router_that_may_be_starting_is_no_warning(startup_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "STARTUP_S", startup_s)
    attempts: list[None] = []

    def hello() -> placement_pb2.GatewayHello:
        attempts.append(None)
        return placement_pb2.GatewayHello()

    session = RouterSession(
        f"127.0.0.1:{free_port()}",
        tuple,
        hello,
        on_up=lambda _: None,
        on_down=lambda _: None,
        on_message=lambda *_: None,
        reached=lambda *_: False,
        dial=open_channel,
    )
    with structlog.testing.capture_logs() as logs:
        session.start()
        await eventually(lambda: len(attempts) > 2, "it has dialled three times")
        await session.close(0.0)
    said = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert said == ([] if startup_s else ["no session with the router"])
