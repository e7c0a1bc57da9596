"""Tests of the router client's timers on event loops whose handles have no time, as uvloop's of a call that is due."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.io.routing.router_client import RouterClient


async def test_requests_that_are_due_at_once_are_served_as_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def as_on_uvloop(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.Handle:
        if when <= loop.time():
            return loop.call_soon(callback, *args, **options)
        return call_at(when, callback, *args, **options)

    monkeypatch.setattr(loop, "call_at", as_on_uvloop)
    client = RouterClient(["127.0.0.1:9"], "g", tuple, 0.0, lambda pools: None, lambda connected: None)
    try:
        asked = (placement_pb2.PlacementRequest(request_id=f"r{number}", model="m") for number in range(3))
        answers = await asyncio.gather(*(client.first_step(request, 5.0) for request in asked))
    finally:
        await client.close()
    assert len(answers) == 3
