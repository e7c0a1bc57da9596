"""One trace over client, gateway, router and engine, as a collector receives it; and requests that work without a collector."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from pointsman_common.core.tracing import Span, SpanContext, parse_traceparent
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from pointsman_router.core import events_and_effects as ev
from pointsman_router.io.telemetry.spans import PlacementSpans
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, until_ready
from tests.support.fakes.span_collector import Collector, Seen, collecting
from tests.support.processes.process import free_port
from tests.support.router import Report, running
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "set the points so that each train takes the right track"}],
}
PATH = "/v1/chat/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    # With a shorter timeout, a batch could be dropped on a stalled machine.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")
    with collecting() as collector:
        yield collector


@asynccontextmanager
async def traced(folder: Path, endpoint: str, engines: int = 1) -> AsyncIterator[tuple[str, list[FakeEngine]]]:
    """A gateway before a router before fake engines, all with one collector; the gateway's address."""
    tokenizer = load_tokenizer(make_tokenizer(folder / "model"))
    servers = [FakeEngine(tokenizer) for _ in range(engines)]
    async with AsyncExitStack() as stack:
        router, client = await stack.enter_async_context(running(otlp_endpoint=endpoint, policy="round_robin"))
        reports = [Report(client) for _ in servers]
        for at, server in enumerate(servers):
            await stack.enter_async_context(server.serve())
            facts: dict[str, Any] = {
                "url": server.url,
                "model": MODEL,
                "model_root": str(folder / "model"),
                "max_model_len": 4096,
            }
            await reports[at].join(f"i{at}", **facts)
        given: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "routers": [f"127.0.0.1:{router.port}"],
            "drain_timeout_s": 0.5,
        }
        settings = GatewaySettings(**given, otlp_endpoint=endpoint)
        gateway, url = await stack.enter_async_context(serving(settings))
        await until_ready(gateway)
        await eventually(lambda: len(gateway.pools.states()[0].pool.instances) == engines)
        yield url, servers


async def chat(url: str, place: SpanContext | None, **more: Any) -> tuple[int, dict[str, str]]:
    headers = {"traceparent": place.traceparent} if place else {}
    async with aiohttp.ClientSession() as http, http.post(url + PATH, json=CHAT | more, headers=headers) as answer:
        await answer.read()
        return answer.status, dict(answer.headers)


async def trace(collector: Collector, place: SpanContext, count: int) -> list[Seen]:
    return await asyncio.to_thread(collector.trace, f"{place.trace_id:032x}", count)


async def test_one_trace_goes_from_the_client_to_the_engine(tmp_path: Path, collector: Collector) -> None:
    client = SpanContext(0xC11E47, 0xA, True)
    async with traced(tmp_path, collector.url) as (url, (engine,)):
        status, headers = await chat(url, client, stream=True)
        assert status == 200
        spans = {span.name: span for span in await trace(collector, client, 4)}
    request = spans[f"gateway POST {PATH}"]
    place, decide, serve = spans["gateway place"], spans["router decide"], spans[f"gateway chat {MODEL}"]
    assert [span.parent_id for span in (request, place, decide, serve)] == [
        f"{client.span_id:016x}",
        request.span_id,
        place.span_id,
        request.span_id,
    ]
    assert request.holds(place)
    assert request.holds(serve)
    assert place.end_ns <= serve.start_ns <= serve.moments["sent"] <= serve.moments["first token"] <= serve.end_ns
    assert request.start_ns <= request.moments["tokenised"] <= place.start_ns
    # The parent of the engine's own span.
    sent = parse_traceparent(engine.requests[-1][2]["traceparent"])
    assert sent is not None
    assert (f"{sent.trace_id:032x}", f"{sent.span_id:016x}", sent.sampled) == (serve.trace_id, serve.span_id, True)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.request.model"] == MODEL
    called = {name: value for name, value in serve.attributes.items() if name.startswith("gen_ai.")}
    assert called["gen_ai.usage.input_tokens"] > called["gen_ai.usage.cache_read.input_tokens"] >= 0
    assert (called["gen_ai.operation.name"], called["gen_ai.request.model"]) == ("chat", MODEL)
    assert called["gen_ai.response.time_to_first_chunk"] > 0
    address = urlsplit(engine.url)
    assert (serve.attributes["server.address"], serve.attributes["server.port"]) == (address.hostname, address.port)
    about = {name.removeprefix("pointsman."): value for name, value in decide.attributes.items()}
    assert about["decision_id"] == place.attributes["pointsman.decision_id"] == headers["X-Pointsman-Decision"]
    assert about["instance"] == place.attributes["pointsman.instance"] == headers["X-Pointsman-Instance"]
    assert (about["policy"], about["route_class"], about["mode"]) == ("round_robin", "LIGHT", "COLOCATED")
    assert about["reason"]
    assert about["new_tokens"] == place.attributes["pointsman.new_tokens"] > 0
    assert not any(span.error for span in spans.values())


async def test_who_brings_no_trace_begins_one_and_who_is_not_sampled_leaves_none(
    tmp_path: Path, collector: Collector
) -> None:
    silent = SpanContext(0x51E47, 0xB, False)
    async with traced(tmp_path, collector.url) as (url, (engine,)):
        await chat(url, silent)
        sent = parse_traceparent(engine.requests[-1][2]["traceparent"])
        assert sent is not None
        assert (sent.trace_id, sent.sampled) == (silent.trace_id, False)
        await chat(url, None)
        new = parse_traceparent(engine.requests[-1][2]["traceparent"])
        assert new is not None
        spans = await trace(collector, new, 4)
    assert [span.parent_id for span in spans if "POST" in span.name] == [""]
    assert all(span.trace_id != f"{silent.trace_id:032x}" for span in collector.spans)


async def test_attempts_that_fail_show_which_and_how(tmp_path: Path, collector: Collector) -> None:
    client = SpanContext(0xFA11, 0xC, True)
    async with traced(tmp_path, collector.url, engines=2) as (url, engines):
        for engine, mode in zip(engines, ("500", "503"), strict=True):
            engine.mode = mode
        status, _ = await chat(url, client)
        spans = await trace(collector, client, 1 + 3 + 3 + 2)
    assert status in (500, 503), "the status of the last attempt"
    places = [span for span in spans if span.name == "gateway place"]
    served = [span for span in spans if span.name == f"gateway chat {MODEL}"]
    assert sorted(span.error for span in served) == ["status 500", "status 503"]
    assert [bool(span.error) for span in places] == [False, False, True]
    assert len({span.attributes["pointsman.request_id"] for span in places}) == 3
    refused = next(span for span in spans if span.name == "router decide" and span.error)
    assert refused.attributes == {"pointsman.refusal": "UNAVAILABLE"}
    assert refused.parent_id == places[-1].span_id
    (request,) = [span for span in spans if "POST" in span.name]
    assert request.error == f"status {status}"


async def test_a_client_that_errs_leaves_a_span_of_its_own(tmp_path: Path, collector: Collector) -> None:
    client = SpanContext(0xE44, 0xD, True)
    async with traced(tmp_path, collector.url) as (url, _):
        status, _ = await chat(url, client, max_tokens=-1)
        (request,) = await trace(collector, client, 1)
    assert status == request.attributes["http.response.status_code"] == 400
    assert not request.error


async def test_without_the_collector_all_goes_on(tmp_path: Path) -> None:
    async with traced(tmp_path, f"http://127.0.0.1:{free_port()}") as (url, _):
        for _ in range(3):
            assert (await chat(url, None))[0] == 200


def test_nothing_of_the_sdk_is_loaded_where_nobody_asks_for_it() -> None:
    code = """
import sys
import pointsman_gateway.io.main, pointsman_router.io.main
assert not [name for name in sys.modules if name.startswith(("opentelemetry.exporter", "opentelemetry.sdk.trace"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_router_forgets_questions_that_nobody_waits_on_any_more() -> None:
    sent: list[Span] = []
    spans = PlacementSpans(lambda some: sent.extend(some))
    refused = [ev.Refused(name, "UNAVAILABLE", "no") for name in ("ended", "left", "stays", "unsampled")]
    spans.asked("ended", "g", SpanContext(1, 1, True).traceparent)
    spans.asked("left", "g", SpanContext(1, 2, True).traceparent)
    spans.asked("stays", "h", SpanContext(1, 3, True).traceparent)
    spans.asked("unsampled", "h", SpanContext(1, 4, False).traceparent)
    spans.ended("ended")
    spans.gateway_left("g")
    for answer in refused + refused:
        spans.answered(answer)
    assert [span.parent_id for span in sent] == [3]
