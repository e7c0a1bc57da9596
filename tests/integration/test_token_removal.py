"""Removing a token ends the streams that were opened with it, and their clients reconnect with another token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io.report_to_router import Reporter
from pointsman_common.io import proven_streams
from pointsman_common.io.auth import showing
from pointsman_common.io.channel import END_OF_STREAM, ReloadingChannel, open_channel
from pointsman_common.io.settings import Tokens
from pointsman_router.io.main import RouterServer
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import WITHIN_S, eventually

ROLES = ("agent", "gateway", "operator", "observer")


def write(folder: Path, role: str, *tokens: str) -> None:
    (folder / "new").write_text("\n".join(tokens) + "\n")
    (folder / "new").replace(folder / role)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tokens for each role: ROLE-old and ROLE-new."""
    monkeypatch.setattr(proven_streams, "CHECK_S", 0.05)
    made = tmp_path / "tokens"
    made.mkdir()
    for role in ROLES:
        write(made, role, f"{role}-old", f"{role}-new")
    return made


@asynccontextmanager
async def router(folder: Path, **changes: Any) -> AsyncIterator[tuple[RouterServer, grpc.aio.Channel]]:
    async with (
        running(Tokens(token_dir=folder), **changes) as (server, _),
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield server, channel


class Streams:
    """One stream of each kind, all opened with the old tokens, or all with the new ones."""

    def __init__(self, channel: grpc.aio.Channel, which: str) -> None:
        self.which = which
        self.clients = {role: Client(channel, f"{role}-{which}") for role in ROLES}
        self.report = Report(self.clients["agent"], self.clients["observer"])
        self.session = Session(self.clients["gateway"], f"gw-{which}")
        observer = self.clients["observer"]
        self.watch: Any = observer.fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest(), metadata=observer.metadata)

    async def open(self) -> None:
        await self.report.join(self.which)
        await self.session.hello()
        await self.watch.initial_metadata()

    @property
    def calls(self) -> dict[str, Any]:
        return {"agent": self.report.call, "gateway": self.session.call, "observer": self.watch}


async def ended(call: Any) -> grpc.StatusCode:
    """The status of a call, once all that came before has been read."""
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not END_OF_STREAM:
                pass
        status: grpc.StatusCode = await call.code()
        return status


@pytest.mark.parametrize("taken", ["agent", "gateway", "observer"])
async def test_streams_end_whose_token_is_taken_away_and_no_others(taken: str, folder: Path) -> None:
    async with router(folder) as (server, channel):
        old, new = Streams(channel, "old"), Streams(channel, "new")
        await old.open()
        await new.open()
        write(folder, taken, f"{taken}-new")
        assert await ended(old.calls[taken]) is grpc.StatusCode.UNAUTHENTICATED
        assert await old.calls[taken].details() == "the token of this call is no longer valid"
        others = [call for role, call in old.calls.items() if role != taken] + list(new.calls.values())
        assert not any(call.done() for call in others)
        # The router handles the ends of these streams as any other end.
        if taken == "gateway":
            await eventually(lambda: set(server.router.gateways) == {"gw-new"}, "the gateway is gone")
        if taken == "agent":
            record = server.router.state.instances.get("old")
            assert record is not None
            await eventually(lambda: record.lost_at is not None, "the instance is lost")
        for call in others:
            call.cancel()


async def test_a_file_that_cannot_be_used_ends_nothing(folder: Path) -> None:
    async with router(folder) as (_, channel):
        old = Streams(channel, "old")
        await old.open()
        (folder / "gateway").write_text("")
        (folder / "observer").unlink()
        write(folder, "agent", "agent-new")
        assert await ended(old.report.call) is grpc.StatusCode.UNAUTHENTICATED
        assert not old.session.call.done()
        assert not old.watch.done()
        old.session.call.cancel()
        old.watch.cancel()


async def test_an_agent_comes_back_at_once_with_its_new_token(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write(own, "agent", "agent-old")
    async with router(folder) as (server, _):
        address = f"127.0.0.1:{server.port}"
        channel = ReloadingChannel(address)
        instance = agent_pb2.Instance(
            instance_id="a",
            incarnation="1",
            url="http://a",
            model="m",
            block_size=16,
            prefix_mode=agent_pb2.PREFIX_MODE_EXACT,
        )
        shown = showing(Tokens(token_dir=own), "agent")
        intervals = {"consistency_check_interval_s": 1.0, "report_interval_s": 1.0}
        reporter = Reporter(address, channel, shown, CachedBlocks("m"), instance, "agent", **intervals)
        try:
            await eventually(lambda: reporter.connected, "welcomed")
            record = server.router.state.instances.get("a")
            assert record is not None
            first = record.stream_id
            write(own, "agent", "agent-new")
            write(folder, "agent", "agent-new")
            # Sooner than the retry of an agent that was refused.
            await eventually(lambda: record.stream_id != first and reporter.connected, "welcomed again", within_s=20.0)
            assert reporter.refusal == ""
        finally:
            await reporter.stop()
            await channel.close()


async def test_a_viewer_of_the_console_is_let_go(folder: Path) -> None:
    async with (
        router(folder, console_listen="127.0.0.1:0") as (server, _),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WITHIN_S)) as http,
    ):
        assert server.console is not None
        shown = {"Authorization": "Bearer observer-old"}
        async with http.get(f"{server.console.address}/api/decisions", headers=shown) as stream:
            assert stream.status == 200
            write(folder, "observer", "observer-new")
            while await stream.content.readany():
                pass
        async with http.get(f"{server.console.address}/api/decisions", headers=shown) as refused:
            assert refused.status == 401
