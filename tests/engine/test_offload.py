"""Prefill on one real engine, answer from another, the KV in between over Mooncake and TCP; and every way in which that fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.engine.processes import until
from tests.engine.servers import SERVED_NAME, Engine, EngineSpec, start_engines, stop_engines
from tests.engine.stack import ControlPlane, client_of, counters
from tests.engine.talk import chat, complete, fresh_words, open_chat, user

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

EXTERNAL = {"source": "external_kv_transfer"}
# Two scores this close are the same but for the order of additions.
TIE = 1e-3
WITHIN_S = 60.0

# What the plane of these tests is started with: whatever is not cached is offloaded.
OFFLOAD_ALL = ("adaptive_offload", {"heavy_new_tokens": 1})

_salts = count()


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines that pass KV on to each other, in either direction."""
    specs = [EngineSpec(name, core=core, connector=True) for core, name in enumerate(("p", "d"))]
    engines = start_engines(specs, model_folder, tmp_path_factory.mktemp("pair"))
    yield engines
    stop_engines(engines)


@pytest.fixture(scope="module")
def offloading_plane(pair: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that offloads whatever is not cached. An instance outlives its agent's silence."""
    flags = {
        "--policy": OFFLOAD_ALL[0],
        "--policy-settings": json.dumps(OFFLOAD_ALL[1]),
        # While an agent is stopped here an engine starts, which takes longer than keys are believed without its word.
        "--stale-keys-s": "600",
        "--lost-instance-s": 300,
    }
    plane = ControlPlane(pair, tmp_path_factory.mktemp("offload"), router_flags=flags)
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture
def plane(offloading_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Idle and in step before and after each test; a traceback in a log fails the test."""
    plane = offloading_plane
    plane.wait_settled()
    plane.wait_idle()
    before = plane.tracebacks()
    yield plane
    plane.wait_settled()
    plane.wait_idle()
    assert plane.tracebacks() == before


@pytest.fixture
def client(plane: ControlPlane) -> Iterator[openai.OpenAI]:
    """The official client, pointed at the plane's first gateway."""
    with plane.client() as client:
        yield client


# ---- what must be true of every answer ----


def colocated(engine: Engine, prompt: str, tokens: int) -> str:
    """The greedy answer of one engine that computes all of it itself, past Pointsman and past its own cache."""
    with client_of(engine.url) as direct:
        return complete(direct, prompt, max_tokens=tokens, extra_body={"cache_salt": f"alone-{next(_salts)}"}).text


def assert_same(engine: Engine, prompt: str, seen: str, tokens: int) -> None:
    """`seen` is the colocated answer; where they part, the two best scores must be a tie."""
    expected = colocated(engine, prompt, tokens)
    if seen == expected:
        return
    words, others = expected.split(), seen.split()
    at = next(n for n, (one, other) in enumerate(zip(words, others, strict=True)) if one != other)
    asked = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": at + 1, "temperature": 0, "logprobs": 2}
    best = engine.ask("/v1/completions", asked | {"cache_salt": f"alone-{next(_salts)}"}).json()
    first, second = sorted(best["choices"][0]["logprobs"]["top_logprobs"][at].values(), reverse=True)[:2]
    assert first - second < TIE, f"token {at}: {others[at]!r} instead of {words[at]!r}, by {first - second}"


def external_tokens(engines: list[Engine]) -> float:
    return sum(engine.metric("vllm:prompt_tokens_by_source_total", **EXTERNAL) for engine in engines)


def wait_for_external(engines: list[Engine], expected: float) -> None:
    """Engines count a request a step after its answer."""
    until(lambda: external_tokens(engines) >= expected, within_s=WITHIN_S, what=f"{expected} tokens from elsewhere")
    assert external_tokens(engines) == expected


def decided(plane: ControlPlane, decision_id: str) -> fleet_pb2.Decision:
    decision = plane.finished_decision(decision_id)
    assert decision.outcome == "OK"
    assert decision.mode == "OFFLOAD"
    return decision


def with_cache_on(plane: ControlPlane, engine: Engine) -> str:
    """The beginning of a prompt, cached on `engine` alone: that one is D for what begins so."""
    beginning = fresh_words(96)
    with client_of(engine.url) as direct:
        complete(direct, beginning, max_tokens=1)
    plane.wait_settled()
    return beginning


# ---- transfers ----


@pytest.mark.parametrize("number", [1, 31, 32, 33, 500, 1_999, 3_500])
def test_an_offloaded_answer_is_the_colocated_one(
    plane: ControlPlane, client: openai.OpenAI, pair: list[Engine], number: int
) -> None:
    """As a stream, whose request brings the KV along, and in one piece, for which D pulls it before."""
    for stream in (True, False):
        prompt = fresh_words(number)
        before = external_tokens(pair)
        raw = client.completions.with_raw_response.create(
            model=SERVED_NAME, prompt=prompt, max_tokens=24, temperature=0, stream=stream
        )
        parsed: Any = raw.parse()
        text = "".join(one.choices[0].text for one in parsed if one.choices) if stream else parsed.choices[0].text
        decision = decided(plane, raw.headers["X-Pointsman-Decision"])
        p, d = (step.instance.instance_id for step in decision.steps)
        assert p != d == raw.headers["X-Pointsman-Instance"]
        assert list(decision.notes) == []
        if number > 1:  # of a prompt of one token vLLM counts nothing
            wait_for_external(pair, before + number)
        assert_same(pair[0], prompt, text, 24)


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
        answer = chat(client, [user(fresh_words(300))], max_tokens=8, **shape)
        assert list(decided(plane, answer.decision_id).notes) == [], shape
        wanted += answer.usage.prompt_tokens if answer.usage else 0
        wait_for_external(pair, wanted)
    with open_chat(client, [user(fresh_words(300))], max_tokens=8) as open_answer:
        assert len(open_answer.read_all().split()) == 8
    assert list(decided(plane, open_answer.decision_id).notes) == []


def test_what_d_has_cached_is_not_sent(plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]) -> None:
    d = pair[0]
    prompt = with_cache_on(plane, d) + fresh_words(200)
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


# ---- failures ----


@contextlib.contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """All of the engine's processes stand still inside the block."""
    os.killpg(engine.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(engine.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def unnoticed(plane: ControlPlane) -> Iterator[None]:
    """The agent tells nothing new inside the block: the router plans with what it knew."""
    os.killpg(plane.agent.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(plane.agent.pid, signal.SIGCONT)


def test_p_stands_still(plane: ControlPlane, pair: list[Engine]) -> None:
    p, d = pair
    with plane.another_gateway("short", prefill_timeout_s=2) as url, client_of(url) as client:
        prompt = with_cache_on(plane, d) + fresh_words(300)
        with stopped(p), unnoticed(plane):
            answer = complete(client, prompt, max_tokens=8)
        assert answer.instance_id == d.instance_id
        assert list(decided(plane, answer.decision_id).notes) == ["prefill_failed: deadline"]
        assert_same(d, prompt, answer.text, 8)


def test_d_stands_still(plane: ControlPlane, pair: list[Engine]) -> None:
    """Nobody can tell whether D or the transfer is stuck: D is asked once more without it, and then P."""
    p, d = pair
    flags = {"transfer_timeout_s": 2, "first_byte_timeout_s": 2, "answer_timeout_s": 4}
    with plane.another_gateway("short", **flags) as url, client_of(url) as client:
        prompt = with_cache_on(plane, d) + fresh_words(300)
        with stopped(d), unnoticed(plane):
            answer = complete(client, prompt, max_tokens=8)
        assert answer.instance_id == p.instance_id
        assert_same(p, prompt, answer.text, 8)


def test_p_dies_is_gone_and_comes_back_as_another(plane: ControlPlane, pair: list[Engine]) -> None:
    p, d = pair
    with (
        plane.another_gateway("one") as one,
        client_of(one) as client,
        plane.another_gateway("two", transfer_timeout_s=3) as two,
        client_of(two) as stale_client,
    ):
        for known in (client, stale_client):
            answer = complete(known, with_cache_on(plane, d) + fresh_words(300), max_tokens=8)
            assert list(decided(plane, answer.decision_id).notes) == []
        beginnings = [with_cache_on(plane, d) for _ in range(3)]

        def alone(asking: openai.OpenAI, words: int) -> str:
            """D answers the next request without P; why, as the decision has it."""
            prompt = beginnings.pop() + fresh_words(words)
            answer = complete(asking, prompt, max_tokens=8)
            assert answer.instance_id == d.instance_id
            assert_same(d, prompt, answer.text, 8)
            (note,) = decided(plane, answer.decision_id).notes
            return note

        with unnoticed(plane):
            # It stands still while the request is with it, so that it surely dies before the prefill is done.
            os.killpg(p.process.pid, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as threads:
                note = threads.submit(alone, client, 3_500)
                until(lambda: plane.instance(p).num_requests, within_s=WITHIN_S, what="a prefill to interrupt")
                p.process.kill()
                assert note.result(WITHIN_S).startswith("prefill_failed: ")
            refused = alone(client, 300)
            assert refused.startswith("prefill_failed: ")
            assert refused.endswith("ConnectionRefusedError")
            p.start()
            p.wait_ready()
            # It is back under another engine id, of which only the agent could tell.
            assert alone(stale_client, 300) == "serve_failed: deadline"
        plane.wait_settled()

        def offloaded() -> bool:
            before = external_tokens(pair)
            again = complete(stale_client, with_cache_on(plane, d) + fresh_words(300), max_tokens=8)
            return not decided(plane, again.decision_id).notes and external_tokens(pair) - before == 300

        until(offloaded, within_s=WITHIN_S, what="offloaded to the engine that came back")


# ---- elastic ----


@contextlib.contextmanager
def policy(plane: ControlPlane, name: str, **settings: float) -> Iterator[None]:
    """Another policy inside the block."""

    def put(name: str, settings: Mapping[str, float]) -> None:
        request = fleet_pb2.SetPolicyRequest(policy=fleet_pb2.Policy(name=name))
        request.policy.settings.update(settings)
        plane.fleet.SetPolicy(request, timeout=WITHIN_S, metadata=plane.metadata)

    put(name, settings)
    try:
        yield
    finally:
        put(*OFFLOAD_ALL)


@contextlib.contextmanager
def decoding_on(plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]) -> Iterator[None]:
    """A long answer is under way on each engine inside the block. Nobody reads it, so it stays open."""
    with contextlib.ExitStack() as streams:
        for engine in engines:
            raw = client.completions.with_raw_response.create(
                model=SERVED_NAME, prompt=with_cache_on(plane, engine), max_tokens=3_500, temperature=0, stream=True
            )
            stream: Any = streams.enter_context(raw.parse())
            next(iter(stream))
            assert raw.headers["X-Pointsman-Instance"] == engine.instance_id
        yield


def heavy_load(plane: ControlPlane, client: openai.OpenAI, clients: int, requests: int) -> list[fleet_pb2.Decision]:
    """What was decided on `requests` prompts of 700 new tokens each from each of `clients` at once."""
    prompts = [[fresh_words(700) for _ in range(requests)] for _ in range(clients)]

    def one(own: list[str]) -> list[str]:
        return [complete(client, prompt, max_tokens=4).decision_id for prompt in own]

    with ThreadPoolExecutor(clients) as threads:
        made = [decision_id for ids in threads.map(one, prompts) for decision_id in ids]
    return [plane.finished_decision(decision_id) for decision_id in made]


def test_elastic_offloads_less_as_load_rises(plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]) -> None:
    """On a machine that stalls the long answers may end before the requests beside them have come: then it is tried again."""
    tries: list[list[float]] = []
    seen: set[str] = set()
    with policy(plane, "elastic", heavy_new_tokens=500):
        seen |= {decision.reason for decision in heavy_load(plane, client, 1, 1)}
        for _ in range(4):
            shares = []
            for clients, each in ((1, 3), (3, 4), (8, 2)):
                with decoding_on(plane, client, pair):
                    decisions = heavy_load(plane, client, clients, each)
                plane.wait_idle()
                assert {decision.outcome for decision in decisions} == {"OK"}
                seen |= {decision.reason for decision in decisions}
                shares.append(sum(decision.mode == "OFFLOAD" for decision in decisions) / len(decisions))
            tries.append(shares)
            if shares[0] > 0.5 > shares[2] and shares[0] > max(shares[1:]):
                break
        short = complete(client, fresh_words(20), max_tokens=1)
        seen.add(plane.finished_decision(short.decision_id).reason)
    print("share of HEAVY requests offloaded with 1, 3 and 8 clients:", tries)
    assert shares[0] > 0.5 > shares[2], tries
    assert shares[0] > max(shares[1:]), tries
    assert {"p_idle_d_busy", "p_overloaded", "d_idle", "below_threshold"} <= seen


# ---- the last test: D does not come back ----


def test_d_is_gone(offloading_plane: ControlPlane, pair: list[Engine]) -> None:
    plane, (p, d) = offloading_plane, pair
    plane.wait_idle()
    before = plane.tracebacks()
    prompt = with_cache_on(plane, d) + fresh_words(300)
    with plane.client() as client, unnoticed(plane):
        d.process.kill()
        answer = complete(client, prompt, max_tokens=8)
    assert answer.instance_id == p.instance_id
    assert_same(p, prompt, answer.text, 8)

    def idle() -> bool:
        known = plane.instances()
        return p.running() == 0 and not any(any(counters(known[one.instance_id]).values()) for one in pair)

    until(idle, within_s=WITHIN_S, what="counters at zero")
    assert plane.tracebacks() == before
