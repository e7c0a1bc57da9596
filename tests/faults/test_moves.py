"""Operators empty an engine: its answers go on at others, and clients notice nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import MODEL, Fleet
from tests.support.processes.pointsman import pointsman_command

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

STREAMS, TOKENS = 12, 1_000
WAIT_S = 60


@dataclass
class Streamed:
    """One stream: the instance that began it, its text so far, and whether it has ended."""

    instance: str = ""
    text: str = ""
    ended: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)


async def stream(fleet: Fleet, number: int, streamed: Streamed) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Task {number}. " + "Look at the points. " * 50}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180.0)) as http,
        http.post(f"{fleet.gateway_url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        streamed.instance = answer.headers["X-Pointsman-Instance"]
        async for line in answer.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed.text += choice["delta"].get("content") or ""
                streamed.begun.set()
            streamed.ended = streamed.ended or line.startswith(b"data: [DONE]")
    assert streamed.ended


async def drain(fleet: Fleet, instance: str, *flags: str) -> str:
    """Call the command, and return what it prints."""
    router = f"127.0.0.1:{fleet.ports['r0']}"
    argv = pointsman_command("drain", instance, "--router", router, *flags)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


async def test_answers_go_on_while_their_engine_is_emptied(fleet: Fleet) -> None:
    await fleet.repair()
    streams, again = ([Streamed() for _ in range(STREAMS)] for _ in range(2))
    before = await continued(fleet)
    async with asyncio.TaskGroup() as asking:
        for number, streamed in enumerate(streams):
            asking.create_task(stream(fleet, number, streamed))
        for streamed in streams:
            await asyncio.wait_for(streamed.begun.wait(), WAIT_S)
        instances = [streamed.instance for streamed in streams]
        source = max(instances, key=instances.count)
        try:
            # The command takes seconds to start on a busy machine.
            async with fleet.router("r0") as router:
                stub: Any = router
                await stub.Drain(fleet_pb2.DrainRequest(instance_id=source, move=True))
            output = await drain(fleet, source, "--move", "--wait", f"{WAIT_S}")
        finally:
            await drain(fleet, source, "--resume")
        assert f"{source} is DRAINING, 0 requests open" in output.splitlines()[-1]
    assert await continued(fleet) > before
    async with asyncio.TaskGroup() as asking:
        for number, streamed in enumerate(again):
            asking.create_task(stream(fleet, number, streamed))
    assert [streamed.text for streamed in streams] == [streamed.text for streamed in again]
    await fleet.wait_until_idle()


async def continued(fleet: Fleet) -> float:
    """How many answers the gateway has had continued."""
    return (await fleet.metrics(fleet.gateway_url))["pointsman_gateway_continued_total"]


async def test_an_engine_is_emptied_under_load(fleet: Fleet) -> None:
    """Nobody waits for long, and no answer is broken, repeated or lost."""
    source = fleet.address("gateway", "e0")
    async with fault_under_load(fleet, "engine emptied", may_repeat=True) as fault:
        try:
            await drain(fleet, source, "--move", "--wait", f"{WAIT_S}")
            await fleet.replay.answers(20)
        finally:
            # Other tests use the fleet, too.
            fault.ends_now()
            await drain(fleet, source, "--resume")
