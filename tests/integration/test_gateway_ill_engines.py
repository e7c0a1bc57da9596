"""What a gateway does with ill engines: requests leave one that hangs, and a doubted error is compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from tests.support.fakes.gateway_peers import Stack, serve, stack
from tests.support.gateway_requests import CHAT, post
from tests.support.waiting import eventually


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        refs = running.router.pools[0].instances

        def doubting(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement:
            placement = serve(request, refs[1] if request.exclude or running.router.places[:-1] else refs[0])
            placement.doubted = True
            return placement

        running.router.placer = doubting
        yield running


async def test_a_request_that_waits_for_the_head_of_an_answer_can_leave_a_silent_engine(up: Stack) -> None:
    up.engines[0].mode = "hang"
    asking = asyncio.create_task(post(up, "/v1/chat/completions", json=CHAT))
    await eventually(lambda: up.engines[0].open == 1, "the first engine has the request")
    await up.router.move(up.router.places[0].request_id, placement_pb2.MOVE_REASON_DRAIN)
    status, _, _ = await asking
    assert status == 200
    await up.router.until(lambda: len(up.router.finished) == 2)
    left, ended = up.router.finished
    assert (left.outcome, left.error) == (placement_pb2.OUTCOME_CANCELLED, "moved to another instance")
    assert ended.outcome == placement_pb2.OUTCOME_OK
    assert list(up.router.places[1].exclude) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_none_of_the_api_is_made_by_another(up: Stack, stream: bool) -> None:
    up.engines[0].mode = "page"
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": stream}) as answer,
    ):
        body = await answer.read()
    assert (answer.status, answer.headers["X-Pointsman-Instance"]) == (200, "i1")
    assert b"html" not in body
    await up.router.until(lambda: len(up.router.finished) == 2)
    failed, ended = up.router.finished
    assert (failed.outcome, failed.refused, failed.broke) == (placement_pb2.OUTCOME_FAILED, False, False)
    assert ended.outcome == placement_pb2.OUTCOME_OK


async def test_what_a_doubted_engine_rejects_is_answered_by_another(up: Stack) -> None:
    up.engines[0].mode = "400"
    status, _, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert status == 200
    await up.router.until(lambda: len(up.router.finished) == 2)
    refused, ended = up.router.finished
    assert (refused.outcome, refused.http_status, refused.refused) == (placement_pb2.OUTCOME_FAILED, 400, True)
    assert ended.outcome == placement_pb2.OUTCOME_OK
    assert [list(first.refused_by) for first in up.router.first_tokens] == [["i0"]]


async def test_what_two_engines_reject_is_the_clients_fault(up: Stack) -> None:
    for engine in up.engines:
        engine.mode = "400"
    status, error, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, error["error"]["message"]) == (400, "no")
    await up.router.until(lambda: len(up.router.finished) == 2)
    rejected = up.router.finished[1]
    assert (rejected.outcome, list(rejected.alike)) == (placement_pb2.OUTCOME_REJECTED, ["i0"])


async def test_an_error_with_status_200_is_an_error_that_another_engine_is_asked_about(up: Stack) -> None:
    up.engines[0].mode = "200"
    status, body, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, len(body["choices"])) == (200, 1)
    await up.router.until(lambda: len(up.router.finished) == 2)
    failed, ended = up.router.finished
    assert (failed.outcome, failed.http_status, failed.refused) == (placement_pb2.OUTCOME_FAILED, 500, True)
    assert ended.outcome == placement_pb2.OUTCOME_OK
    for engine in up.engines:
        engine.mode = "200"
    status, error, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, error["error"]["message"]) == (500, "no")
