"""Many requests at once, many of them ending badly: every placed attempt is reported once and nothing stays open."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.io.routes import Gateway
from tests.support.fakes.gateway_peers import Stack, stack
from tests.support.gateway_requests import CHAT
from tests.support.waiting import eventually

REQUESTS = 150


async def one(up: Stack, http: aiohttp.ClientSession, rng: random.Random, number: int) -> str:
    """Send one request, streamed or not, which is cancelled at some point or not."""
    body = CHAT | {"stream": rng.random() < 0.7, "user": str(number)}
    patience = rng.choice([None, None, 0.0, 0.002, 0.01, 0.05])
    try:
        async with asyncio.timeout(patience), http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
            await answer.read()
            return str(answer.status)
    except (TimeoutError, aiohttp.ClientError):
        return "left"


async def test_nothing_is_left_after_a_storm(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with stack(tmp_path, engines=4) as up, aiohttp.ClientSession() as http:
        order = list(up.router.pools[0].instances)

        def anywhere(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement | placement_pb2.Refusal:
            rng.shuffle(order)
            up.router.pools[0].ClearField("instances")
            up.router.pools[0].instances.extend(order)
            return up.router.first(request)

        up.router.placer = anywhere
        up.engines[1].mode = "500"
        up.engines[2].mode = "cut"

        async def trouble() -> None:
            """The router restarts in the middle."""
            await eventually(lambda: len(up.router.finished) > REQUESTS // 4)
            port = int(up.router.address.rpartition(":")[2])
            await up.router.stop()
            await up.router.start(port)

        storm = [one(up, http, rng, number) for number in range(REQUESTS)]
        *ends, _ = await asyncio.gather(*storm, trouble())
        assert set(ends) <= {"200", "502", "503", "left"}
        assert "200" in ends
        assert "left" in ends
        await eventually(lambda: not any(engine.open for engine in up.engines))
        gateway: Gateway = up.gateway
        await eventually(lambda: gateway.router.open_count == 0)
        await eventually(lambda: gateway.router.connected)
        await eventually(lambda: not up.router.reserved)
        # A client that leaves during placement causes two ends: its own, and that of the late placement, which is given back.
        late = "the placement came too late"
        finished = [done.request_id for done in up.router.finished if done.error != late]
        assert len(finished) == len(set(finished))
        text = [sample for metric in gateway.telemetry.registry.collect() for sample in metric.samples]
        assert [sample.value for sample in text if sample.name == "pointsman_gateway_open_requests"] == [0.0]
