"""Answers through router and gateway are the engine's own, and a client that disconnects ends its work in the engine."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import Answer, chat, complete, fresh_words, open_chat, user
from tests.support.engines.servers import ADAPTER, SERVED_NAME, Engine
from tests.support.http_request import ask
from tests.support.instances import counters
from tests.support.processes.control_plane import ControlPlane, client_of
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_a_chat_answer_equals_the_engines_own(client: openai.OpenAI, engines: list[Engine]) -> None:
    messages = [{"role": "system", "content": "Dé l'été, 12 + 30 = 42.\n\tif x:"}, user(fresh_words(150))]
    through = chat(client, messages, max_tokens=60)
    assert through.usage is not None
    for engine in engines:
        with client_of(engine.url) as direct:
            own = chat(direct, messages, max_tokens=60)
        assert own.usage is not None
        assert (through.text, through.finish_reason) == (own.text, own.finish_reason)
        assert through.usage.prompt_tokens == own.usage.prompt_tokens
        assert through.usage.completion_tokens == own.usage.completion_tokens == 60
    assert len(set(through.text.split())) > 20, "the model repeats itself: equal answers would prove little"


@pytest.mark.parametrize("usage_asked_for", [False, True])
def test_a_streamed_answer_equals_the_engines_own(
    client: openai.OpenAI, engines: list[Engine], usage_asked_for: bool
) -> None:
    messages = [user(fresh_words(100))]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage_asked_for else {}
    with client_of(engines[0].url) as direct, open_chat(direct, messages, max_tokens=30, **options) as answer:
        own = _gist(list(answer.chunks))
    with open_chat(client, messages, max_tokens=30, **options) as answer:
        through = _gist(list(answer.chunks))
    assert through == own
    assert bool(through["usage"]) == usage_asked_for


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_completion_equals_the_engines_own(
    client: openai.OpenAI, engines: list[Engine], plane: ControlPlane, as_tokens: bool
) -> None:
    text = fresh_words(90)
    prompt = engines[0].tokenize({"prompt": text}) if as_tokens else text
    through = complete(client, prompt, max_tokens=40)
    with client_of(engines[1].url) as direct:
        own = complete(direct, prompt, max_tokens=40)
    assert (through.text, through.finish_reason) == (own.text, own.finish_reason)
    decision = plane.finished_decision(through.decision_id)
    assert (decision.input_tokens, decision.key_count, decision.outcome) == (90, 5, fleet_pb2.DECISION_OUTCOME_OK)


def test_the_model_list_names_the_pool(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [SERVED_NAME, ADAPTER]


def test_the_gateway_counts_tokens_as_the_engine_does(client: openai.OpenAI, plane: ControlPlane) -> None:
    """Tools and several roles go through the chat template; code, digits and other scripts through the tokenizer."""
    messages = [
        {"role": "system", "content": "def f(x):\n    return x ** 2  # naïve — 漢字 🚂\n"},
        user(fresh_words(20)),
        {"role": "assistant", "content": " 3.14159 it's, we'll\r\n\r\n"},
        user("plain"),
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    both: tuple[dict[str, Any], ...] = ({}, {"tools": [tool], "tool_choice": "none"})
    for more in both:
        answer = chat(client, messages, max_tokens=2, **more)
        assert answer.usage is not None
        decision = plane.finished_decision(answer.decision_id)
        assert decision.input_tokens == answer.usage.prompt_tokens
        assert decision.key_count == answer.usage.prompt_tokens // 16


def _ended(engines: list[Engine]) -> int:
    """Requests that the engines answered in full; aborted ones are not among them."""
    return int(sum(engine.metric("vllm:request_success_total") for engine in engines))


def unless_the_engine_was_faster(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of leaving clients again if an engine had finished before its client left: on a machine that stalls for
    seconds there may be nothing left to cancel. Any other failure counts."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        for _ in range(3):
            before = _ended(fixtures["engines"])
            try:
                return test(**fixtures)
            except AssertionError:
                fixtures["plane"].wait_idle()
                if _ended(fixtures["engines"]) == before:
                    raise
        raise AssertionError("three times the engine was through before its client left")

    return run


@unless_the_engine_was_faster
def test_a_client_that_leaves_a_stream_frees_the_engine_and_the_counters(
    client: openai.OpenAI, plane: ControlPlane, engines: list[Engine]
) -> None:
    before = _generated(engines)
    with open_chat(client, [user(fresh_words(200))], max_tokens=3_500) as answer:
        answer.read(5)
        engine = _engine_of(answer.instance_id, engines)
        assert engine.running() == 1
        # The gateway's report of the first token is sent independently of the answer.
        until(
            lambda: counters(plane.instance(engine))["ongoing_decode_tokens"] >= 208, within_s=60, what="decode counted"
        )
        assert counters(plane.instance(engine))["num_requests"] == 1
        assert counters(plane.instance(engine))["pending_prefill_tokens"] == 0
    plane.wait_idle()
    assert plane.finished_decision(answer.decision_id).outcome == fleet_pb2.DECISION_OUTCOME_CANCELLED
    assert _generated(engines) - before < 3_500, "the engine generated to the end"


@unless_the_engine_was_faster
def test_a_client_that_leaves_before_the_answer_frees_the_engine_and_the_counters(
    plane: ControlPlane, engines: list[Engine]
) -> None:
    before = _generated(engines)
    body = json.dumps({"model": SERVED_NAME, "messages": [user(fresh_words(200))], "max_tokens": 3_500})
    connection = http.client.HTTPConnection("127.0.0.1", plane.gateway_port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        until(lambda: sum(engine.running() for engine in engines) == 1, within_s=60, what="the request in an engine")
    plane.wait_idle()
    assert plane.finished_decision(plane.newest_decision().decision_id).outcome == fleet_pb2.DECISION_OUTCOME_CANCELLED
    assert _generated(engines) - before < 3_500


def test_many_leaving_clients_leave_nothing_behind(
    client: openai.OpenAI, plane: ControlPlane, engines: list[Engine]
) -> None:
    """Some leave at once, some after a few tokens, some stay to the end, all at the same time."""
    for _ in range(4):
        before = _ended(engines)
        with (
            open_chat(client, [user(fresh_words(40))], max_tokens=4_000) as first,
            open_chat(client, [user(fresh_words(40))], max_tokens=4_000) as second,
            open_chat(client, [user(fresh_words(40))], max_tokens=4) as third,
        ):
            second.read(3)
            assert len(third.read_all().split()) == 4
        outcomes = [plane.finished_decision(answer.decision_id).outcome for answer in (first, second, third)]
        ok, cancelled = fleet_pb2.DECISION_OUTCOME_OK, fleet_pb2.DECISION_OUTCOME_CANCELLED
        assert outcomes[2] == ok
        assert set(outcomes[:2]) <= {cancelled, ok}
        # On a machine that stalls, an engine may finish before its client leaves.
        assert outcomes.count(ok) <= _ended(engines) - before, "more whole answers than the engines gave"


def test_kv_transfer_params_of_a_client_never_reach_an_engine(client: openai.OpenAI, engines: list[Engine]) -> None:
    """An engine without a KV connector logs a warning if it receives them; one with a connector would die of a wrong set."""
    warning = "Got kv_transfer_params"
    params = {"do_remote_prefill": True, "transfer_id": "x"}
    with client_of(engines[0].url) as direct:
        chat(direct, [user("hi")], max_tokens=1, extra_body={"kv_transfer_params": params})
    until(
        lambda: warning in engines[0].process.log.read_text(), within_s=60, what="the warning that this test relies on"
    )
    warned = [engine.process.log.read_text().count(warning) for engine in engines]

    answers: list[Answer] = []
    for extra in (
        {"kv_transfer_params": params},
        {"ec_transfer_params": params},
        {"vllm_xargs": {"kv_transfer_params": "x", "kv_cache_report_mode": "full"}},
        {"priority": -5},
    ):
        for _ in engines:
            answers.append(chat(client, [user(fresh_words(40))], max_tokens=3, extra_body=extra))
            answers.append(complete(client, fresh_words(40), max_tokens=3, extra_body=extra))
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert {answer.instance_id for answer in answers} == {engine.instance_id for engine in engines}
    assert all(engine.healthy() for engine in engines)
    assert [engine.process.log.read_text().count(warning) for engine in engines] == warned


def test_two_sessions_at_once_spread(client: openai.OpenAI) -> None:
    with (
        open_chat(client, [user(fresh_words(300))], session="spread-1", max_tokens=3_000) as first,
        open_chat(client, [user(fresh_words(300))], session="spread-2", max_tokens=3_000) as second,
    ):
        first.read(1)
        second.read(1)
        assert first.instance_id != second.instance_id


def test_a_dry_run_names_the_place_and_sends_nothing(
    client: openai.OpenAI, plane: ControlPlane, engines: list[Engine]
) -> None:
    messages = [user(fresh_words(200))]
    served = chat(client, messages, session="dry", max_tokens=4)
    plane.wait_settled()
    newest, generated = plane.newest_decision().decision_id, _generated(engines)
    answer = ask(
        plane.gateway_url + "/v1/chat/completions",
        {"model": SERVED_NAME, "messages": messages},
        headers={"X-Pointsman-Dry-Run": "1", "X-Session-ID": "dry"},
    )
    assert answer.status == 200, answer.text
    decision = answer.json()["decision"]
    assert decision["steps"][0]["instance"]["instance_id"] == served.instance_id
    assert decision["cached_tokens"] == 192
    assert (plane.newest_decision().decision_id, _generated(engines)) == (newest, generated)


def _gist(chunks: list[ChatCompletionChunk]) -> dict[str, object]:
    """A streamed answer without what differs between two runs of one request: ids, cache counts, tokens per chunk, and the system
    fingerprint. vLLM writes the fingerprint into the usage chunk, which the gateway always requests and removes for clients that
    did not request it."""
    return {
        "first": chunks[0].model_dump(exclude={"id", "created"}),
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "finish": [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1],
        "without choices": sum(not chunk.choices for chunk in chunks),
        "usage": [chunk.usage.model_dump(exclude={"prompt_tokens_details"}) for chunk in chunks if chunk.usage],
        "fields": {frozenset(chunk.model_dump(exclude_unset=True, exclude={"system_fingerprint"})) for chunk in chunks},
    }


def _generated(engines: list[Engine]) -> float:
    return sum(engine.metric("vllm:generation_tokens_total") for engine in engines)


def _engine_of(instance_id: str, engines: list[Engine]) -> Engine:
    return next(engine for engine in engines if engine.instance_id == instance_id)
