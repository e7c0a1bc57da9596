"""A router, an agent and a gateway let one emulated engine fetch what another one has cached."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2
from pointsman_lab.emulator.emulated_engine import EmulateSettings, start
from tests.support.processes.pointsman import plane_process, wait_until_it_serves
from tests.support.processes.process import free_port
from tests.support.waiting import eventually

# So high a price on answers beside a prefill that nothing is computed where an answer runs.
POLICY = "foresight:interference=1000,fetch_min_tokens=1024"


async def test_a_prompt_leaves_a_busy_instance_with_the_prefix_that_is_cached_there(tmp_path: Path) -> None:
    listen, router = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            engine = await start(EmulateSettings(port=0, kv_blocks=20_000, max_model_len=65_536))
            stack.push_async_callback(engine.stop)
            engines.append(f"{engine.url}?kv=mooncake&bootstrap={engine.url}")
        plane = plane_process(tmp_path, listen, router, engines, "--policy", POLICY)
        plane.start()
        stack.callback(plane.stop)
        await asyncio.to_thread(wait_until_it_serves, plane)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{listen}"))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router))
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)

        async def ask(words: str, session: str, tokens: int = 2) -> tuple[str, int]:
            """Return the instance that answered, and the cached tokens that the client is told of."""
            body: dict[str, Any] = {
                "model": "pointsman-emulated",
                "messages": [{"role": "user", "content": words}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session}) as answer:
                assert answer.status == 200, await answer.text()
                lines = (await answer.text()).split("\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            [usage] = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
            return answer.headers["X-Pointsman-Instance"], usage["prompt_tokens_details"]["cached_tokens"]

        # Until the curve is learned, and the events are trusted.
        for number in range(12):
            await ask(f"begin {number} " * 800, f"warm {number}")
        context = "the points are set for the main line, and " * 800
        owner, _ = await ask(context, "parent")
        answering = asyncio.create_task(ask(context + "Tell all.", "parent", 400))

        async def decodes() -> bool:
            listed = await fleet.ListInstances(fleet_pb2.ListInstancesRequest())
            return any(status.ongoing_decode_tokens for status in listed.instances)

        await eventually(decodes, "the answer has begun")
        other, cached = await ask(context + "And then?", "child")
        assert other != owner
        assert cached > 5_000, "what was fetched is a cache hit"
        assert not answering.done()
        await answering

        decisions = await fleet.ListDecisions(
            fleet_pb2.ListDecisionsRequest(filter=fleet_pb2.DecisionFilter(session_id="child"))
        )
        fetch = next(decision for decision in decisions.decisions if decision.reason == "fetch")
        [step] = fetch.steps
        assert (step.kind, step.instance.instance_id, step.kv_source.instance_id) == (
            placement_pb2.STEP_KIND_PREFILL,
            other,
            owner,
        )
        assert step.prefix_tokens == cached
        await eventually(lambda: _idle(fleet), "nothing is open")


async def _idle(fleet: fleet_pb2_grpc.FleetServiceAsyncStub) -> bool:
    listed = await fleet.ListInstances(fleet_pb2.ListInstancesRequest())
    return not any(status.num_requests for status in listed.instances)
