"""Slices of a prompt before its answer, over real sockets: what they carry, when there are none, and what ends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiCall
from pointsman_gateway.core.tokens.model_tokenizer import Prompt
from tests.support.fakes.gateway_peers import FakeEngine, Stack, stack
from tests.support.fakes.offloading_peers import reported_steps, slicing
from tests.support.gateway_requests import LONG
from tests.support.waiting import eventually


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    """A gateway before two engines; the router slices prompts as a test sets it."""
    async with stack(tmp_path, client_cache_salt=True) as running:
        yield running
        assert [engine.open for engine in running.engines] == [0, 0]
        await eventually(lambda: not running.router.reserved, "no reservation is left")


async def ask(up: Stack, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
    headers = {"X-Session-ID": "s1"}
    async with aiohttp.ClientSession() as http, http.post(up.url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    await up.router.until(lambda: not up.router.reserved)


def sent(up: Stack) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    engine = up.engines[0]
    assert isinstance(engine, FakeEngine)
    return engine.requests


async def test_slices_carry_model_salt_and_session_and_the_prompts_own_tokens(up: Stack) -> None:
    slicing(up, 128, 256)
    await ask(up, LONG | {"model": "tiny-lora", "cache_salt": "pepper"})
    *slices, (path, served, _) = sent(up)
    ids = up.engines[0].tokenizer.chat(LONG)
    assert [body["prompt"] for _, body, _ in slices] == [ids[:128], ids[:256]]
    for where, body, headers in slices:
        assert where == "/v1/completions"
        assert (body["model"], body["cache_salt"], body["max_tokens"]) == ("tiny-lora", "pepper", 1)
        assert headers["X-Session-ID"] == "s1"
    assert (path, served["messages"], served["cache_salt"]) == ("/v1/chat/completions", LONG["messages"], "pepper")
    assert reported_steps(up) == [(0, ""), (1, "")]
    assert up.router.places[0].sliceable_tokens == len(ids)


def cached_in(answer: Any) -> int | None:
    """The cached tokens of an answer's usage, of whichever API."""
    usage = (answer.get("response") or answer.get("message") or answer).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("cache_read_input_tokens", details.get("cached_tokens"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("warm", [0, 64])
async def test_a_prompts_own_slices_are_no_cache_hits(up: Stack, path: str, warm: int, stream: bool) -> None:
    """The engine has `warm` tokens of the prompt before the request, and after two slices 256."""
    slicing(up, 128, 256)
    engine = up.engines[0]
    assert isinstance(engine, FakeEngine)
    before = {128: warm, 256: 128}  # by the end of a slice
    engine.cached = lambda body: before[len(body["prompt"])] if body.get("max_tokens") == 1 else 256
    body: dict[str, Any] = LONG | {"stream": stream}
    if path == "/v1/chat/completions" and stream:
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/responses":
        body = {"model": LONG["model"], "input": "set the points " * 400, "stream": stream}
    if path == "/v1/messages":
        body["max_tokens"] = 20
    async with aiohttp.ClientSession() as http, http.post(up.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    await up.router.until(lambda: not up.router.reserved)
    assert reported_steps(up) == [(0, ""), (1, "")]
    answers = (
        [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if stream
        else [json.loads(text)]
    )
    counted = [cached for cached in map(cached_in, answers) if cached is not None]
    assert counted
    assert set(counted) == {warm}
    [finished] = up.router.finished
    assert (finished.cached_tokens, finished.own_cached_tokens) == (256, 256 - warm)
    async with aiohttp.ClientSession() as http, http.get(f"{up.url}/metrics") as page:
        [line] = [line for line in (await page.text()).splitlines() if "cached_tokens_total{" in line]
    assert float(line.rpartition(" ")[2]) == warm


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/chat/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {"messages": None, "prompt": ["set the points " * 100] * 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a " * 300}, IMAGE]}]},
        ),
    ],
    ids=["prompt_logprobs", "several", "media that the template does not show"],
)
async def test_what_cannot_be_sliced_is_not(up: Stack, path: str, changes: dict[str, Any]) -> None:
    """The router is told that the prompt is not sliceable; if it slices nevertheless, it is refused at once."""
    slicing(up, 128, 256)
    await ask(up, {name: value for name, value in (LONG | changes).items() if value is not None}, path)
    assert up.router.places[0].sliceable_tokens == 0
    assert reported_steps(up) == [(0, "tokens unknown")]
    assert [where for where, _, _ in sent(up)] == [path]


async def test_after_counts_that_differ_nothing_is_sliced(up: Stack) -> None:
    """Three times in a row, the engine counts one token fewer than the gateway."""
    slicing(up, 128)
    tokenizer: Any = up.engines[0].tokenizer
    real = tokenizer.prompt

    def one_less(call: ApiCall) -> Prompt:
        prompt = real(call)
        return Prompt(prompt.ids[1:], (prompt.lengths[0] - 1,))

    tokenizer.prompt = one_less
    for _ in range(4):
        await ask(up, LONG, "/v1/messages")
    assert [place.sliceable_tokens > 0 for place in up.router.places] == [True, True, True, False]
    assert reported_steps(up)[-1] == (0, "tokens unknown")


async def test_a_slice_that_is_not_there_any_more_ends_slicing(up: Stack) -> None:
    """The engine reports 16 cached tokens, of the 512 that an earlier slice computed."""
    slicing(up, 512, 768, 1_024)
    await ask(up, LONG)
    assert reported_steps(up) == [(0, ""), (1, "an earlier slice is not cached any more")]
    # Whatever the router answers then, the gateway sends the whole request.
    assert [where for where, _, _ in sent(up)] == ["/v1/completions"] * 2 + ["/v1/chat/completions"]


async def test_a_page_is_no_slice(up: Stack) -> None:
    up.engines[0].mode = "page"
    slicing(up, 128, 256)
    async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=LONG) as answer:
        assert answer.status == 502  # the router of the test knows no other instance
    assert reported_steps(up)[0] == (0, "an answer that is no JSON")
    assert all(done.instance_failed for done in up.router.step_dones)


async def test_a_router_that_does_not_know_the_plan_is_asked_for_another_one(up: Stack) -> None:
    """A new owner of the pool answers so. Computed slices stay on their instance, and the request is placed anew."""
    slicing(up, 128, 256)
    planned = up.router.placer

    def known_from_the_second_time_on(
        request: placement_pb2.PlacementRequest,
    ) -> placement_pb2.Placement | placement_pb2.Refusal | None:
        given = planned(request)
        if len(up.router.places) == 1:
            up.router.plans[request.request_id] = [
                placement_pb2.Refusal(code=14, message="another's plan", not_serving=True)
            ]
        return given

    up.router.placer = known_from_the_second_time_on
    await ask(up, LONG)
    ids = up.engines[0].tokenizer.chat(LONG)
    *slices, (path, _, _) = sent(up)
    assert [body["prompt"] for _, body, _ in slices] == [ids[:128], ids[:128], ids[:256]]
    assert path == "/v1/chat/completions"
    first, second = up.router.places
    assert (second.request_id, list(second.keys)) == (f"{first.request_id}.1", list(first.keys))
    assert [(finish.request_id, finish.outcome) for finish in up.router.finished] == [
        (first.request_id, placement_pb2.OUTCOME_CANCELLED),
        (second.request_id, placement_pb2.OUTCOME_OK),
    ]
