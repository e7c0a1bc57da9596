"""A rolling change of a pool's dtype and context under load, with answers that are moved: no request is lost, none is mixed.

An engine of another type answers with other words, so that an answer which two of them gave is neither's.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from tests.support.processes.pointsman import control_plane
from tests.support.processes.process import free_port
from tests.support.waiting import eventually

MODEL = "pointsman-emulated"
OLD: dict[str, Any] = {"dtype": "float16", "seed": 1, "max_model_len": 2_048}
NEW: dict[str, Any] = {"dtype": "bfloat16", "seed": 2, "max_model_len": 32_768}
LONG = {"prompt": "point " * 3_000, "max_tokens": 8}
TOKENS, CLIENTS = 150, 4


async def engine(kind: dict[str, Any], port: int = 0) -> EmulatedEngine:
    return await start(EmulateSettings(port=port, speedup=1.0, **kind))


class Load:
    """Clients that ask one after the other, and the answers that they may get."""

    def __init__(self, http: aiohttp.ClientSession, url: str, references: list[str]) -> None:
        self.seen: Counter[str] = Counter()
        self.ended = False
        self._http, self._url, self._references = http, url, references

    async def run(self, client: int) -> None:
        number = 0
        while not self.ended:
            number += 1
            body = {"prompt": f"Client {client} asks question {number}.", "max_tokens": TOKENS}
            given = await self.text(self._url, body)
            # An engine's own answer to the same prompt, whichever of the two it is.
            wanted = [await self.text(url, body) for url in self._references]
            assert wanted[0] != wanted[1]
            assert given in wanted, (given, wanted)
            self.seen["old" if given == wanted[0] else "new"] += 1

    async def goes_on(self, clients: asyncio.Future[Any]) -> None:
        """Wait until some more answers have come."""
        enough = self.seen.total() + CLIENTS
        await eventually(lambda: self.seen.total() >= enough or clients.done(), "answers have come", 60)

    async def text(self, url: str, body: dict[str, Any]) -> str:
        asked = body | {"model": MODEL, "stream": True, "ignore_eos": True}
        async with self._http.post(f"{url}/v1/completions", json=asked) as answer:
            raw = await answer.text()
        assert answer.status == 200, raw
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        assert not [event for event in events if "error" in event], raw
        assert raw.rstrip().endswith("data: [DONE]"), raw
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


async def test_a_rolling_change_of_type_and_context_loses_and_mixes_nothing(tmp_path: Path) -> None:
    listen, router = (f"127.0.0.1:{free_port()}" for _ in range(2))
    ports = [free_port(), free_port(), free_port()]
    async with AsyncExitStack() as stack:
        engines = {port: await engine(OLD, port) for port in ports}
        references = [await engine(kind) for kind in (OLD, NEW)]
        for reference in references:
            stack.push_async_callback(reference.stop)
        plane = await stack.enter_async_context(control_plane(tmp_path, listen, router, ports))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router))
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        url = f"http://{listen}"

        async def listed() -> dict[str, fleet_pb2.InstanceStatus]:
            answer = await fleet.ListInstances(fleet_pb2.ListInstancesRequest())
            return {status.instance.instance_id: status for status in answer.instances}

        async def ready(count: int) -> bool:
            states = [status.state for status in (await listed()).values()]
            return states == [fleet_pb2.INSTANCE_STATE_READY] * count

        async def healthy() -> bool:
            async with http.get(f"{url}/health") as answer:
                return answer.status == 200 and (await answer.json())["status"] == "ok"

        await eventually(lambda: ready(len(ports)), "all instances are ready", 60)
        await eventually(healthy, "exact tokens", 60)
        load = Load(http, url, [reference.url for reference in references])
        async with http.post(f"{url}/v1/completions", json=LONG | {"model": MODEL}) as refused:
            assert refused.status == 400
            assert "2048" in await refused.text()
        clients = asyncio.gather(*(load.run(client) for client in range(CLIENTS)))
        stack.callback(clients.cancel)
        for done, port in enumerate(ports, 1):
            instance_id = f"127.0.0.1:{port}"
            await load.goes_on(clients)

            async def answers(instance_id: str = instance_id) -> bool:
                return (await listed())[instance_id].num_requests > 0

            await eventually(lambda: clients.done() or answers(), "it has something to move", 60)
            await fleet.Drain(fleet_pb2.DrainRequest(instance_id=instance_id, move=True))

            async def left(instance_id: str = instance_id) -> bool:
                return not await answers(instance_id)

            await eventually(left, "its requests have ended or left", 60)
            await engines[port].stop()
            engines[port] = await engine(NEW, port)

            async def back(instance_id: str = instance_id) -> bool:
                status = (await listed()).get(instance_id)
                return (
                    status is not None
                    and status.instance.identity.dtype == "bfloat16"
                    and status.state == fleet_pb2.INSTANCE_STATE_READY
                )

            await eventually(back, "the new engine is ready", 60)
            if done < len(ports):
                differing = {name: list(status.differences) for name, status in (await listed()).items()}
                assert any("dtype" in word for words in differing.values() for word in words), differing
            # From the first larger context on, the pool takes longer prompts.
            await eventually(healthy, "exact tokens", 60)
            assert await load.text(url, LONG)
        await load.goes_on(clients)
        load.ended = True
        await clients
        decisions = (await fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(page_size=1_000))).decisions
        moved = sum("resumed" in decision.notes for decision in decisions)
        assert moved, "no answer was moved"
        assert load.seen["old"], load.seen
        assert load.seen["new"], load.seen
        assert not any(status.differences for status in (await listed()).values())
        for running in engines.values():
            await running.stop()
    assert "Traceback (most recent" not in plane.log.read_text(), plane.tail()
