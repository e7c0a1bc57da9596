"""Both requests of an offload sent at once, between layerwise engines, over real sockets; and what happens when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from tests.support.fakes.gateway_peers import Stack
from tests.support.fakes.offloading_peers import (
    CHAT,
    STREAM,
    answered,
    halves,
    offload_stack,
    offloading,
    p_and_d,
    reported_steps,
)
from tests.support.waiting import eventually

BOTH = (True, True)


@pytest.fixture
async def up(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A gateway in which the timeouts that a test's parameter names are short."""
    async with offload_stack(tmp_path, getattr(request, "param", ())) as running:
        yield running


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_where_both_want_it_both_requests_are_sent_at_once(up: Stack, body: dict[str, Any]) -> None:
    offloading(up, layerwise=BOTH)
    p, d = p_and_d(up)
    p.sends = d.fetches = "wait"
    asking = asyncio.ensure_future(answered(up, body))
    await eventually(lambda: len(p.halves) == len(d.halves) == 1)
    p.go.set()
    await up.router.until(lambda: reported_steps(up) == [(0, "")])
    d.go.set()
    assert await asking == ("i1", "The points are set.")
    ((_, _, sent),), ((_, _, fetched),) = p.halves, d.halves
    assert (fetched["transfer_id"], fetched["remote_engine_id"]) == (sent["transfer_id"], "e1")
    assert p.queries == 1
    assert len(up.router.finished) == 1


async def test_the_step_after_the_prefill_is_not_given_back_when_it_comes_after_the_end(up: Stack) -> None:
    offloading(up, layerwise=BOTH)
    up.router.late = True
    p_and_d(up)[1].fetches = "wait"
    asking = asyncio.ensure_future(answered(up, STREAM))
    await up.router.until(lambda: reported_steps(up) == [(0, "")])
    p_and_d(up)[1].go.set()
    await asking
    await answered(up, STREAM | {"messages": [{"role": "user", "content": "another"}]})
    assert [done.outcome for done in up.router.finished] == [placement_pb2.OUTCOME_OK] * 2


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
async def test_where_one_does_not_want_it_the_second_request_waits(up: Stack, wanted: tuple[bool, bool]) -> None:
    offloading(up, layerwise=wanted)
    p, d = p_and_d(up)
    p.sends = "wait"
    asking = asyncio.ensure_future(answered(up, STREAM))
    await eventually(lambda: len(p.halves) == 1)
    assert d.halves == []
    p.go.set()
    assert await asking == ("i1", "The points are set.")


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_the_answer_does_not_wait_for_the_end_of_the_prefill(up: Stack, body: dict[str, Any]) -> None:
    offloading(up, layerwise=BOTH)
    p, _ = p_and_d(up)
    p.sends = "wait"
    assert await answered(up, body) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, "")]
    assert [done.outcome for done in up.router.finished] == [placement_pb2.OUTCOME_OK]
    assert (halves(up, 0), halves(up, 1)) == (["send"], ["fetch"])
    p.go.set()


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("up", "fault", "error"),
    [
        ((), {"sends": "500"}, "status 500"),
        (("prefill_timeout_s",), {"sends": "hang"}, "deadline"),
        ((), {"sends": "early"}, "the prefill stopped early"),
    ],
    ids=["refuses", "slow", "early"],
    indirect=["up"],
)
async def test_when_p_fails_while_d_waits_d_is_asked_anew(
    up: Stack, body: dict[str, Any], fault: dict[str, str], error: str
) -> None:
    offloading(up, layerwise=BOTH)
    p, d = p_and_d(up)
    d.fetches = "hang"
    for name, value in fault.items():
        setattr(p, name, value)
    assert await answered(up, body) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, error)]
    assert (halves(up, 1), d.aborted, len(d.requests)) == (["fetch"], 1, 1)
    assert len(up.router.finished) == 1
    await eventually(lambda: p.open == 0)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_without_a_bootstrap_server_neither_is_asked(up: Stack, body: dict[str, Any]) -> None:
    offloading(up, layerwise=BOTH)
    p, d = p_and_d(up)
    p.engine_id = ""
    assert await answered(up, body) == ("i1", "The points are set.")
    ((step, error),) = reported_steps(up)
    assert (step, error.removeprefix("the other instance: ")) == (0, "the bootstrap server: status 503")
    assert (p.halves, d.halves, len(d.requests)) == ([], [], 1)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_when_d_refuses_the_prefill_is_ended(up: Stack, body: dict[str, Any]) -> None:
    offloading(up, layerwise=BOTH)
    p, d = p_and_d(up)
    p.sends, d.fetches = "hang", "500"
    assert await answered(up, body) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, "the other instance: status 500")]
    assert not any(done.instance_failed for done in up.router.step_dones)
    await eventually(lambda: p.open == 0)


async def test_when_d_is_gone_the_prefill_is_ended_and_another_answers(up: Stack) -> None:
    up.router.pools[0].instances[1].url = "http://127.0.0.1:1"
    offloading(up, layerwise=BOTH)
    p, _ = p_and_d(up)
    p.sends = "hang"
    assert await answered(up, STREAM) == ("i0", "The points are set.")
    ((_, error),) = reported_steps(up)
    assert error.startswith("the other instance: no answer")
    assert [list(place.exclude) for place in up.router.places] == [[], ["i1"]]
    await eventually(lambda: p.open == 0)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_both(up: Stack, body: dict[str, Any]) -> None:
    offloading(up, layerwise=BOTH)
    p, d = p_and_d(up)
    p.sends = d.fetches = "hang"
    async with aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(http.post(f"{up.url}/v1/chat/completions", json=body))
        await eventually(lambda: p.open == d.open == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert up.router.finished[0].outcome == placement_pb2.OUTCOME_CANCELLED
    await eventually(lambda: p.open == d.open == 0)
