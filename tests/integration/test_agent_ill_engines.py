"""What an agent says of an engine that is ill in one of many ways: its health, its load, and whether its keys stay known."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core import engine_life
from pointsman_agent.io import engine_http, engine_monitor
from pointsman_lab.emulator.emulated_engine import EmulateSettings, start
from tests.support.fakes.agent_peers import FakeRouter, running
from tests.support.tampering_proxy import Fault, TamperingProxy, tampering
from tests.support.waiting import eventually

# Engine, proxy, agent and router share an event loop, which a busy machine stops for some 100 ms.
GONE_AFTER_S = 2.0
SCALING = b'{"error":"The model is currently scaling. Please try again later."}'


@dataclass
class Ill:
    """An emulated engine with cached blocks behind a tampering proxy, an agent of it, and the router that it reports to."""

    proxy: TamperingProxy
    router: FakeRouter
    engine: str  # the engine's own URL

    @property
    def loads(self) -> list[pb.Load]:
        return self.router.streams[-1].loads

    @property
    def keys(self) -> set[int] | None:
        return self.router.keys(self.router.streams[-1].hello.instance.instance_id)

    async def load(self, check: Callable[[pb.Load], object], what: str) -> pb.Load:
        """Wait for a load that comes from now on, and return it."""
        seen = len(self.loads)
        await eventually(lambda: any(check(load) for load in self.loads[seen:]), what)
        return next(load for load in self.loads[seen:] if check(load))

    async def loads_that(self, check: Callable[[pb.Load], bool], number: int = 12) -> None:
        """Wait for some loads that come from now on, and check each."""
        seen = len(self.loads)
        await eventually(lambda: len(self.loads) >= seen + number, "loads")
        assert all(check(load) for load in self.loads[seen:]), self.loads[seen:]

    async def prompt(self, text: str) -> None:
        """Let the engine answer, whatever its proxy does."""
        body = {"model": "pointsman-emulated", "prompt": text, "max_tokens": 1}
        async with aiohttp.ClientSession() as http, http.post(f"{self.engine}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    def unharmed(self) -> bool:
        """Whether it is the incarnation of the beginning, with keys."""
        return len(self.router.streams) == 1 and self.router.streams[0].goodbye is None and bool(self.keys)


@pytest.fixture
async def ill(router: FakeRouter, tmp_path: Path) -> AsyncIterator[Ill]:
    async with AsyncExitStack() as stack:
        engine = await start(EmulateSettings(port=0, speedup=50.0))
        stack.push_async_callback(engine.stop)
        proxy = await stack.enter_async_context(tampering(engine.url))
        await stack.enter_async_context(running(proxy.url, [router.address], tmp_path))
        found = Ill(proxy, router, engine.url)
        await eventually(lambda: bool(router.streams and found.loads and found.loads[-1].healthy), "a healthy engine")
        await found.prompt("a word " * 200)
        await eventually(lambda: found.keys, "its keys")
        yield found
        assert found.unharmed() or router.streams[0].goodbye is not None or router.streams[0].ended


PAGES = {
    "hangs": Fault(hang=True),
    "fails": Fault(status=500),
    "missing": Fault(status=404),
    "garbage": Fault(body=b"\x00\xff<html>" * 99),
    "empty": Fault(body=b""),
    "truncated": Fault(truncate_at=40),
    "reset": Fault(reset=True),
    "stalls": Fault(stall_at=40),
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
async def test_a_page_of_metrics_that_cannot_be_read_leaves_the_load_unknown_and_the_engine_healthy(
    ill: Ill, page: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "METRICS_ANSWER_S", 0.1)
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", GONE_AFTER_S)
    ill.proxy.set(page, "/metrics")
    unknown = await ill.load(lambda load: load.problem, "an unknown load")
    assert unknown.problem.startswith("load unknown: ")
    await ill.loads_that(lambda load: load.healthy and not load.suspended)
    older = GONE_AFTER_S * 1000 + 300
    await ill.load(
        lambda load: load.sample_age_ms > older, "the last load, older than the time after which it was gone"
    )
    assert ill.unharmed()
    ill.proxy.heal()
    known = await ill.load(lambda load: not load.problem, "a known load")
    assert known.healthy
    assert not known.unknown


async def test_a_page_that_takes_long_is_read_all_the_same(ill: Ill) -> None:
    ill.proxy.set(Fault(delay_s=2.5), "/metrics")
    await ill.loads_that(lambda load: load.healthy and not load.problem, number=60)
    ill.proxy.heal()
    assert ill.unharmed()


def replaced(pattern: str, by: str) -> Fault:
    return Fault(rewrite=lambda page: re.sub(pattern.encode(), by.encode(), page, flags=re.MULTILINE))


VALUES = {
    "NaN": replaced(r"^(vllm:kv_cache_usage_perc\S*) \S+", r"\1 NaN"),
    "negative": replaced(r"^(vllm:kv_cache_usage_perc\S*) \S+", r"\1 -0.3875"),
    "overflow": replaced(r"^(vllm:kv_cache_usage_perc\S*) \S+", r"\1 1e400"),
    "text": replaced(r"^(vllm:kv_cache_usage_perc\S*) \S+", r"\1 none"),
    "renamed": replaced(r"^vllm:kv_cache_usage_perc", r"vllm:kv_cache_share"),
}


@pytest.mark.parametrize("page", VALUES.values(), ids=VALUES)
async def test_one_figure_that_is_no_number_or_missing_is_unknown_and_the_others_count(ill: Ill, page: Fault) -> None:
    ill.proxy.set(page, "/metrics")
    load = await ill.load(lambda load: load.unknown, "an unknown figure")
    assert list(load.unknown) == ["kv_usage"]
    assert load.prefix_cache_queries > 0
    await ill.loads_that(lambda load: load.healthy and not load.problem)
    ill.proxy.heal()
    await ill.load(lambda load: not load.unknown, "its number")
    assert ill.unharmed()


COUNTERS = {
    "process start": r"^(process_start_time_seconds) \S+",
    "generated tokens": r"^(vllm:generation_tokens_total\S*) \S+",
    "lookups": r"^(vllm:prefix_cache_queries_total\S*) \S+",
    "awake": r'^(vllm:engine_sleep_state\S*"awake"\S*) \S+',
}


@pytest.mark.parametrize("value", ["NaN", "-1", "1e400", "none"])
@pytest.mark.parametrize("series", COUNTERS.values(), ids=COUNTERS)
async def test_a_bad_number_is_no_restart_and_no_sleep(ill: Ill, series: str, value: str) -> None:
    page = replaced(series, rf"\1 {value}")
    ill.proxy.set(page, "/metrics")
    before = ill.proxy.requests["/metrics"]
    await eventually(lambda: ill.proxy.requests["/metrics"] > before + 5, "more scrapes")
    await ill.loads_that(lambda load: load.healthy and not load.suspended)
    ill.proxy.heal()
    await ill.loads_that(lambda load: load.healthy and not load.suspended)
    assert ill.unharmed()


async def test_an_older_name_of_a_series_is_read(ill: Ill) -> None:
    ill.proxy.set(replaced(r"^vllm:kv_cache_usage_perc(\S*) \S+", r"vllm:gpu_cache_usage_perc\1 0.625"), "/metrics")
    load = await ill.load(lambda load: load.kv_usage == 0.625, "the usage")
    assert not load.unknown


async def test_an_engine_whose_health_says_that_it_is_dead_is_unhealthy_with_its_keys(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", GONE_AFTER_S)
    ill.proxy.set(Fault(status=503), "/health")
    dead = await ill.load(lambda load: not load.healthy, "an unhealthy engine")
    assert dead.problem == "/health answered 503"
    await ill.loads_that(lambda load: not load.healthy)
    ill.proxy.heal()
    await ill.load(lambda load: load.healthy, "a healthy engine")
    assert ill.unharmed()


@pytest.mark.parametrize(
    "fault", [Fault(hang=True), Fault(reset=True), Fault(status=404)], ids=["hang", "reset", "404"]
)
async def test_a_health_route_that_does_not_answer_is_outweighed_by_other_answers(
    ill: Ill, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "ANSWER_S", 0.1)
    ill.proxy.set(fault, "/health")
    before = ill.proxy.requests["/health"]
    await ill.loads_that(lambda load: load.healthy and not load.problem, number=40)
    await eventually(lambda: ill.proxy.requests["/health"] > before + 3, "more probes")
    assert ill.unharmed()


async def test_kv_events_are_signs_of_life_of_an_engine_that_answers_no_probe(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "METRICS_ANSWER_S", 0.1)
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", 3.0)
    ill.proxy.set(Fault(hang=True))
    number, oldest = 0, ill.loads[-1].sample_age_ms + 4_000
    while ill.loads[-1].sample_age_ms < oldest:
        number += 1
        await ill.prompt(f"{number} others " * 40)
        await ill.load(lambda _: True, "a load")
    assert ill.unharmed()
    ill.proxy.heal()
    await ill.load(lambda load: load.healthy and not load.problem, "a known load")


async def test_an_engine_that_computes_and_shows_its_load_is_not_asked_whether_it_lives(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "FRESH_SHARE", 20.0)
    await ill.prompt("begin " * 40)
    await ill.loads_that(lambda load: load.healthy, number=3)
    loads, probes, number = len(ill.loads), ill.proxy.requests["/health"], 0
    while len(ill.loads) < loads + 10:
        number += 1
        await ill.prompt(f"{number} others " * 40)
    assert ill.proxy.requests["/health"] == probes
    ill.proxy.set(Fault(status=500), "/metrics")
    await ill.load(lambda load: load.problem, "an unknown load")
    await eventually(lambda: ill.proxy.requests["/health"] > probes + 2, "probes")
    await ill.prompt("more " * 40)
    assert ill.unharmed()


async def test_events_from_before_an_engine_stands_still_are_no_sign_of_life_later(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "METRICS_ANSWER_S", 0.5)
    monkeypatch.setattr(engine_http, "ANSWER_S", 0.5)
    monkeypatch.setattr(engine_life, "ALIVE_AFTER_SIGN_S", 0.5)
    await ill.prompt("others " * 200)
    ill.proxy.set(Fault(hang=True))
    probes = ill.proxy.requests["/health"]
    await ill.load(lambda load: not load.healthy, "an unhealthy engine")
    # One that began before the last event was read; those that count; and the one after them.
    assert ill.proxy.requests["/health"] <= probes + engine_life.UNHEALTHY_AFTER + 2


async def test_the_log_says_that_an_engine_does_not_answer_and_that_its_events_show_that_it_does(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "METRICS_ANSWER_S", 0.1)
    monkeypatch.setattr(engine_http, "ANSWER_S", 0.1)
    monkeypatch.setattr(engine_life, "ALIVE_AFTER_SIGN_S", 0.1)

    def said() -> list[tuple[str, str]]:
        life = [entry for entry in logs if entry["event"] in (silent, "the engine answers again")]
        assert all(entry["engine"] == ill.proxy.url for entry in life)
        return [(entry["event"], entry["log_level"]) for entry in life]

    silent = "the engine does not answer"
    with capture_logs() as logs:
        ill.proxy.set(Fault(hang=True))
        await eventually(said, "an engine that does not answer")
        assert said() == [(silent, "warning")]
        # No probe is answered, so nothing but its events shows that it works.
        await ill.prompt("others " * 200)
        await eventually(lambda: len(said()) > 1, "an engine that answers again")
        assert said()[1] == ("the engine answers again", "warning")
        assert next(entry["reason"] for entry in logs if entry["event"] == silent).startswith("/health: ")
    assert ill.unharmed()


async def test_an_engine_that_its_agent_cannot_reach_is_left_to_what_routers_know(
    ill: Ill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "METRICS_ANSWER_S", 0.1)
    monkeypatch.setattr(engine_http, "ANSWER_S", 0.1)
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", 3.0)
    monkeypatch.setattr(engine_life, "ALIVE_AFTER_SIGN_S", 0.1)
    ill.proxy.set(Fault(hang=True))
    unhealthy = await ill.load(lambda load: not load.healthy, "an unhealthy engine")
    assert unhealthy.problem.startswith("/health: ")
    await eventually(lambda: ill.router.streams[0].ended, "the stream's end")
    assert ill.router.streams[0].goodbye is None
    ill.proxy.heal()
    await eventually(lambda: len(ill.router.streams) > 1 and ill.router.streams[-1].loads, "the engine again")


async def test_a_refused_connection_is_unhealthy_and_the_same_process_comes_back_with_its_keys(ill: Ill) -> None:
    await ill.proxy.refuse()
    await ill.load(lambda load: not load.healthy, "an unhealthy engine")
    await ill.proxy.listen()
    await ill.load(lambda load: load.healthy, "a healthy engine")
    assert ill.unharmed()


CHANGES: dict[str, tuple[Any, ...]] = {
    "all but /health": ((Fault(status=503), ""), (Fault(), "/health")),
    "all but /health and /metrics": ((Fault(status=503), ""), (Fault(), "/health"), (Fault(), "/metrics")),
    "all, as vLLM 0.32 while its ranks change": ((Fault(status=503, body=SCALING), ""),),
}


@pytest.mark.parametrize("faults", CHANGES.values(), ids=CHANGES)
async def test_an_engine_that_refuses_all_requests_for_a_while_is_suspended_and_not_dead(
    ill: Ill, faults: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", GONE_AFTER_S)
    for fault, path in faults:
        ill.proxy.set(fault, path)
    suspended = await ill.load(lambda load: load.suspended, "a suspended engine")
    assert suspended.suspended.startswith("its API answers 503")
    await ill.loads_that(lambda load: load.healthy and bool(load.suspended))
    ill.proxy.heal()
    await ill.load(lambda load: load.healthy and not load.suspended, "an engine that computes")
    assert ill.unharmed()


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data":[7]}', b'{"data":[{}]}', b"no json", b'{"data":3}'])
async def test_models_that_cannot_be_read_again_change_nothing(
    ill: Ill, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_agent.io.engine_monitor.DESCRIBE_EVERY_S", 0.1)
    ill.proxy.set(Fault(body=body), "/v1/models")
    before = ill.proxy.requests["/v1/models"]
    await eventually(lambda: ill.proxy.requests["/v1/models"] > before + 1, "it is asked again")
    await ill.loads_that(lambda load: load.healthy and not load.problem)
    assert ill.unharmed()
