"""The spans of a request, built from what its attempts leave."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions

from pointsman_common.core.tracing import Span, SpanContext, SpanKind, Value
from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.gen_ai_attributes import request_attributes
from pointsman_gateway.core.request.request_events import StepAssigned, Target
from pointsman_gateway.core.request.request_spans import attempt_spans, request_span
from pointsman_gateway.core.request_trace import RequestTrace
from pointsman_gateway.core.streaming.parse_stream_end import Usage

REQUEST = SpanContext(7, 8, True)
CHAT: dict[str, Value] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "vllm",
    "gen_ai.request.model": "m",
    "gen_ai.request.stream": True,
}
# Every name that the conventions have, in the version that is installed here.
CONVENTIONS = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
P, D = Target("p:1", "http://p:1"), Target("d:1", "http://d:1")
# Its clock began at 1,000 s. Its body had come at 1 s.
TRACE = RequestTrace(REQUEST, 5, lambda spans: None, 1.0, 1_000 * 10**9)
TRACE.asked = CHAT


def at(span: Span) -> tuple[float, float]:
    return round(span.start_ns / 1e9 - 1_000, 6), round(span.end_ns / 1e9 - 1_000, 6)


def moments(span: Span) -> dict[str, float]:
    return {moment.name: round(moment.at_ns / 1e9 - 1_000, 6) for moment in span.events}


def test_a_request_is_asked_about_and_served() -> None:
    attempt = Attempt(usage=Usage(100, 64, 20, "tool_calls"))
    attempt.begin_placement("r", 1.0)
    attempt.begin_step(StepAssigned("r", D, decision_id="d-1", cached_tokens=80), 2.0)
    attempt.sent_at, attempt.first_byte_at = 2.5, 3.0
    place, serve = attempt_spans(TRACE, attempt, "", 100, 9.0)
    assert (place.name, place.kind, place.context, place.parent_id) == (
        "place",
        SpanKind.CLIENT,
        TRACE.placement_context("r"),
        8,
    )
    assert (at(place), at(serve)) == ((1.0, 2.0), (2.0, 9.0))
    assert place.attributes == {
        "pointsman.request_id": "r",
        "pointsman.decision_id": "d-1",
        "pointsman.instance": "d:1",
        "pointsman.cached_tokens": 80,
        "pointsman.new_tokens": 20,
        "pointsman.degraded": False,
    }
    assert (serve.name, serve.context, serve.parent_id, serve.error) == ("chat m", TRACE.step_context("r", 0), 8, "")
    assert moments(serve) == {"sent": 2.5, "first token": 3.0}
    assert serve.attributes == CHAT | {
        "pointsman.request_id": "r",
        "pointsman.instance": "d:1",
        "pointsman.step": 0,
        "server.address": "d",
        "server.port": 1,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "gen_ai.response.time_to_first_chunk": 0.5,
    }
    assert {name for name in serve.attributes if name.startswith("gen_ai.")} <= CONVENTIONS


BODY = {"model": "m", "messages": [{"role": "user", "content": "secret"}], "stop": ["secret"]}


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (
            Endpoint.CHAT,
            BODY | {"stream": True, "max_tokens": 9, "temperature": 0.5, "top_p": 1, "top_k": -1, "seed": 7, "n": 2},
            {"operation.name": "chat", "request.stream": True, "request.max_tokens": 9, "request.temperature": 0.5}
            | {"request.top_p": 1, "request.top_k": -1, "request.seed": 7, "request.choice.count": 2},
        ),
        (Endpoint.MESSAGES, BODY | {"max_tokens": 5}, {"operation.name": "chat", "request.max_tokens": 5}),
        (Endpoint.RESPONSES, {"model": "m", "input": "secret"}, {"operation.name": "chat"}),
        (Endpoint.COMPLETION, {"model": "m", "prompt": "secret"}, {"operation.name": "text_completion"}),
        (Endpoint.EMBEDDINGS, {"model": "m", "input": "secret"}, {"operation.name": "embeddings"}),
        (Endpoint.RERANK, {"model": "m", "query": "secret", "documents": ["secret"]}, {"operation.name": "rerank"}),
    ],
)
def test_a_call_is_described_by_the_conventions_and_without_its_content(
    endpoint: Endpoint, body: dict[str, Any], expected: dict[str, Value]
) -> None:
    attributes = request_attributes(parse(endpoint, msgspec.json.encode(body)))
    common = {"provider.name": "vllm", "request.model": "m", "request.stream": False}
    assert attributes == {f"gen_ai.{name}": value for name, value in (common | expected).items()}
    assert set(attributes) <= CONVENTIONS


def test_a_number_that_no_span_can_hold_is_left_out() -> None:
    """The exporter would give up the whole batch for it."""
    call = parse(Endpoint.CHAT, msgspec.json.encode(BODY))
    call.body |= {"seed": 1 << 63, "n": True, "temperature": "hot", "top_k": {"a": 1}}
    assert request_attributes(call) == CHAT | {"gen_ai.request.stream": False}


def test_each_step_of_a_plan_has_its_span_and_a_pull_is_part_of_its_serve() -> None:
    attempt = Attempt()
    attempt.begin_placement("r", 1.0)
    attempt.begin_step(StepAssigned("r", P, 0, prefill_tokens=4_096), 2.0)
    attempt.end_step("", 3.0)
    attempt.begin_step(StepAssigned("r", P, 1, prefill_tokens=9_000, kv_target=D), 3.1)
    attempt.end_step("", 4.0)
    serve = StepAssigned("r", D, 2, kv_source=P)
    attempt.begin_step(serve, 4.1)
    attempt.begin_step(serve, 5.0)  # pulled, and now served
    attempt.sent_at = 5.0
    spans = attempt_spans(TRACE, attempt, "the stream ended early", 9_100, 6.0)
    assert [(span.name, at(span)) for span in spans[1:]] == [
        ("prefill", (2.0, 3.0)),
        ("prefill", (3.1, 4.0)),
        ("chat m", (4.1, 6.0)),
    ]
    assert [span.error for span in spans] == ["", "", "", "the stream ended early"]
    assert len({span.context for span in spans}) == 4
    assert (spans[2].attributes["pointsman.kv_target"], spans[3].attributes["pointsman.kv_source"]) == ("d:1", "p:1")


def test_a_fetch_is_a_prefill_that_names_its_source() -> None:
    attempt = Attempt()
    attempt.begin_placement("r", 1.0)
    attempt.begin_step(StepAssigned("r", D, 0, prefill_tokens=640, kv_source=P), 2.0)
    attempt.end_step("the prefix did not arrive", 3.0)
    attempt.begin_step(StepAssigned("r", D, 1), 3.5)
    _, fetch, serve = attempt_spans(TRACE, attempt, "", 900, 4.0)
    assert (fetch.name, at(fetch), fetch.error) == ("prefill", (2.0, 3.0), "the prefix did not arrive")
    assert fetch.attributes == {
        "pointsman.request_id": "r",
        "pointsman.instance": "d:1",
        "pointsman.step": 0,
        "pointsman.prefix_tokens": 640,
        "pointsman.kv_source": "p:1",
    }
    assert "pointsman.kv_source" not in serve.attributes


def test_a_step_that_was_sent_ahead_begins_when_it_was_sent() -> None:
    attempt = Attempt()
    attempt.begin_placement("r", 1.0)
    attempt.begin_step(StepAssigned("r", P, 0, prefill_tokens=96, kv_target=D), 2.0)
    attempt.early_sent_at = attempt.sent_at = 2.1
    attempt.end_step("", 3.0)
    attempt.begin_step(StepAssigned("r", D, 1, kv_source=P), 3.1)
    prefill, serve = attempt_spans(TRACE, attempt, "", 100, 4.0)[1:]
    assert (at(prefill), at(serve)) == ((2.0, 3.0), (2.1, 4.0))
    assert moments(serve) == {"sent": 2.1}


def test_a_step_that_fails_says_so_itself() -> None:
    attempt = Attempt()
    attempt.begin_placement("r.1", 1.0)
    attempt.begin_step(StepAssigned("r.1", P, 0, prefill_tokens=96, kv_target=D), 2.0)
    attempt.end_step("deadline", 3.0)
    attempt.begin_step(StepAssigned("r.1", D, 1), 3.5)
    assert [span.error for span in attempt_spans(TRACE, attempt, "", 100, 4.0)] == ["", "deadline", ""]


def test_a_question_without_a_placement_has_the_refusal() -> None:
    attempt = Attempt()
    attempt.begin_placement("r", 1.0)
    attempt.begin_placement("r", 1.5)  # of this gateway itself, when the router was gone
    (place,) = attempt_spans(TRACE, attempt, "No instance is ready.", 100, 2.0)
    assert (at(place), place.error) == ((1.0, 2.0), "No instance is ready.")
    assert place.attributes == {"pointsman.request_id": "r"}


def test_a_request_tells_its_route_status_and_when_it_was_tokenised() -> None:
    trace = RequestTrace(REQUEST, 5, lambda spans: None, 1.0, 1_000 * 10**9)
    refused = request_span(trace, "/v1/messages", "", 503, 4.0)
    assert (refused.events, refused.error) == ((), "status 503")
    assert "gen_ai.request.model" not in refused.attributes
    trace.prepared("r", CHAT, 1.25)
    span = request_span(trace, "/v1/messages", "m", 200, 4.0)
    assert (span.name, span.kind, span.parent_id, at(span)) == ("POST /v1/messages", SpanKind.SERVER, 5, (1.0, 4.0))
    assert moments(span) == {"tokenised": 1.25}
    assert (span.attributes["gen_ai.request.model"], span.attributes["pointsman.request_id"]) == ("m", "r")
    assert not span.error
