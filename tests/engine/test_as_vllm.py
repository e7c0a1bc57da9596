"""The gateway answers as vLLM does: every case of comparison_cases.py, sent to an engine and through the gateway."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pointsman_gateway.core.api import error_format_of, redact_error
from tests.support.engines.comparison_cases import CASES, PLAIN, Case
from tests.support.engines.servers import Engine
from tests.support.http_request import Reply, ask
from tests.support.instances import counters
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Fields that differ between two answers to one request: ids and times; cache counts; and in streams the fingerprint. vLLM writes
# the fingerprint into the usage chunk, which the gateway always requests and removes for clients that did not request it.
VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "system_fingerprint"}
    | {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"}
)
# How tokens are divided among the events of a stream depends on the engine's load.
GROWING = frozenset({"content", "text", "arguments", "delta", "partial_json", "thinking", "reasoning"})
LISTS = frozenset({"content", "logprobs", "tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids"})


@pytest.mark.parametrize("path", PLAIN)
def test_an_answer_is_the_engines_own(plane: ControlPlane, engines: list[Engine], path: str) -> None:
    cases = [case for case in CASES if case.path == path]
    wrong = [said for said in _compared(cases, engines[0].url, plane.gateway_url) if said]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong)


def test_what_the_gateway_refuses_leaves_no_trace(plane: ControlPlane, engines: list[Engine]) -> None:
    before = _traces(plane, engines)
    for case in CASES:
        if case.own:
            answer = _ask(plane.gateway_url, case)
            assert 400 <= answer.status < 500, case.name
            error = answer.json()["error"]
            assert error["message"], case.name
            assert error["type"], case.name
            assert not any(str(engine.port) in answer.text for engine in engines), "an internal address"
    assert _traces(plane, engines) == before


def _compared(cases: list[Case], direct: str, gateway: str) -> Iterator[str]:
    """Yield what is wrong with each case, "" for nothing. Both sides are asked at the same time, unless a case must run alone."""
    with ThreadPoolExecutor(4) as pool:
        together = [case for case in cases if not case.alone]
        asked = [(case, pool.submit(_ask, direct, case), pool.submit(_ask, gateway, case)) for case in together]
        for case, own, through in asked:
            yield _difference(case, own.result(), through.result())
    for case in cases:
        if case.alone:
            yield _difference(case, _ask(direct, case), _ask(gateway, case))


def _ask(url: str, case: Case) -> Reply:
    return ask(url + case.path, case.body, headers={"Content-Type": case.content_type})


def _difference(case: Case, own: Reply, through: Reply) -> str:
    """How the gateway's answer differs from the engine's where it may not."""
    if case.differs is not None:
        return (
            _said(case, own, through) if through.status != case.differs.status or own.status == through.status else ""
        )
    if own.status != through.status:
        return _said(case, own, through)
    if own.status >= 400:
        relayed = through.json()
        relayed.pop("request_id", None)  # the gateway's own addition to Anthropic's errors
        same = json.loads(redact_error(error_format_of(case.path), own.status, own.body)) == relayed
        # An error of the gateway's own (`case.own`) may differ from the engine's; an error that it passes on does not.
        return "" if same or case.own else _said(case, own, through)
    if case.streamed != own.text.startswith(("data:", "event:")) or case.own:
        return _said(case, own, through)
    read = _stream if own.text.startswith(("data:", "event:")) else _whole
    found = _unlike(read(own), read(through))
    return f"{case.name}: {found}" if found else ""


def _said(case: Case, own: Reply, through: Reply) -> str:
    return f"{case.name}: {own.status} {own.text[:300]!r}\n    but {through.status} {through.text[:300]!r}"


def _whole(answer: Reply) -> Any:
    return _steady(answer.json())


def _stream(answer: Reply) -> Any:
    """A stream as a whole: the order of its event types, and the merged events of each type and part of the answer."""
    order: list[str] = []
    merged: dict[str, Any] = {}
    for event in answer.text.strip().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        if data == "[DONE]":
            order.append(data)
            continue
        body = json.loads(data)
        at = [body.get(field) for field in ("type", "index", "output_index", "content_index")]
        kind = json.dumps([name, *at])
        if kind not in order[-1:]:
            order.append(kind)
        merged[kind] = _merge("", merged[kind], _steady(body)) if kind in merged else _steady(body)
    return {"order": order, "events": merged}


def _merge(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _merge(key, one[key], value) if key in one else value for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(item, dict) and "index" in item for item in (*one, *other)):
            return _by_index([*one, *other])
        return one + other if name in LISTS else other
    if isinstance(one, str) and isinstance(other, str) and name in GROWING:
        return one + other
    return one if other is None else other


def _by_index(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for item in items:
        found[item["index"]] = _merge("", found[item["index"]], item) if item["index"] in found else item
    return [found[index] for index in sorted(found)]


def _steady(value: Any) -> Any:
    """Return the value without what differs between two answers to one request."""
    if isinstance(value, list):
        steady = [_steady(item) for item in value]
        # One event may have several parts of one tool call.
        return _by_index(steady) if all(isinstance(item, dict) and "index" in item for item in steady) else steady
    if not isinstance(value, dict):
        return value
    kept = {name: _steady(item) for name, item in value.items() if name not in VOLATILE}
    if "input_tokens" in kept and "prompt_tokens_details" not in value and "input_tokens_details" not in value:
        # Anthropic counts tokens that were cached, and those that are cached from now on, apart from the other input tokens.
        kept["input_tokens"] += sum(value.get(f"cache_{how}_input_tokens") or 0 for how in ("read", "creation"))
    return kept


def _unlike(one: Any, other: Any, at: str = "") -> str:
    """Where two values differ. Scores may differ by as much as another batch changes them."""
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3) else f"{at}: {one} but {other}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for key in one if (found := _unlike(one[key], other[key], f"{at}.{key}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for i, (a, b) in pairs if (found := _unlike(a, b, f"{at}[{i}]"))), "")
    return "" if one == other else f"{at}: {json.dumps(one)[:300]} but {json.dumps(other)[:300]}"


def _traces(plane: ControlPlane, engines: list[Engine]) -> dict[str, object]:
    """All that a placed request would change."""
    return {
        "decision": plane.newest_decision().decision_id,
        "counters": [counters(plane.instance(engine)) for engine in engines],
        "sessions": [plane.instance(engine).sessions for engine in engines],
        "prompts": [engine.metric("vllm:prompt_tokens_total") for engine in engines],
    }
