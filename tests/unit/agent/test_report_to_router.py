"""What an agent says of a router that does not take its report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import structlog.testing
from pydantic import SecretStr

from pointsman.agent.v1 import agent_pb2
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io import report_to_router
from pointsman_agent.io.report_to_router import Reporter
from pointsman_common.io.channel import ReloadingChannel
from pointsman_common.io.settings import Tokens
from tests.support.pages import serving
from tests.support.processes.process import free_port
from tests.support.router import running
from tests.support.waiting import eventually

INSTANCE = agent_pb2.Instance(
    instance_id="a", incarnation="1", url="http://a", model="m", block_size=16, prefix_mode=agent_pb2.PREFIX_MODE_EXACT
)
Logs = Sequence[MutableMapping[str, Any]]


@asynccontextmanager
async def reporting(router: str) -> AsyncIterator[Logs]:
    channel = ReloadingChannel(router)
    with structlog.testing.capture_logs() as logs:
        reporter = Reporter(
            router,
            channel,
            tuple,
            CachedBlocks("m"),
            INSTANCE,
            "agent",
            consistency_check_interval_s=1.0,
            report_interval_s=1.0,
        )
        try:
            yield logs
        finally:
            await reporter.stop()
            await channel.close()


def loud(logs: Logs) -> list[tuple[str, str]]:
    return [(entry["event"], entry["reason"]) for entry in logs if entry["log_level"] in ("warning", "error")]


@contextmanager
def nobody() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("listens", [False, True])
async def test_a_router_that_is_not_there_is_told_once(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is another server at its address."""
    monkeypatch.setattr(report_to_router, "STARTUP_S", 0.0)
    said = (
        "what listens there is no router: HOST:PORT of its gRPC services is needed"
        if listens
        else "nothing listens there"
    )
    with serving(lambda _: (404, b"")) if listens else nobody() as url:
        async with reporting(url.removeprefix("http://")) as logs:
            await eventually(lambda: bool(loud(logs)), "it is told")
    [(event, reason)] = loud(logs)
    assert event == "a router does not take the report"
    assert reason.startswith(f"cannot be reached: {said}")


async def test_a_router_that_may_be_starting_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[None] = []

    async def no_answer(*_: object) -> float:
        attempts.append(None)
        return await after_failure(*_)  # type: ignore[arg-type]

    after_failure = Reporter._after_failure
    monkeypatch.setattr(Reporter, "_after_failure", no_answer)
    async with reporting(f"127.0.0.1:{free_port()}") as logs:
        await eventually(lambda: len(attempts) > 1, "it has tried twice")
    assert loud(logs) == []


async def test_a_missing_token_is_told_with_what_holds_it() -> None:
    async with (
        running(tokens=Tokens(agent_token=SecretStr("secret"))) as (server, _),
        reporting(f"127.0.0.1:{server.port}") as logs,
    ):
        await eventually(lambda: bool(loud(logs)), "it is told")
    [(_, reason)] = loud(logs)
    assert reason.endswith(": set POINTSMAN_AGENT_TOKEN or POINTSMAN_TOKEN_DIR")


async def test_a_router_that_stops_in_order_may_be_starting_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[None] = []
    after_failure = Reporter._after_failure

    async def counted(*given: Any) -> float:
        attempts.append(None)
        return await after_failure(*given)

    monkeypatch.setattr(Reporter, "_after_failure", counted)
    async with running() as (server, _), reporting(f"127.0.0.1:{server.port}") as logs:
        await eventually(lambda: server.router.state.instances.get("a") is not None, "it reports")
        await server.stop()
        await eventually(lambda: len(attempts) > 2, "it has tried again twice")
    assert loud(logs) == []
