"""A prefix that one instance has cached, fetched by another, over real sockets: what each is sent, what the client is told of
it, and what happens when either fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from tests.support.fakes.gateway_peers import Stack
from tests.support.fakes.offloading_peers import (
    answered,
    breaks_both,
    fetches_by_outcome,
    halves,
    offload_stack,
    p_and_d,
    reported_steps,
    slicing,
    transferring,
)
from tests.support.gateway_requests import LONG
from tests.support.tiny_tokenizer import CHATML
from tests.support.waiting import eventually

STREAM = LONG | {"stream": True, "stream_options": {"include_usage": True}}
CACHED = 512  # tokens that P has cached
MOONCAKE, NIXL = agent_pb2.KV_PROTOCOL_MOONCAKE, agent_pb2.KV_PROTOCOL_NIXL
WAYS = ["in turn", "at once", "nixl"]


@pytest.fixture
async def up(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A gateway in which the timeouts that a test's parameter names are short. The router lets D fetch CACHED tokens."""
    async with offload_stack(tmp_path, getattr(request, "param", ()), client_cache_salt=True) as running:
        fetching(running, CACHED)
        yield running


def fetching(up: Stack, *prefixes: int, way: str = "in turn", fetches: int = 1) -> None:
    """Make the router plan that D (i1) fetches the first of `prefixes` from P (i0), computes the others and answers."""
    transferring(up, NIXL if way == "nixl" else MOONCAKE, (way == "at once",) * 2)
    slicing(up, *prefixes, at=1, fetches=fetches)
    p, d = p_and_d(up)
    p.answers = {"do_remote_prefill": True, "remote_engine_id": "p", "transfer_id": "t"} if way == "nixl" else None
    p.cached = d.cached = cached(CACHED)


def cached(tokens: int) -> Callable[[dict[str, Any]], int]:
    """An engine that has found `tokens` of each prompt."""
    return lambda _: tokens


@pytest.mark.parametrize("way", WAYS)
async def test_both_get_the_same_beginning_and_d_goes_on_with_it(up: Stack, way: str) -> None:
    fetching(up, CACHED, 768, way=way)
    p, d = p_and_d(up)
    body = STREAM | {"model": "tiny-lora", "cache_salt": "pepper"}
    assert await answered(up, body) == ("i1", "The points are set.")
    ids = p.tokenizer.chat(LONG)
    ((_, sent, params),), ((_, received, fetched),) = p.halves, d.halves
    del sent["kv_transfer_params"], received["kv_transfer_params"]
    # One token more than P has cached, so that P computes one token and no block.
    assert sent == received
    assert sent == {
        "model": "tiny-lora",
        "prompt": ids[: CACHED + 1],
        "max_tokens": 1,
        "stream": False,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "pepper",
    }
    assert params["do_remote_decode"]
    assert fetched["do_remote_prefill"]
    if way == "nixl":
        assert fetched == p.answers
    else:
        assert (fetched["transfer_id"], fetched["remote_engine_id"]) == (params["transfer_id"], "e1")
    # The rest is D's own.
    (_, rest, _), (_, served, _) = d.requests
    assert rest["prompt"] == ids[:768]
    assert served["messages"] == body["messages"]
    assert not [body for _, body, _ in d.requests if "kv_transfer_params" in body]
    assert reported_steps(up) == [(0, ""), (1, "")]
    assert fetches_by_outcome(up) == {"cached": 1}
    assert [engine.released for engine in (p, d)] == [[], []]


@pytest.mark.parametrize("way", WAYS)
async def test_the_requests_are_sent_in_turn_or_at_once(up: Stack, way: str) -> None:
    fetching(up, CACHED, way=way)
    p, d = p_and_d(up)
    p.sends = "wait"
    asking = asyncio.ensure_future(answered(up, STREAM))
    await eventually(lambda: len(p.halves) == 1)
    if way == "at once":
        await eventually(lambda: len(d.halves) == 1)
    assert len(d.halves) == (way == "at once")
    p.go.set()
    assert await asking == ("i1", "The points are set.")


async def test_each_fetch_of_a_request_is_a_transfer_of_its_own(up: Stack) -> None:
    fetching(up, CACHED, 768, fetches=2)
    p, d = p_and_d(up)
    p.cached = d.cached = cached(768)
    await answered(up, STREAM)
    assert [len(body["prompt"]) for _, body, _ in p.halves] == [CACHED + 1, 769]
    assert len({params["transfer_id"] for _, _, params in p.halves}) == 2
    assert reported_steps(up) == [(0, ""), (1, "")]


async def test_what_the_engines_may_render_differently_is_fetched_by_its_tokens(tmp_path: Path) -> None:
    """D caches the KV under the tokens that it was sent. If it renders others, it does not find them."""
    template = f"{{{{ strftime_now('%H:%M') }}}}{CHATML}"
    async with offload_stack(tmp_path, template=template) as up:
        fetching(up, CACHED)
        await answered(up, STREAM)
        assert [place.single_instance for place in up.router.places] == [True]
        assert (reported_steps(up), fetches_by_outcome(up)) == ([(0, "")], {"cached": 1})


@pytest.mark.parametrize(
    ("sent", "received", "hits", "outcome"),
    [(CACHED, CACHED, CACHED, "cached"), (64, CACHED, 64, "computed"), (0, CACHED, 0, "computed")],
    ids=["all", "some", "none"],
)
@pytest.mark.parametrize("body", [STREAM, LONG], ids=["stream", "whole"])
async def test_what_p_had_cached_is_a_hit_and_what_it_has_computed_is_none(
    up: Stack, body: dict[str, Any], sent: int, received: int, hits: int, outcome: str
) -> None:
    p, d = p_and_d(up)
    p.cached, d.cached = cached(sent), cached(received)
    async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
        text = await answer.text()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
    usages = [usage for event in events if (usage := json.loads(event).get("usage"))]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [hits]
    await up.router.until(lambda: not up.router.reserved)
    assert reported_steps(up) == [(0, "")]
    [finished] = up.router.finished
    assert (finished.cached_tokens, finished.own_cached_tokens) == (CACHED, CACHED - hits)
    assert fetches_by_outcome(up) == {outcome: 1}


async def test_engines_that_do_not_tell_what_they_had_cached_are_believed(up: Stack) -> None:
    p, d = p_and_d(up)
    p.cached = d.cached = cached(0)
    await answered(up, STREAM)
    assert (reported_steps(up), fetches_by_outcome(up)) == ([(0, "")], {"cached": 1})


async def test_a_prefix_that_does_not_arrive_is_computed(up: Stack) -> None:
    p, d = p_and_d(up)
    d.cached = cached(0)
    assert await answered(up, STREAM) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, "the prefix did not arrive")]
    # D has computed it at once, which is no hit if it is found afterwards.
    d.cached = lambda body: 0 if body["max_tokens"] == 1 else CACHED
    await answered(up, STREAM)
    assert up.router.finished[-1].own_cached_tokens == CACHED
    assert p.queries == 2, "P may have been started anew"
    assert fetches_by_outcome(up) == {"failed": 2}


FAULTS: list[tuple[tuple[str, ...], str, dict[str, str], str, bool, list[str]]] = [
    ((), "p", {"sends": "500"}, "status 500", False, ["i0"]),
    ((), "p", {"sends": "400"}, "status 400", False, []),
    ((), "p", {"sends": "reset"}, "no answer: closed", False, ["i0"]),
    ((), "p", {"sends": "early"}, "the prefill stopped early", False, []),
    (("transfer_timeout_s",), "p", {"sends": "hang"}, "deadline", False, []),
    ((), "p", {"engine_id": ""}, "the bootstrap server: status 503", False, []),
    ((), "d", {"fetches": "500"}, "status 500", False, []),
    ((), "d", {"fetches": "400"}, "status 400", False, []),
    ((), "d", {"fetches": "reset"}, "no answer: closed", True, []),
    (("transfer_timeout_s",), "d", {"fetches": "hang"}, "deadline", False, []),
]


@pytest.mark.parametrize("way", ["in turn", "at once"])
@pytest.mark.parametrize(
    ("up", "who", "fault", "error", "counts", "refused_by"),
    FAULTS,
    ids=[f"{who} {'short' * bool(short)}{next(iter(fault.values()))}" for short, who, fault, *_ in FAULTS],
    indirect=["up"],
)
async def test_when_either_fails_d_computes_and_answers(
    up: Stack, way: str, who: str, fault: dict[str, str], error: str, counts: bool, refused_by: list[str]
) -> None:
    fetching(up, CACHED, way=way)
    p, d = p_and_d(up)
    failing, other = (p, d) if who == "p" else (d, p)
    for name, value in fault.items():
        setattr(failing, name, value)
    if way == "at once" and "engine_id" not in fault:
        # The other one waits for it.
        setattr(other, "sends" if other is p else "fetches", "hang")
    assert await answered(up, STREAM) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, error)]
    assert [done.instance_failed for done in up.router.step_dones] == [counts]
    assert [name for begun in up.router.first_tokens for name in begun.refused_by] == refused_by
    assert len(d.requests) == 1
    assert "kv_transfer_params" not in d.requests[0][1]
    assert len(up.router.finished) == 1
    await eventually(lambda: p.open == d.open == 0)
    assert fetches_by_outcome(up) == {"given_up" if error == "deadline" else "failed": 1}


@pytest.mark.parametrize("gone", [0, 1], ids=["p", "d"])
@pytest.mark.parametrize("way", ["in turn", "at once"])
async def test_an_instance_that_is_gone(up: Stack, way: str, gone: int) -> None:
    up.router.pools[0].instances[gone].url = "http://127.0.0.1:1"
    fetching(up, CACHED, way=way)
    plan = up.router.placer
    up.router.placer = lambda request: up.router.first(request) if request.exclude else plan(request)
    if way == "at once":
        p_and_d(up)[1 - gone].sends = p_and_d(up)[1 - gone].fetches = "hang"
    assert (await answered(up, STREAM))[0] == f"i{1 - gone}"
    ((_, error),) = reported_steps(up)
    assert error.startswith("no answer: ")
    assert [done.instance_failed for done in up.router.step_dones] == [gone == 1]
    assert [list(place.exclude) for place in up.router.places] == ([[]] if gone == 0 else [[], ["i1"]])


async def test_a_request_that_breaks_p_and_then_d_is_sent_to_no_other(up: Stack) -> None:
    await breaks_both(up, STREAM)


@pytest.mark.parametrize("way", ["in turn", "nixl"])
async def test_kv_that_certainly_nobody_fetches_is_let_go(up: Stack, way: str) -> None:
    fetching(up, CACHED, way=way)
    p, d = p_and_d(up)
    d.fetches = "500"
    await answered(up, STREAM)
    kept = "t" if way == "nixl" else p.halves[0][2]["transfer_id"]
    releasing = d if way == "nixl" else p
    await eventually(lambda: [params["transfer_id"] for params in releasing.released] == [kept])


@pytest.mark.parametrize("way", ["in turn", "at once"])
@pytest.mark.parametrize("stuck", ["p", "d"])
async def test_a_client_that_leaves_ends_both(up: Stack, way: str, stuck: str) -> None:
    fetching(up, CACHED, way=way)
    p, d = p_and_d(up)
    waiting = [p, d] if way == "at once" else [p if stuck == "p" else d]
    for engine in waiting:
        engine.sends = engine.fetches = "hang"
    async with aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(http.post(f"{up.url}/v1/chat/completions", json=STREAM))
        await eventually(lambda: [engine.open for engine in waiting] == [1] * len(waiting))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert up.router.finished[0].outcome == placement_pb2.OUTCOME_CANCELLED
    await eventually(lambda: p.open == d.open == 0)
    assert fetches_by_outcome(up) == {"given_up": 1}


@pytest.mark.parametrize("changes", [{"prompt_logprobs": 1}, {"chat_template": "x"}])
async def test_what_has_no_known_tokens_is_not_fetched(up: Stack, changes: dict[str, Any]) -> None:
    await answered(up, LONG | changes)
    assert (reported_steps(up), fetches_by_outcome(up)) == ([(0, "tokens unknown")], {"failed": 1})
    assert (halves(up, 0), halves(up, 1)) == ([], [])


@pytest.mark.parametrize("way", WAYS)
async def test_twenty_fetch_from_one_at_once(up: Stack, way: str) -> None:
    p, d = p_and_d(up)

    async def ask(number: int) -> str:
        body = STREAM | {"messages": [{"role": "user", "content": f"{'set the points ' * 400} and then {number}"}]}
        async with http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
            return answer.headers["X-Pointsman-Instance"]

    fetching(up, CACHED, way=way)
    p.sends = "wait"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        asking = [asyncio.ensure_future(ask(number)) for number in range(20)]
        await up.router.until(lambda: len(up.router.places) == 20)
        await eventually(lambda: p.halves)
        # When the first has ended, D has the prefix.
        assert len(p.halves) == 1
        p.go.set()
        assert await asyncio.gather(*asking) == ["i1"] * 20
    await up.router.until(lambda: not up.router.reserved)
    assert fetches_by_outcome(up) == {"cached": 20}
    assert reported_steps(up) == [(0, "")] * 20
    if way != "nixl":
        sent, fetched = ({params["transfer_id"] for _, _, params in engine.halves} for engine in (p, d))
        assert len(sent) == 20
        assert sent == fetched


async def test_a_breakdown_names_the_source(up: Stack, tmp_path: Path) -> None:
    await answered(up, STREAM)
    file = tmp_path / "breakdown.jsonl"
    await eventually(lambda: len(file.read_text().splitlines()) == 1)
    line = json.loads(file.read_text())
    assert (line["instances"], line["fetched_from"]) == (["i1", "i1"], "i0")
    assert line["t_placed"] <= line["t_prefill_sent"] <= line["t_prefill_done"] <= line["t_sent"]
