"""What comes for a request while the time of its operation ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.request import request_events as ev
from pointsman_gateway.core.request.request_state_machine import Phase
from pointsman_gateway.io.request.request_runner import RequestRunner


def _runner() -> Any:
    runner: Any = RequestRunner.__new__(RequestRunner)
    runner._limit = runner._gave_up = None
    runner._state_machine = SimpleNamespace(
        step=object(), phase=Phase.SERVING, deadline=time.monotonic() + 60.0, handle=lambda event, now: []
    )
    runner._steps = SimpleNamespace(waits_for_head=lambda step: True)
    runner._shared = SimpleNamespace(router=None)
    return runner


def _move(runner: Any) -> None:
    runner._move(placement_pb2.Move(reason=placement_pb2.MOVE_REASON_DRAIN))


def _park(runner: Any) -> None:
    runner._parked("a", 10.0)


@pytest.mark.parametrize(
    ("come", "end"), [(_move, ev.UpstreamFailed("moved to another instance", moved=True)), (_park, ev.Tick())]
)
async def test_what_a_router_says_of_a_request_whose_time_is_just_over_breaks_nothing(
    come: Callable[[Any], None], end: ev.Event
) -> None:
    runner = _runner()

    async def operation() -> ev.Event:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            # The session with the router runs before the cancelled request does.
            come(runner)
            raise
        return ev.Tick()

    assert await runner._alone(0.0, operation()) == end
