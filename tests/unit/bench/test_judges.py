"""What the judges' commands make of what was found: pages, and what counts as worse than the engine."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest

from bench import api_documents, compliance, guidellm, keepalive, tool_calls
from bench.calling_clients import Turn
from tests.support.waiting import eventually

FOUND: dict[str, Any] = {
    "documents": {"OpenAI": "sha256:0123456789abcdef"},
    "versions": {"schemathesis": "1", "specs": "2", "vllm": "3"},
    "tokens": 8,
    "operations": {
        "POST /a": {"requests": 5, "differing": 1, "engine 2xx": 3, "gateway 2xx": 2, "engine 4xx": 1, "new 5xx": 0},
        "GET /b": {"requests": 2, "differing": 0, "engine 4xx": 2, "gateway 2xx": 2, "new 5xx": 0},
    },
    "differing": [["POST /a", "200", "400", "Invalid value for '...': the name of a model is needed.", 1]],
    "violated": [["POST /a", "x: null | is no string", 3, 2], ["GET /b", "the answer: no y", 0, 2]],
    "examples": {},
}


def test_the_page_of_the_documents_has_both_sides_and_reasons() -> None:
    text = api_documents.page(FOUND, faults=0)
    assert "| POST /a | 5 | 3, 2 | 0, 0 | 1, 0 | 0, 0 | 0, 0 | 0, 0 | 1 |" in text
    assert "a gateway serves several models" in text
    assert "| POST /a | `x: null / is no string` | 3 | 2 |" in text
    assert api_documents.wrong(FOUND, []) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"differing": [["POST /a", "200", "400", "no", 1]]}, "not known why"),
        ({"violated": [["POST /a", "an answer: no z", 0, 1]]}, "only the gateway"),
        ({"violated": [["POST /a", "an error, error.code: type", 0, 1]]}, "only the gateway"),
        ({"operations": {"POST /a": {"requests": 1, "differing": 1, "new 5xx": 1}}, "violated": []}, "1 new 5xx"),
    ],
)
def test_what_only_the_gateway_does_is_worse(change: dict[str, Any], expected: str) -> None:
    (line,) = api_documents.wrong(FOUND | change, [])
    assert expected in line


def test_a_fault_in_the_gateways_log_is_worse() -> None:
    assert api_documents.wrong(FOUND, ["a fault in the gateway"]) == ["a fault in the gateway"]


def test_a_case_that_only_the_gateway_fails_is_told() -> None:
    passed, failed = compliance.Outcome("passed", ()), compliance.Outcome("failed", ("no x",))
    sides = [{"one": own, "two": passed} for own in (passed, failed, failed, failed)]
    found = {"anthropic": sides}
    assert compliance.worse(found) == ["Anthropic messages, one, emulated, through: ('no x',)"]
    text = compliance.page(found, "1")
    assert "| one | pass | **fail** | fail | fail |" in text
    assert "| `no x` | 0 | 1 | 1 | 1 |" in text
    assert "| Anthropic messages | 2 of 2 | 1 of 2 | 1 of 2 | 1 of 2 |" in text


def test_what_of_an_engines_calls_another_answer_lacks_or_changes() -> None:
    a, b = ("a", '{"x": 1}'), ("b", "{}")
    own = Turn((a, b), "", "tool_calls")
    for other, expected in (
        (own, {}),
        (Turn((a,), "", "tool_calls"), {"lost": 1}),
        (Turn((b, a), "", "tool_calls"), {"changed": 2}),
        (Turn((a, ("b", "{ }")), "", "tool_calls"), {"changed": 1}),
        (Turn((a, b, b), "", "length"), {"changed": 1, "otherwise": 1}),
    ):
        assert +tool_calls.differences(own, other) == Counter(expected)
    assert own.whole
    assert not Turn((("a", '{"x": 1'),), "", "length").whole


def test_the_page_of_tool_calls_keeps_the_kind_of_engines_that_was_not_asked() -> None:
    found = {"chat": Counter({"turns": 2_000, "calls": 3, "alone changed": 1})}
    vllm = tool_calls.section(tool_calls.KINDS["vllm"], found, "1.2")
    assert "| all | 2,000 | 3 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |" in vllm
    page = tool_calls.page({"vllm": vllm}, "")
    assert "An emulated engine" not in page
    page = tool_calls.page({"emulated": tool_calls.section(tool_calls.KINDS["emulated"], found, "")}, page)
    assert page.index("## An emulated engine") < page.index("## vLLM")
    assert page == tool_calls.page({"vllm": vllm}, page)


def test_a_row_of_the_load_client_has_all_columns() -> None:
    spread = {"successful": {"mean": 1.0, "median": 2.0, "percentiles": {"p95": 3.0}}}
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "requests_per_second")
    metrics = {"request_totals": {"successful": 3, "errored": 1, "incomplete": 0}} | dict.fromkeys(names, spread)
    columns = re.findall(r"^\|.*\|$", guidellm.INTRO, re.MULTILINE)
    assert {line.count("|") for line in [*columns, guidellm.row("x", metrics).strip()]} == {11}


@pytest.mark.parametrize(("server", "seen"), [("answers", "answered"), ("closes", "closed"), ("crosses", "reset")])
async def test_what_a_client_sees_of_a_kept_connection(server: str, seen: str) -> None:
    served: Counter[str] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(2):
            if await reader.read(4_096) and (server != "crosses" or number == 0):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                served["answers"] += 1
            if server == "closes":
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        assert await keepalive.once_more(url, "m", 0.2, asyncio.Semaphore(1)) == seen
        await eventually(lambda: served["answers"] == (2 if seen == "answered" else 1))
