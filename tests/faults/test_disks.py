"""Disks are full under load. Only the data that would have been written is lost, never an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman_router.io.telemetry.decision_log import read_log
from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import ROUTERS, Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

# How long a disk is full, s.
FULL_S = 1.5


def size(path: Path) -> int:
    return path.stat().st_size


async def grows(path: Path) -> None:
    before = size(path)
    while size(path) == before:  # noqa: ASYNC110 - the test's own timeout ends it
        await asyncio.sleep(0.05)


async def stands_still(path: Path, read: Callable[[Path], object]) -> None:
    """Check for FULL_S that no line is added, and that no line is incomplete."""
    before = size(path)
    await asyncio.sleep(FULL_S)
    assert size(path) == before
    read(path)


async def test_the_disk_of_a_routers_logs_is_full(fleet: Fleet) -> None:
    owner = await fleet.owner()
    log = fleet.folder / f"decisions-{owner}.jsonl"
    async with fault_under_load(fleet, "disk of the routers' logs full"):
        for name in ROUTERS:
            fleet.disk(name, full=True)
        await stands_still(log, lambda path: list(read_log(path)))
        for name in ROUTERS:
            fleet.disk(name, full=False)
        await grows(log)
    list(read_log(log))


async def test_the_disk_of_the_gateways_logs_is_full(fleet: Fleet) -> None:
    def read(path: Path) -> None:
        for line in path.read_text().splitlines():
            json.loads(line)

    log = fleet.folder / "breakdown.jsonl"
    async with fault_under_load(fleet, "disk of the gateway's logs full"):
        fleet.disk("gateway", full=True)
        await stands_still(log, read)
        fleet.disk("gateway", full=False)
        await grows(log)
    read(log)


async def test_the_disk_of_an_agents_state_is_full_and_the_agent_is_restarted(fleet: Fleet) -> None:
    agent = fleet.parts["a0"]
    argv = agent.argv
    async with fault_under_load(fleet, "disk of an agent's state full"):
        fleet.disk("a0", full=True)
        await asyncio.sleep(FULL_S)
        agent.argv = ["prlimit", "--fsize=0:unlimited", *argv]
        try:
            await fleet.restart("a0")
            await fleet.wait_until_healthy()
        finally:
            agent.argv = argv
        fleet.disk("a0", full=False)


async def test_the_disk_of_redis_is_full(fleet: Fleet) -> None:
    """Redis refuses writes, so routers continue without it."""
    async with fault_under_load(fleet, "disk of Redis full"):
        fleet.disk("redis", full=True)
        await asyncio.sleep(2 * FULL_S)
        fleet.disk("redis", full=False)
