"""What offloads between real engines are held to: answers, counters, decisions; and ways to make engines fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import openai

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import complete, fresh_words
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane, client_of
from tests.support.waiting import until

EXTERNAL = {"source": "external_kv_transfer"}
# Two scores this close are the same but for the order of additions.
TIE = 1e-3
WITHIN_S = 60.0

# What is not cached is offloaded.
OFFLOAD_ALL = ("adaptive_offload", {"heavy_new_tokens": 1})

_salts = count()


def offloading(engines: Sequence[Engine], folder: Path, **more: Any) -> ControlPlane:
    """A control plane that offloads whatever is not cached. An instance outlives its agent's silence."""
    flags = {
        "--policy": OFFLOAD_ALL[0],
        "--policy-settings": json.dumps(OFFLOAD_ALL[1]),
        # While an agent is stopped an engine may start: minutes, on a busy machine.
        "--stale-keys-s": 900,
        "--lost-instance-s": 900,
    }
    return ControlPlane(engines, folder, router_flags=flags, **more)


@contextlib.contextmanager
def in_step(plane: ControlPlane) -> Iterator[ControlPlane]:
    """In step with its engines before and after the block."""
    with plane.in_step():
        yield plane
        plane.wait_settled()


# ---- what must be true of every answer ----


def colocated(engine: Engine, prompt: str, tokens: int) -> str:
    """The greedy answer of one engine that computes all of it itself, past Pointsman and past its own cache."""
    with client_of(engine.url) as direct:
        return complete(direct, prompt, max_tokens=tokens, extra_body={"cache_salt": f"alone-{next(_salts)}"}).text


def assert_same(engine: Engine, prompt: str, seen: str, tokens: int) -> None:
    """`seen` is the colocated answer; where they part, the two best scores must be a tie."""
    expected = colocated(engine, prompt, tokens)
    if seen != expected:
        assert_tie(engine, prompt, expected, seen)


def assert_tie(engine: Engine, prompt: str, expected: str, seen: str) -> None:
    """Two different greedy answers to `prompt` part at two tokens that have the same, best score."""
    words, others = expected.split(), seen.split()
    at = next(n for n, (word, other) in enumerate(zip(words, others, strict=True)) if word != other)
    asked = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": at + 1, "temperature": 0, "logprobs": 5}
    best = engine.ask("/v1/completions", asked | {"cache_salt": f"alone-{next(_salts)}"}).json()
    scores = {token.strip(): score for token, score in best["choices"][0]["logprobs"]["top_logprobs"][at].items()}
    parted = f"token {at}: {others[at]!r} instead of {words[at]!r}, of {scores}"
    assert others[at] in scores, parted
    assert max(scores.values()) - min(scores[words[at]], scores[others[at]]) < TIE, parted


def external_tokens(engines: Sequence[Engine]) -> float:
    """Prompt tokens that came from another engine, since the engines' start."""
    return sum(engine.metric("vllm:prompt_tokens_by_source_total", **EXTERNAL) for engine in engines)


def wait_for_external(engines: Sequence[Engine], expected: float) -> None:
    """Engines count a request a step after its answer."""
    until(lambda: external_tokens(engines) >= expected, within_s=WITHIN_S, what=f"{expected} tokens from elsewhere")
    assert external_tokens(engines) == expected


def decided(plane: ControlPlane, decision_id: str) -> fleet_pb2.Decision:
    """The decision on a request that ended well, and was to be offloaded."""
    decision = plane.finished_decision(decision_id)
    assert decision.outcome == fleet_pb2.DECISION_OUTCOME_OK
    assert decision.mode == fleet_pb2.PLACEMENT_MODE_OFFLOAD
    return decision


def assert_offloaded(
    plane: ControlPlane, client: openai.OpenAI, pair: Sequence[Engine], number: int, *, stream: bool
) -> None:
    """A prompt of `number` tokens is prefilled on one engine of the pair and answered by the other, as one alone would answer.
    As a stream, whose request brings the KV along, or in one piece, for which D pulls it before."""
    prompt = fresh_words(number)
    before = external_tokens(pair)
    raw = client.completions.with_raw_response.create(
        model=SERVED_NAME, prompt=prompt, max_tokens=24, temperature=0, stream=stream
    )
    parsed: Any = raw.parse()
    text = "".join(chunk.choices[0].text for chunk in parsed if chunk.choices) if stream else parsed.choices[0].text
    decision = decided(plane, raw.headers["X-Pointsman-Decision"])
    p, d = (step.instance.instance_id for step in decision.steps)
    assert p != d == raw.headers["X-Pointsman-Instance"]
    assert list(decision.notes) == []
    if number > 1:  # of a prompt of one token vLLM counts nothing
        wait_for_external(pair, before + number)
    assert_same(pair[0], prompt, text, 24)


def with_cache_on(engine: Engine, *planes: ControlPlane) -> str:
    """The beginning of a prompt, cached on `engine` alone: that one is D for what begins so. The planes know."""
    beginning = fresh_words(96)
    with client_of(engine.url) as direct:
        complete(direct, beginning, max_tokens=1)
    for plane in planes:
        plane.wait_settled()
    return beginning


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
def unnoticed(*planes: ControlPlane) -> Iterator[None]:
    """The agents tell nothing new inside the block: the routers plan with what they knew."""
    for plane in planes:
        os.killpg(plane.agent.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for plane in planes:
            os.killpg(plane.agent.pid, signal.SIGCONT)


def wait_for_free_kv(engine: Engine, within_s: float) -> None:
    """Nothing is left in the engine's KV cache that may not be evicted."""

    def free() -> bool:
        # Gauges move with steps.
        with client_of(engine.url) as direct:
            complete(direct, fresh_words(3), max_tokens=1)
        return engine.running() == 0 and engine.metric("vllm:kv_cache_usage_perc") == 0

    until(free, within_s=within_s, what="an idle KV cache")


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
