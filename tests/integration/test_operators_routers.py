"""Operators' commands when several routers share the models: each command asks the router that knows the answer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from typer.testing import CliRunner

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_cli import fleet_commands
from pointsman_cli.instance_commands import WAIT_STEP_S
from pointsman_lab.live.fleet_watch import FleetError, FleetWatcher
from pointsman_router.io.main import RouterServer
from tests.support.processes.process import free_port
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import eventually

LEASE_S = 0.5


@pytest.fixture(autouse=True)
def logs_apart() -> None:
    """Bind the routers' log to this test's stderr: a command of this process replaces sys.stdout while both are running."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


@dataclass
class Pair:
    """Two routers over one Redis: "m" is `owner`'s, and `other` knows that."""

    owner: RouterServer
    other: RouterServer
    owner_client: Client

    async def ask(self, *words: str, router: str = "other", status: int = 0) -> str:
        """Return the output of a command that asks one of the routers; its exit status must be `status`."""
        server = self.owner if router == "owner" else self.other
        return await command(*words, router=f"127.0.0.1:{server.port}", status=status)


async def command(*words: str, router: str, status: int = 0) -> str:
    """Return the output of a command; its exit status must be `status`."""
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--router", router])
    assert done.exit_code == status, done.output
    return done.output


@asynccontextmanager
async def pair(folder: Path, advertise: str = "") -> AsyncIterator[Pair]:
    """Two routers; `advertise` is the address that the owner advertises."""
    async with AsyncExitStack() as stack:
        url, _ = stack.enter_context(redis_server(folder))
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": LEASE_S}
        owner, client = await stack.enter_async_context(running(router_id="r1", advertise=advertise, **shared))
        await Report(client).join("a")

        async def owns() -> bool:
            return owner.router.store.may_place("m")

        await eventually(owns, "r1 owns m")
        other, second = await stack.enter_async_context(running(router_id="r2", **shared))
        await Report(second).join("a")

        async def known() -> bool:
            owner = other.router.store.owner("m")
            return owner is not None and owner.router_id == "r1" and len(other.router.store.replicas()) == 2

        await eventually(known, "r2 knows that m is r1's")
        yield Pair(owner, other, client)


async def test_every_question_is_answered_whichever_router_is_asked(tmp_path: Path) -> None:
    async with pair(tmp_path) as routers:
        session = Session(routers.owner_client)
        await session.hello()
        await session.place("p1", session_id="s")
        await session.place("p2", session_id="s")
        listed = json.loads(await routers.ask("instances", "--json"))
        assert [(instance["num_requests"], instance["sessions"]) for instance in listed["instances"]] == [(2, 1)]
        decided = json.loads(await routers.ask("decisions", "--json"))["decisions"]
        assert [decision["decision_id"] for decision in decided] == ["r1-2", "r1-1"]
        assert len(json.loads(await routers.ask("decisions", "-n", "1", "--json"))["decisions"]) == 1
        assert "request p1" in await routers.ask("explain", "r1-1")
        assert "r1-2" in await routers.ask("explain", "p2")
        assert "of 2 requests" in await routers.ask("what-if", "--policy", "sticky", "--last", "5")
        assert "of 1 requests" in await routers.ask("what-if", "--policy", "sticky", "r1-2")
        assert "2 requests open" in await routers.ask("drain", "a")
        assert "2 requests open" in await routers.ask("weight", "a", "0.5")


async def test_an_instance_is_empty_only_if_the_owner_says_so(tmp_path: Path) -> None:
    """A router that does not own the pool counts no requests there."""
    async with pair(tmp_path) as routers:
        session = Session(routers.owner_client)
        await session.hello()
        await session.place("p1", movable=True)
        said = await routers.ask("drain", "a", "--move", "--wait", "0.6", status=1)
        now, warning = said.splitlines()
        assert now == "a is DRAINING, 1 requests open"
        assert warning.startswith("warning: no instance of m can answer now")
        assert warning.endswith("until you run `pointsman drain a --resume`")
        await session.finish("p1")
        assert "0 requests open" in await routers.ask("drain", "a", "--move", "--wait", "30")
        assert "cannot be combined" in await routers.ask("drain", "a", "--resume", "--move", status=2)


async def test_a_drain_ends_when_the_instance_leaves() -> None:
    async with running() as (server, client):
        report, session = Report(client), Session(client)
        await report.join("a")
        await session.hello()
        await session.place("p1")
        draining = asyncio.create_task(command("drain", "a", "--wait", "30", router=f"127.0.0.1:{server.port}"))
        await _drained_and_seen(client)
        await report.send(goodbye=agent_pb2.Goodbye(reason="stopped"))
        assert (await draining).splitlines()[-1] == "a has left the fleet"


async def test_a_drain_goes_on_while_the_router_restarts() -> None:
    """The new process knows no instance at first, and does not say that it has left."""
    listen = f"127.0.0.1:{free_port()}"
    async with running(listen=listen) as (_, client):
        session = Session(client)
        await Report(client).join("a")
        await session.hello()
        await session.place("p1")
        draining = asyncio.create_task(command("drain", "a", "--wait", "60", router=listen))
        await _drained_and_seen(client)
    await asyncio.sleep(2 * WAIT_STEP_S)
    async with running(listen=listen) as (_, client):
        await asyncio.sleep(2 * WAIT_STEP_S)
        assert not draining.done()
        await Report(client).join("a")
        await client.fleet.Drain(fleet_pb2.DrainRequest(instance_id="a"))
        assert (await draining).splitlines()[-1] == "a is DRAINING, 0 requests open"


async def _drained_and_seen(client: Client) -> None:
    """Wait until `drain a --wait` has had an answer after its order."""

    async def drained() -> bool:
        return (await client.instances())["a"].state == fleet_pb2.INSTANCE_STATE_DRAINING

    await eventually(drained, "it is drained")
    await asyncio.sleep(2 * WAIT_STEP_S)


async def test_gateways_are_told_which_requests_leave_an_instance(tmp_path: Path) -> None:
    async with pair(tmp_path) as routers:
        session = Session(routers.owner_client)
        await session.hello()
        await session.place("p1", movable=True)
        await Report(routers.owner_client).join("b")
        await routers.ask("drain", "a", "--move")
        move = (await session.read("move")).move
        assert (move.request_id, move.reason) == ("p1", placement_pb2.MOVE_REASON_DRAIN)


async def test_decisions_of_a_router_that_died_are_said_to_be_its_own(tmp_path: Path) -> None:
    async with pair(tmp_path) as routers:
        assert "NOT_FOUND" in await routers.ask("explain", "r1-7", status=1)
        await routers.owner.stop()

        async def alone() -> bool:
            return len(routers.other.router.store.replicas()) == 1

        await eventually(alone, "r1 is gone")
        said = await routers.ask("explain", "r1-7", status=1)
        assert "NOT_FOUND: no decision 'r1-7' at router r2" in said
        assert "it would be of router r1, which is not alive" in said
        assert "decision_log_file" in said
        assert said == await routers.ask("what-if", "--policy", "sticky", "r1-7", status=1)


async def test_a_replay_beside_a_router_that_places_nothing_is_told_whom_to_ask(tmp_path: Path) -> None:
    async with pair(tmp_path) as routers:
        owner, other = (f"127.0.0.1:{router.port}" for router in (routers.owner, routers.other))
        with pytest.raises(FleetError, match=f"{other} places nothing, .*: ask r1 at {owner}"):
            async with FleetWatcher(other, tuple, 1.0, time.monotonic):
                pass
        async with FleetWatcher(owner, tuple, 1.0, time.monotonic) as watcher:
            assert [sample.instance for sample in watcher.samples] == ["a"]


async def test_an_owner_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    async with pair(tmp_path, advertise=nowhere) as routers:
        for words in (["instances"], ["decisions"]):
            said = await routers.ask(*words)
            assert f"router r1 at {nowhere} cannot be reached: " in said
        assert "cannot be asked" not in await routers.ask("decisions", router="owner")
