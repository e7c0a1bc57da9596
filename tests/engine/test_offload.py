"""Prefill on one real engine, answer from another, the KV in between over Mooncake and TCP; and every way in which that fails.

Two control planes are before the same two engines: one sends the requests in turn, the other sends both at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.announcement_proxy import announcing
from tests.support.engines.chat_client import chat, complete, fresh_words, open_chat, user
from tests.support.engines.fetching import PREFIX, assert_fetched, assert_right, fetching, forks, own_answer
from tests.support.engines.offloading import (
    WITHIN_S,
    assert_offloaded,
    assert_same,
    assert_tie,
    decided,
    external_tokens,
    in_step,
    offloading,
    policy,
    stopped,
    unnoticed,
    wait_for_external,
    wait_for_free_kv,
    with_cache_on,
)
from tests.support.engines.servers import KV_EXPIRES_S, MOONCAKE, SERVED_NAME, Engine, EngineSpec, running_engines
from tests.support.http_request import ask
from tests.support.instances import counters
from tests.support.processes.control_plane import ControlPlane, client_of
from tests.support.waiting import eventually, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines that pass KV on to each other, in either direction."""
    specs = [EngineSpec(name, kv_transfer=MOONCAKE) for name in ("p", "d")]
    with running_engines(specs, model_folder, tmp_path_factory.mktemp("pair")) as engines:
        yield engines


@pytest.fixture(scope="module")
def planes(pair: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ControlPlane]]:
    """Two control planes that offload, by how they send the two requests of a transfer. They are sent at once if engines announce
    that they push layer by layer. These engines do not, so a proxy announces it for them."""
    with contextlib.ExitStack() as running:
        targets = {engine.instance_id: running.enter_context(announcing(engine)) for engine in pair}
        planes = {
            "in turn": offloading(pair, tmp_path_factory.mktemp("in-turn")),
            "at once": offloading(
                pair, tmp_path_factory.mktemp("at-once"), target_of=lambda engine: targets[engine.instance_id]
            ),
        }
        for plane in planes.values():
            running.enter_context(plane.running())
        yield planes


@pytest.fixture(params=["in turn", "at once"])
def plane(planes: dict[str, ControlPlane], request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """Each of the two control planes, one after the other."""
    with in_step(planes[request.param]) as plane:
        yield plane


@pytest.fixture
def rotated(planes: dict[str, ControlPlane]) -> Iterator[ControlPlane]:
    """The control plane that sends D's request when P has answered."""
    with in_step(planes["in turn"]) as plane:
        yield plane


@pytest.fixture
def client(plane: ControlPlane) -> Iterator[openai.OpenAI]:
    """The official client, pointed at the plane's first gateway."""
    with plane.client() as client:
        yield client


# ---- transfers ----


@pytest.mark.parametrize("number", [1, 32, 33, 500, 3_500])
def test_an_offloaded_answer_is_the_colocated_one(
    plane: ControlPlane, client: openai.OpenAI, pair: list[Engine], number: int
) -> None:
    for stream in (True, False):
        assert_offloaded(plane, client, pair, number, stream=stream)


def test_chats_tools_and_formats_are_offloaded_too(
    plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]
) -> None:
    tools = [{"type": "function", "function": {"name": "set_points", "parameters": {"type": "object"}}}]
    wanted = external_tokens(pair)
    shapes: list[dict[str, Any]] = [
        {},
        {"tools": tools, "tool_choice": "none"},
        {"stop": ["never said"], "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0},
        {"response_format": {"type": "json_object"}},
    ]
    for shape in shapes:
        # The salt keeps the templates' own words from being cached already.
        salt = {"cache_salt": fresh_words(2)}
        answer = chat(client, [user(fresh_words(300))], max_tokens=8, extra_body=salt, **shape)
        assert list(decided(plane, answer.decision_id).notes) == [], shape
        wanted += answer.usage.prompt_tokens if answer.usage else 0
        wait_for_external(pair, wanted)
    with open_chat(client, [user(fresh_words(300))], max_tokens=8) as open_answer:
        assert len(open_answer.read_all().split()) == 8
    assert list(decided(plane, open_answer.decision_id).notes) == []


def test_what_d_has_cached_is_not_sent(plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]) -> None:
    d = pair[0]
    prompt = with_cache_on(d, plane) + fresh_words(200)
    before = external_tokens([d])
    answer = complete(client, prompt, max_tokens=8)
    assert answer.instance_id == d.instance_id
    decided(plane, answer.decision_id)
    wait_for_external([d], before + 200)
    assert_same(pair[1], prompt, answer.text, 8)


def test_six_transfers_at_once_in_both_directions(
    plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]
) -> None:
    prompts = [fresh_words(700 + 50 * n) for n in range(6)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = list(threads.map(lambda prompt: complete(client, prompt, max_tokens=12).text, prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        assert_same(pair[0], prompt, text, 12)


# ---- fetches ----


@pytest.mark.parametrize("layerwise", [False, True], ids=["in turn", "at once"])
async def test_a_prefix_is_fetched_from_its_owner_that_has_it_cached_or_has_evicted_it(
    pair: list[Engine], layerwise: bool
) -> None:
    p, d = pair
    before = external_tokens([d])
    async with fetching(p, d, layerwise=layerwise) as fetch:
        await assert_fetched(fetch)
        await assert_fetched(fetch, hits=0)
    # The one token that the source computes is transferred, too.
    wait_for_external([d], before + 2 * (PREFIX + 1))


async def test_twenty_forks_of_a_prompt_are_fetched_at_once(pair: list[Engine]) -> None:
    p, d = pair
    prompts = forks(20)
    own_answer(p, prompts[0])
    before = external_tokens([d])
    async with fetching(p, d) as fetch:
        answers = await fetch.answers(*prompts)
        assert fetch.done() == ([""] * 20, {"cached": 20})
    assert [cached for _, cached in answers] == [PREFIX] * 20
    # The prefix is transferred once.
    wait_for_external([d], before + PREFIX + 20)
    for prompt, (text, _) in zip(prompts, answers, strict=True):
        assert_right(p, prompt, text)


async def test_an_owner_that_stands_still_is_not_waited_for(pair: list[Engine]) -> None:
    p, d = pair
    (prompt,) = forks(1)
    expected = own_answer(p, prompt)
    async with fetching(p, d, transfer_timeout_s=1.0) as fetch:
        with stopped(p):
            ((text, cached),) = await fetch.answers(prompt)
        assert fetch.done() == (["deadline"], {"given_up": 1})
    assert cached == 0
    if text != expected:
        assert_tie(p, prompt, expected, text)


# ---- elastic ----


def reason_of(plane: ControlPlane, prompt: str) -> str:
    """The reason why `elastic` would offload a prompt now, or would not."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 4}
    answer = ask(f"{plane.gateway_url}/v1/completions", body, headers={"X-Pointsman-Dry-Run": "1"})
    assert answer.status == 200, answer.text
    return str(answer.json()["decision"]["reason"])


@contextlib.contextmanager
def answering(client: openai.OpenAI, engine: Engine, prompt: str) -> Iterator[None]:
    """An open answer of the engine that does not end inside the block, because the engine's core is paused."""
    raw = client.completions.with_raw_response.create(
        model=SERVED_NAME, prompt=prompt, max_tokens=3_000, temperature=0, stream=True
    )
    stream: Any
    with raw.parse() as stream:
        next(iter(stream))
        assert raw.headers["X-Pointsman-Instance"] == engine.instance_id
        with engine.paused():
            yield


def test_elastic_tells_why_it_offloads_and_why_not(rotated: ControlPlane, pair: list[Engine]) -> None:
    plane, (p, d) = rotated, pair
    on_p, on_d = with_cache_on(p, plane), with_cache_on(d, plane)
    heavy = on_d + fresh_words(700)
    with plane.client() as client, policy(plane, "elastic", heavy_new_tokens=500):
        assert reason_of(plane, on_d + fresh_words(20)) == "below_threshold"
        assert reason_of(plane, heavy) == "decode_idle"
        with answering(client, d, on_d):
            # A decode runs on D, and P is idle.
            until(
                lambda: reason_of(plane, heavy) == "prefill_idle_decode_busy",
                within_s=WITHIN_S,
                what="a reason to offload",
            )
            with answering(client, p, on_p + fresh_words(400)):
                until(
                    lambda: reason_of(plane, heavy) == "prefill_overloaded", within_s=WITHIN_S, what="a reason not to"
                )


# ---- failures ----


def test_p_stands_still(plane: ControlPlane, pair: list[Engine]) -> None:
    p, d = pair
    with plane.another_gateway("short", prefill_timeout_s=5) as url, client_of(url) as client:

        def offloaded() -> bool:
            answer = complete(client, with_cache_on(d, plane) + fresh_words(40), max_tokens=1)
            decision = plane.finished_decision(answer.decision_id)
            return decision.mode == fleet_pb2.PLACEMENT_MODE_OFFLOAD and not decision.notes

        # From here on the gateway knows P's engine id, so it sends D's request whatever P does.
        until(offloaded, within_s=WITHIN_S, what="an offload")
        prompt = with_cache_on(d, plane) + fresh_words(300)
        with stopped(p), unnoticed(plane):
            answer = complete(client, prompt, max_tokens=8)
        assert answer.instance_id == d.instance_id
        assert list(decided(plane, answer.decision_id).notes) == ["prefill_failed: deadline"]
        assert_same(d, prompt, answer.text, 8)


def test_d_stands_still(rotated: ControlPlane, pair: list[Engine]) -> None:
    """Whether D or the transfer is stuck cannot be known: D is asked once more without the transfer, and then P."""
    plane, (p, d) = rotated, pair
    flags = {"transfer_timeout_s": 1, "first_byte_timeout_s": 1, "response_timeout_s": 10}
    with plane.another_gateway("short", **flags) as url, client_of(url) as client:
        prompt = with_cache_on(d, plane) + fresh_words(300)
        with stopped(d), unnoticed(plane):
            answer = complete(client, prompt, max_tokens=8)
        assert answer.instance_id == p.instance_id
        assert_same(p, prompt, answer.text, 8)


def test_p_dies_is_gone_and_comes_back_as_another(planes: dict[str, ControlPlane], pair: list[Engine]) -> None:
    p, d = pair
    rotated, at_once = planes["in turn"], planes["at once"]
    with (
        contextlib.ExitStack() as held,
        rotated.client() as client,
        at_once.client() as eager_client,
    ):
        for plane in planes.values():
            held.enter_context(in_step(plane))
        clients = [(client, rotated), (eager_client, at_once)]
        for known, plane in clients:
            answer = complete(known, with_cache_on(d, plane) + fresh_words(300), max_tokens=8)
            assert list(decided(plane, answer.decision_id).notes) == []
        beginnings = [with_cache_on(d, rotated, at_once) for _ in range(4)]

        def alone(asking: openai.OpenAI, plane: ControlPlane, words: int) -> str:
            """Let D answer the next request without P; return the reason that the decision notes."""
            prompt = beginnings.pop() + fresh_words(words)
            answer = complete(asking, prompt, max_tokens=8)
            assert answer.instance_id == d.instance_id
            assert_same(d, prompt, answer.text, 8)
            (note,) = decided(plane, answer.decision_id).notes
            return note

        def has_requests(plane: ControlPlane) -> bool:
            return plane.instance(p).num_requests > 0

        with unnoticed(rotated, at_once):
            # P is paused while it has the requests, so that it dies before a prefill is done.
            os.killpg(p.process.pid, signal.SIGSTOP)
            with ThreadPoolExecutor(2) as threads:
                notes = [threads.submit(alone, client, plane, 3_500) for client, plane in clients]
                for plane in planes.values():
                    until(partial(has_requests, plane), within_s=WITHIN_S, what="a prefill to interrupt")
                # With both requests sent at once, D waits for KV that does not come.
                until(d.running, within_s=WITHIN_S, what="an instance that waits")
                p.process.kill()
                for note in notes:
                    assert note.result(WITHIN_S).startswith("prefill_failed: ")
            for api_client, plane in clients:
                refused = alone(api_client, plane, 300)
                assert refused.startswith("prefill_failed: ")
                assert refused.endswith("ConnectionRefusedError")
        # P returns with another engine id: what gateways remember of its bootstrap server ends with its incarnation.
        p.start()
        p.wait_ready()
        for plane in planes.values():
            plane.wait_settled()

        def offloaded() -> bool:
            before = external_tokens(pair)
            again = complete(client, with_cache_on(d, rotated) + fresh_words(300), max_tokens=8)
            return not decided(rotated, again.decision_id).notes and external_tokens(pair) - before == 300

        until(offloaded, within_s=WITHIN_S, what="offloaded to the engine that came back")


# ---- the last tests: D does not come back by itself ----


def test_d_is_gone(planes: dict[str, ControlPlane], pair: list[Engine]) -> None:
    plane, (p, d) = planes["in turn"], pair
    plane.wait_idle()
    before = plane.tracebacks()
    # Wait until transfers that earlier failures left open have expired.
    wait_for_free_kv(p, 2 * KV_EXPIRES_S)
    prompt = with_cache_on(d, plane) + fresh_words(300)
    with plane.client() as client, unnoticed(plane):
        d.process.kill()
        # Then the gateway has closed its connections to D. On one that it keeps, D may have got the request before it died.
        for _ in range(2):
            ask(f"{plane.gateway_url}/health")
        answer = complete(client, prompt, max_tokens=8)
    assert answer.instance_id == p.instance_id
    assert_same(p, prompt, answer.text, 8)
    # KV that P kept for D is released before it expires.
    wait_for_free_kv(p, 0.75 * KV_EXPIRES_S)

    def idle() -> bool:
        known = plane.instances()
        return p.running() == 0 and not any(any(counters(known[engine.instance_id]).values()) for engine in pair)

    until(idle, within_s=WITHIN_S, what="counters at zero")
    assert plane.tracebacks() == before


async def test_the_owner_of_a_fetched_prefix_dies_in_the_middle_and_is_gone(pair: list[Engine]) -> None:
    d, p = pair
    p.start()
    p.wait_ready()
    first, second = forks(2)
    for prompt in (first, second):
        own_answer(p, prompt)
    async with fetching(p, d) as fetch:
        await assert_fetched(fetch)
        os.killpg(p.process.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(fetch.answers(first))
        await eventually(lambda: len(fetch.up.router.places) == 2)
        p.process.kill()
        answers = [*await asking, *await fetch.answers(second)]
        (_, broken, gone), outcomes = fetch.done()
    assert broken.startswith("no answer")
    assert gone.endswith("ConnectionRefusedError")
    assert outcomes == {"cached": 1, "failed": 2}
    for prompt, (text, _) in zip((first, second), answers, strict=True):
        assert_right(d, prompt, text)
    assert not any(done.instance_failed for done in fetch.up.router.step_dones)
