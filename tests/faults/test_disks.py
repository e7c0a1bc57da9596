"""Disks are full under load. Only the data that would have been written is lost, never an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pointsman_router.io.telemetry.decision_log import read_log
from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import ROUTERS, Fleet
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

# How long a disk is full, s.
FULL_S = 1.5


def sizes(paths: Sequence[Path]) -> list[int]:
    return [path.stat().st_size for path in paths]


async def grow(paths: Sequence[Path]) -> None:
    """Wait until a line is added to one of the files."""
    before = sizes(paths)
    await eventually(lambda: sizes(paths) != before, "a line is written")


async def stand_still(paths: Sequence[Path], read: Callable[[Path], object]) -> None:
    """Check for FULL_S that no line is added, and that no line is incomplete."""
    before = sizes(paths)
    await asyncio.sleep(FULL_S)
    assert sizes(paths) == before
    for path in paths:
        read(path)


async def test_the_disk_of_a_routers_logs_is_full(fleet: Fleet) -> None:
    # On a busy machine the pool's owner may change meanwhile.
    logs = [fleet.folder / f"decisions-{name}.jsonl" for name in ROUTERS]
    async with fault_under_load(fleet, "disk of the routers' logs full"):
        for name in ROUTERS:
            fleet.disk(name, full=True)
        await stand_still(logs, lambda path: list(read_log(path)))
        for name in ROUTERS:
            fleet.disk(name, full=False)
        await grow(logs)
    for log in logs:
        list(read_log(log))


async def test_the_disk_of_the_gateways_logs_is_full(fleet: Fleet) -> None:
    def read(path: Path) -> None:
        for line in path.read_text().splitlines():
            json.loads(line)

    log = fleet.folder / "breakdown.jsonl"
    async with fault_under_load(fleet, "disk of the gateway's logs full"):
        fleet.disk("gateway", full=True)
        await stand_still([log], read)
        fleet.disk("gateway", full=False)
        await grow([log])
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
