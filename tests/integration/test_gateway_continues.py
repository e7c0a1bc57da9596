"""What the gateway asks and reports when an answer goes on at another instance, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import extend_keys
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.streaming import sse
from pointsman_gateway.core.tenants import Client
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.io.request import steps_and_relay
from pointsman_gateway.io.request.fair_turns import FairTurns
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.fakes.offloading_peers import answered, offload_stack, p_and_d
from tests.support.fakes.telling_engine import FIRST_ID, TellingEngine
from tests.support.waiting import eventually

WORDS = tuple(f"word{at} " for at in range(24))
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Set the points. " * 8}],
    "stream": True,
    "max_tokens": 400,
}


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    """Two engines, of which the first gives 20 words and stops there."""
    async with stack(tmp_path, engine=TellingEngine) as running:
        for engine in running.engines:
            assert isinstance(engine, TellingEngine)
            engine.words = WORDS
            engine.go.set()
        first(running).words_before = 20
        first(running).go.clear()
        yield running
        await eventually(lambda: not any(engine.open for engine in running.engines), "nothing is open at the engines")
        assert running.router.reserved == set()


def first(up: Stack) -> TellingEngine:
    engine = up.engines[0]
    assert isinstance(engine, TellingEngine)
    return engine


def pool(up: Stack) -> placement_pb2.Pool:
    """The pool as the gateway knows it."""
    [state] = up.gateway.pools.states()
    found: placement_pb2.Pool = state.pool
    return found


async def text_of(up: Stack, **headers: str) -> tuple[str, list[dict[str, Any]]]:
    """Stream an answer; return its text and its errors. Waits until the router has received the request's end."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=BODY, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        raw = await answer.text()
    assert not any(line.startswith(":") and line != ": keep-alive" for line in raw.splitlines()), raw
    assert raw.count("data: [DONE]") <= 1
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert sum("role" in event["choices"][0]["delta"] for event in events if event.get("choices")) <= 1
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event.get("choices"))
    await up.router.until(lambda: not up.router.reserved)
    return text, [event["error"] for event in events if "error" in event]


async def begun(up: Stack) -> asyncio.Task[tuple[str, list[dict[str, Any]]]]:
    """Stream an answer, and return when the first engine waits in the middle of it."""
    asking = asyncio.create_task(text_of(up))
    await up.router.until(lambda: bool(up.router.first_tokens))
    return asking


async def test_what_the_router_is_asked_and_told(up: Stack) -> None:
    """The rest is placed as what it is, away from all ranks of the server, whatever the client's TTFT deadline was."""
    first(up).mode = "cut"
    rank = up.router.pools[0].instances.add()
    rank.CopyFrom(up.router.pools[0].instances[0])
    rank.instance_id = "i0/1"
    await up.router.tell_fleet()
    await eventually(lambda: len(pool(up).instances) == 3, "the rank is known")
    assert await text_of(up, **{"X-Pointsman-TTFT-Timeout": "30"}) == ("".join(WORDS), [])
    before, rest = up.router.places
    assert before.HasField("ttft_deadline")
    assert not rest.HasField("ttft_deadline")
    assert (before.resumed, rest.resumed, rest.continues_session, rest.single_instance) == (False, True, True, True)
    assert (before.movable, rest.movable, rest.sliceable_tokens) == (True, True, 0)
    assert rest.input_tokens == before.input_tokens + 20
    assert rest.max_output_tokens == before.max_output_tokens - 20
    assert list(rest.exclude) == ["i0", "i0/1"]
    ids = up.engines[0].tokenizer.chat(BODY)
    whole = len(ids) // 16
    following = extend_keys(before.keys[-1], [*ids[whole * 16 :], *range(FIRST_ID, FIRST_ID + 20)])
    assert list(rest.keys) == [*before.keys, *following]
    failed, ended = up.router.finished
    assert (failed.outcome, ended.outcome) == (placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK)
    assert ended.prompt_tokens == before.input_tokens + 20
    assert ended.output_tokens == len(WORDS) - 20


async def test_an_engine_without_the_package_gets_the_text_to_continue(up: Stack) -> None:
    for engine in up.engines:
        assert isinstance(engine, TellingEngine)
        engine.tells = False
    first(up).mode = "cut"
    assert await text_of(up) == ("".join(WORDS), [])
    other = up.engines[1]
    assert isinstance(other, TellingEngine)
    begun = "".join(WORDS[:20])
    assert other.continued_texts == [begun]
    before, rest = up.router.places
    tokenizer = up.engines[0].tokenizer
    count = len(tokenizer.whole(begun))
    assert (rest.input_tokens, rest.resumed) == (before.input_tokens + count, True)
    whole = [*tokenizer.chat(BODY), *tokenizer.whole(begun)]
    assert list(rest.keys) == [*before.keys, *extend_keys(before.keys[-1], whole[len(before.keys) * 16 :])]
    _, asked, _ = other.requests[-1]
    assert asked["max_tokens"] == BODY["max_tokens"] - count
    assert asked["messages"] == [*BODY["messages"], {"role": "assistant", "content": begun}]
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == (False, True)
    failed, ended = up.router.finished
    assert (failed.outcome, ended.outcome) == (placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK)
    assert ended.output_tokens == len(WORDS) - 20


@pytest.mark.parametrize("tells", [True, False])
async def test_an_answer_goes_on_whatever_comments_keep_its_stream_alive(up: Stack, tells: bool) -> None:
    for engine in up.engines:
        assert isinstance(engine, TellingEngine)
        engine.tells, engine.keeps_alive = tells, True
    first(up).mode = "cut"
    assert await text_of(up) == ("".join(WORDS), [])
    assert [place.resumed for place in up.router.places] == [False, True]


async def test_begun_texts_of_many_requests_of_one_tenant_delay_another_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def recorded(endpoint: Endpoint, payload: bytes, events: bytes, tokenizer: ModelTokenizer) -> None:
        order.append(json.loads(payload)["cache_salt"])

    monkeypatch.setattr(steps_and_relay, "continued_text", recorded)
    file = tmp_path / "keys"
    file.write_text("red:k1 cache_salt=red\nblue:k2 cache_salt=blue\n")
    async with stack(tmp_path, engine=TellingEngine, api_keys_file=file) as up:
        for engine in up.engines:
            assert isinstance(engine, TellingEngine)
            engine.words, engine.words_before, engine.mode, engine.tells = WORDS, 20, "cut", False
            engine.go.set()
        turns = up.gateway._shared.text_turns
        await turns.take(Client("green", b""))
        asking = []
        for key in ("k1", "k1", "k1", "k1", "k2"):
            asking.append(asyncio.create_task(text_of(up, Authorization=f"Bearer {key}")))
            await eventually(lambda: waiting(turns) == len(asking), "the text waits")
        turns.give_back()
        for text, errors in await asyncio.gather(*asking):
            assert (text, len(errors)) == ("".join(WORDS[:20]), 1)
        assert order == ["red", "blue", "red", "red", "red"]


def waiting(turns: FairTurns) -> int:
    return sum(len(queue) for keys in turns._waiting.values() for queue in keys.values())


async def test_a_begun_text_does_not_wait_for_its_turn_without_end(up: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_and_relay, "TEXT_WAIT_S", 0.01)
    for engine in up.engines:
        assert isinstance(engine, TellingEngine)
        engine.tells = False
    first(up).mode = "cut"
    turns = up.gateway._shared.text_turns
    await turns.take(Client("another", b""))
    text, (error,) = await text_of(up)
    assert text == "".join(WORDS[:20])
    assert error["code"] == 502
    assert not waiting(turns)


@pytest.mark.parametrize("tells", [True, False])
async def test_an_answer_whose_last_event_has_come_is_whole_when_its_engine_dies_then(up: Stack, tells: bool) -> None:
    first(up).tells = tells
    first(up).mode, first(up).words_before = "cut after the end", len(WORDS)
    assert await text_of(up) == ("".join(WORDS), [])
    [ended] = up.router.finished
    assert (ended.outcome, ended.output_tokens) == (placement_pb2.OUTCOME_OK, len(WORDS))


async def test_an_answer_that_no_other_instance_may_take_ends_with_an_error(up: Stack) -> None:
    first(up).mode = "cut"
    up.router.pools[0].instances.pop()
    await up.router.tell_fleet()
    text, (error,) = await text_of(up)
    assert text == "".join(WORDS[:20])
    assert error["code"] == 502
    assert [finish.outcome for finish in up.router.finished] == [placement_pb2.OUTCOME_FAILED]


@pytest.mark.parametrize("room", [True, False])
async def test_an_answer_whose_ids_outgrow_the_memory_for_them_is_not_continued(
    up: Stack, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Ids of more tokens than memory was taken for take more of the budget, of which each client has a share."""
    for module in (sse, steps_and_relay):
        monkeypatch.setattr(module, "RECORD_STEP", 60)
    payload = len(json.dumps(BODY | {"stream_options": {"include_usage": True}}))
    budget = up.gateway._shared.kept_bodies
    budget.limit = payload + 10_000 if room else payload + 90
    first(up).mode = "cut"
    text, errors = await text_of(up)
    assert (text, len(errors)) == (("".join(WORDS), 0) if room else ("".join(WORDS[:20]), 1))
    assert budget.used == 0


async def test_one_keys_answers_leave_memory_to_those_of_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red:k1\nblue:k2\n")
    async with stack(tmp_path, engine=TellingEngine, engines=1, api_keys_file=keys) as up:
        engine = first(up)
        engine.words, engine.words_before = WORDS, 20
        budget = up.gateway._shared.kept_bodies
        used, asking = list[int](), list[asyncio.Task[tuple[str, list[dict[str, Any]]]]]()
        for key in ("k1", "k1", "k2"):
            asking.append(asyncio.create_task(text_of(up, Authorization=f"Bearer {key}")))
            await up.router.until(lambda: len(up.router.first_tokens) == len(asking))
            used.append(budget.used)
            budget.limit = used[0] * 5 // 2
        assert used == [used[0], used[0], 2 * used[0]]
        engine.go.set()
        assert await asyncio.gather(*asking) == [("".join(WORDS), [])] * 3
        assert budget.used == 0


async def test_a_rank_of_the_server_that_is_left_may_take_the_rest(up: Stack) -> None:
    """The server works. Only a server that failed has taken its ranks with it."""
    asking = await begun(up)
    await up.router.move(up.router.places[0].request_id, placement_pb2.MOVE_REASON_DRAIN)
    await asking
    assert list(up.router.places[1].exclude) == []


async def test_an_instance_that_operators_empty_loses_its_stream_and_is_not_blamed(up: Stack) -> None:
    asking = await begun(up)
    await up.router.move(up.router.places[0].request_id, placement_pb2.MOVE_REASON_DRAIN)
    assert await asking == ("".join(WORDS), [])
    left, _ = up.router.finished
    assert (left.outcome, left.error) == (placement_pb2.OUTCOME_CANCELLED, "moved to another instance")
    assert first(up).aborted == 1


@pytest.mark.parametrize("why", ["not told", "unknown", "lost, but alive", "chosen before its answer began"])
async def test_a_stream_that_cannot_or_need_not_go_on_elsewhere_stays(up: Stack, why: str) -> None:
    first(up).tells = why != "not told"
    asking = await begun(up)
    reason = placement_pb2.MOVE_REASON_LOST if why == "lost, but alive" else placement_pb2.MOVE_REASON_DRAIN
    moved = "another" if why == "unknown" else up.router.places[0].request_id
    await up.router.move(moved, reason, unbegun=why == "chosen before its answer began")
    # Told after the order, on the same stream, and so applied after it.
    up.router.pools[0].served_names.append("later")
    await up.router.tell_fleet()
    await eventually(lambda: "later" in pool(up).served_names, "the gateway knows")
    kept = up.gateway._shared.kept_bodies
    assert kept.used
    first(up).go.set()
    assert await asking == ("".join(WORDS), [])
    assert len(up.router.places) == 1
    assert kept.used == 0


@pytest.mark.parametrize("keeps_alive", [False, True])
async def test_a_request_whose_answer_has_not_begun_is_asked_anew(up: Stack, keeps_alive: bool) -> None:
    first(up).words_before, first(up).keeps_alive = 0, keeps_alive
    asking = asyncio.create_task(text_of(up))
    await eventually(lambda: first(up).open == 1, "the first engine has the request")
    while not up.router.finished:
        # The answer's head may still be under way.
        await up.router.move(up.router.places[0].request_id, placement_pb2.MOVE_REASON_DRAIN, unbegun=True)
        await asyncio.sleep(0.02)
    assert await asking == ("".join(WORDS), [])
    left, _ = up.router.finished
    assert (left.outcome, up.router.places[1].resumed) == (placement_pb2.OUTCOME_CANCELLED, False)


@pytest.mark.parametrize("fetches", ["told error", "error kept alive"])
async def test_a_kv_transfer_that_failed_is_seen_behind_a_comment(tmp_path: Path, fetches: str) -> None:
    async with offload_stack(tmp_path) as running:
        _, d = p_and_d(running)
        d.fetches = fetches
        stream = {"model": MODEL, "messages": BODY["messages"], "stream": True}
        assert await answered(running, stream) == ("i1", "The points are set.")
        assert [done.error for done in running.router.step_dones][-1] == "the answer began with an error"
