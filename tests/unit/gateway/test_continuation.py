"""Which answers can go on elsewhere, and what the other instance is asked."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.api.continuable import is_continuable
from pointsman_gateway.core.api.parse import parse
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.attempt_end_reports import finished
from pointsman_gateway.core.request.continuation import continued_placement, ids_of, with_answer_record
from pointsman_gateway.core.request.prepare import set_keys
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import Outcome, ReportFinished
from pointsman_gateway.core.streaming.id_comments import ids_in
from pointsman_gateway.core.streaming.parse_stream_end import Usage, usage_of

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a", "stream": True}

HARMLESS: list[dict[str, Any]] = [
    {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "repetition_penalty": 1.1,
    },
    {"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    {"response_format": {"type": "text"}, "seed": None, "thinking_token_budget": None, "structured_outputs": None},
    {"seed": 3, "temperature": 0},
]
HARMFUL: list[dict[str, Any]] = [
    {"n": 2},
    {"logprobs": True},
    {"prompt_logprobs": 1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"seed": 3},
    {"seed": 3, "temperature": 0.5},
    {"tool_choice": "required"},
    {"parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_json": {}},
    {"thinking_token_budget": 100},
    {"bad_words": ["x"]},
    {"include_reasoning": False},
    {"echo": True},
    {"vllm_xargs": {"x": 1}},
    {"a_field_of_a_later_vllm": 1},
]


@pytest.mark.parametrize("fields", HARMLESS)
@pytest.mark.parametrize(("endpoint", "body"), [(Endpoint.CHAT, CHAT), (Endpoint.COMPLETION, COMPLETION)])
def test_an_answer_that_follows_from_its_tokens_can_be_continued(
    endpoint: Endpoint, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert is_continuable(endpoint, body | fields)


@pytest.mark.parametrize("fields", HARMFUL)
@pytest.mark.parametrize(("endpoint", "body"), [(Endpoint.CHAT, CHAT), (Endpoint.COMPLETION, COMPLETION)])
def test_an_answer_that_depends_on_what_its_engine_had_in_mind_cannot(
    endpoint: Endpoint, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert not is_continuable(endpoint, body | fields)


def test_whole_answers_several_prompts_and_other_apis_are_not_continued() -> None:
    assert not is_continuable(Endpoint.CHAT, CHAT | {"stream": False})
    assert not is_continuable(Endpoint.EMBEDDINGS, {"model": "m", "input": "a", "stream": True})
    assert not is_continuable(Endpoint.COMPLETION, COMPLETION | {"prompt": ["a", "b"]})
    assert not is_continuable(Endpoint.COMPLETION, COMPLETION | {"prompt": [[1, 2]]})
    assert is_continuable(Endpoint.COMPLETION, COMPLETION | {"prompt": [1, 2]})


RESPONSES: dict[str, Any] = {"model": "m", "input": "a", "stream": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "b", "max_output_tokens": 9, "store": False, "reasoning": {"effort": "low"}, "temperature": 1},
        {"tools": [{"type": "function", "name": "f", "strict": False}, {"type": "custom", "name": "g"}]},
        {"tool_choice": "auto", "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"], "tools": []},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled", "background": False},
        {"previous_response_id": None, "metadata": {"a": "b"}, "prompt_cache_key": "c", "top_logprobs": 0},
    ],
)
def test_a_response_that_follows_from_its_tokens_can_be_continued(fields: dict[str, Any]) -> None:
    assert is_continuable(Endpoint.RESPONSES, RESPONSES | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp", "server_label": "a"}]},
        {"tools": [{"type": "function", "name": "f", "strict": True}]},
        {
            "tools": [
                {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}
            ]
        },
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        {"include": ["message.output_text.logprobs"]},
        {"truncation": "auto"},
        {"include_reasoning": False},
        {"seed": 3},
        {"a_field_of_a_later_vllm": 1},
    ],
)
def test_a_response_that_depends_on_what_its_engine_had_in_mind_cannot(fields: dict[str, Any]) -> None:
    assert not is_continuable(Endpoint.RESPONSES, RESPONSES | fields)


MESSAGES = CHAT | {"max_tokens": 100}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}], "stop_sequences": ["x"]},
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    ],
)
def test_a_message_that_follows_from_its_tokens_can_be_continued(fields: dict[str, Any]) -> None:
    assert is_continuable(Endpoint.MESSAGES, MESSAGES | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1_024}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"seed": 1},
        {"a_field_of_a_later_vllm": 1},
        {"stream": False},
    ],
)
def test_a_message_that_depends_on_what_its_engine_had_in_mind_cannot(fields: dict[str, Any]) -> None:
    assert not is_continuable(Endpoint.MESSAGES, MESSAGES | fields)


def test_a_client_cannot_ask_an_engine_itself() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"vllm_xargs": {"pointsman_answer": ":5", "x": 1}}).encode())
    assert json.loads(call.payload)["vllm_xargs"] == {"x": 1}
    assert call.stripped == ("vllm_xargs.pointsman_answer",)
    assert not call.continuable


def test_the_body_carries_the_recorded_answer() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT).encode())
    record = ids_in(b':5\n\ndata: {"a": ":7"}\n\n:6,7\n\ndata: {}\n\n')
    assert record == b":5:6,7"
    sent = json.loads(with_answer_record(call.payload, record))
    assert sent.pop("vllm_xargs") == {"pointsman_answer": ":5:6,7"}
    assert sent.items() >= CHAT.items()


def test_the_gateways_field_for_the_record_is_the_only_one_of_its_name() -> None:
    """Of two fields of one name engines take the last, which is the client's."""
    assert not parse(Endpoint.CHAT, json.dumps(CHAT | {"vllm_xargs": None}).encode()).continuable


@pytest.mark.parametrize("store", [True, None])
def test_the_rest_of_a_response_is_not_stored_whatever_its_client_wants(store: bool | None) -> None:
    body = {"model": "m", "input": "hi", "stream": True, "store": store}
    context: Any = object.__new__(RequestContext)
    context.call = parse(Endpoint.RESPONSES, json.dumps(body).encode())
    context.kept_payload, context.response_id = context.call.payload, "resp_1"
    assert context.call.continuable
    assert json.loads(context.payload_at("a")) == body | {"store": False, "request_id": "resp_1"}


@pytest.mark.parametrize("prompt_tokens", [32, 40, 7])
def test_the_rest_is_placed_by_the_tokens_of_the_prompt_and_the_answer(prompt_tokens: int) -> None:
    ids = list(range(100, 100 + prompt_tokens))
    answer = list(range(1, 30))
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"max_tokens": 100}).encode())
    placement = placement_pb2.PlacementRequest(
        request_id="r",
        model="m",
        input_tokens=len(ids),
        max_output_tokens=100,
        sliceable_tokens=len(ids),
        parkable=True,
    )
    set_keys(placement, array("Q", prompt_keys(ids, "m")))
    context: Any = object.__new__(RequestContext)
    context.call, context.placement, context.ids, context.exact_tokens = call, placement, array("I", ids), len(ids)
    context.kept_payload, context.rest, context.answered_by = b"", None, UNKNOWN_IDENTITY
    context.drop_prompt(keep=True)
    assert json.loads(context.payload_at("a")).items() >= (CHAT | {"max_tokens": 100}).items()
    record = b"".join(b":%d" % token_id for token_id in answer)
    request = continued_placement(context, ids_of(record))
    assert request.input_tokens == len(ids) + len(answer)
    assert request.max_output_tokens == 100 - len(answer)
    whole = prompt_keys(ids + answer, "m")
    assert list(request.keys) == (whole if prompt_tokens >= 16 else [])
    assert request.resumed
    assert request.single_instance
    assert request.continues_session
    assert not request.sliceable_tokens
    assert list(placement.keys) == prompt_keys(ids, "m"), "the first placement is unchanged"


def test_the_router_is_told_of_the_rest_and_the_client_of_the_whole() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT).encode())
    context: Any = SimpleNamespace(call=call, received_at=100.0)
    attempt = Attempt(asked_at=160.0, sent_at=160.5, first_byte_at=161.0, usage=Usage(50, 40, 30), continues=20)
    report = finished(attempt, ReportFinished("r.1", Outcome.OK), context, 200, 163.0)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (70, 40, 10)
    assert (report.timings.first_token_ms, report.timings.done_ms) == (1_000, 3_000)
    first = finished(replace(attempt, continues=0), ReportFinished("r", Outcome.OK), context, 200, 163.0)
    assert (first.prompt_tokens, first.output_tokens, first.timings.done_ms) == (50, 30, 63_000)


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**32 - 1, 2**64, -1])
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_an_end_is_reported_whatever_an_engine_has_counted(endpoint: Endpoint, count: int) -> None:
    """A number that the message has no room for would raise an error, and the router would count the request for ever."""
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens")
    usage = usage_of(json.dumps({"usage": dict.fromkeys(names, count)}).encode(), endpoint)
    context: Any = SimpleNamespace(call=parse(Endpoint.CHAT, json.dumps(CHAT).encode()), received_at=100.0)
    attempt = Attempt(asked_at=160.0, usage=usage, continues=20)
    report = finished(attempt, ReportFinished("r.1", Outcome.OK), context, 200, 163.0)
    assert report.prompt_tokens in (0, 2**31 + 19)


def test_a_record_may_have_numbers_that_are_no_ids() -> None:
    """A server before an engine may send comments of its own, such as the time."""
    assert list(ids_of(b":5,6:7")) == [5, 6, 7]
    for number in (b"1700000000000", b"9" * 5_000):
        assert ids_of(b":5:" + ids_in(b":" + number + b"\n"))[0] == 5
