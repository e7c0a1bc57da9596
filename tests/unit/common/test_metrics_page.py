"""The page is the library's own, and others have their turns while it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, ItemsView

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from pointsman_common.io import metrics_page as module
from pointsman_common.io.metric_children import MetricChildren
from pointsman_common.io.metrics_page import PIECE, PacedPage, metrics_page
from tests.support.virtual.loop import VirtualLoop


class Labels(dict[str, str]):
    """Labels that count how often they are written."""

    written = 0

    def items(self) -> ItemsView[str, str]:  # type: ignore[override]
        Labels.written += 1
        return super().items()


class Many:
    """A family of as many samples as a gateway with a thousand tenants has."""

    def collect(self) -> list[Metric]:
        family = Metric("many", "some", "gauge")
        family.samples = [Sample("many", Labels(tenant=f"t{number}"), 1.0) for number in range(5_000)]
        return [family]


async def most_in_a_turn(page: Callable[[], Awaitable[bytes]], count: Callable[[], int]) -> int:
    """Return how much `count` grows at most between two turns of another task."""
    most, before = 0, count()

    async def others() -> None:
        nonlocal most, before
        while True:
            now = count()
            most, before = max(most, now - before), now
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await page()
    await asyncio.sleep(0)
    task.cancel()
    return most


async def test_no_turn_writes_more_than_a_piece() -> None:
    registry = CollectorRegistry()
    registry.register(Many())
    assert 0 < await most_in_a_turn(lambda: metrics_page(registry), lambda: Labels.written) <= PIECE


async def test_no_turn_reads_more_children_of_a_metric_than_a_piece_has() -> None:
    registry, read = CollectorRegistry(), 0
    gauge = Gauge("many", "some", ["tenant"], registry=None)
    gauges = MetricChildren(gauge, registry)

    def value() -> float:
        nonlocal read
        read += 1
        return 1.0

    for number in range(5_000):
        gauges[f"t{number}",].set_function(value)
    assert 0 < await most_in_a_turn(lambda: metrics_page(registry), lambda: read) <= PIECE
    assert read == 5_000


async def test_children_that_come_and_go_while_a_page_is_written_do_not_break_it() -> None:
    registry = CollectorRegistry()
    counters = MetricChildren(Counter("many", "some", ["tenant"], registry=None), registry)
    for number in range(1_000):
        counters[f"t{number}",].inc()
    writing = asyncio.create_task(metrics_page(registry))
    await asyncio.sleep(0)
    for number in range(500, 1_000):
        counters.forget((f"t{number}",))
        counters[f"new{number}",].inc()
    page = (await writing).decode()
    assert 500 <= page.count("many_total{") <= 500 + PIECE
    assert page.count("# TYPE many_total counter") == 1
    assert "_created" not in page


async def test_a_page_in_pieces_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 3)
    registry = CollectorRegistry()
    for number in range(5):
        gauge = Gauge(f"gauge{number}", "some", ["a"], registry=registry)
        for label in range(number):
            gauge.labels(f'"quoted"\n{label}').set(number)
    counter = Counter("counter", "more\nlines", ["a"], registry=registry)
    histogram = Histogram("histogram", "most", ["a"], registry=registry)
    children = MetricChildren(Counter("children", "of one", ["b", "a"], registry=None), registry)
    none = MetricChildren(Histogram("none", "has no children", ["a"], registry=None), registry)
    assert not none
    Gauge("special", "values", ["a"], registry=registry).labels("\\ü").set(float("inf"))
    for letter in "abcdefgh":
        children[letter, f'"{letter}'].inc(1e9 + 0.5)
        counter.labels(letter).inc()
        histogram.labels(letter).observe(1)
    assert await metrics_page(registry) == generate_latest(registry)


async def test_a_page_is_built_once_for_all_who_ask_and_after_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.05)
    built, state = 0, 0

    async def build() -> bytes:
        nonlocal built
        built += 1
        found = b"%d" % state
        await asyncio.sleep(0.01)
        return found

    page, loop = PacedPage(build), asyncio.get_running_loop()
    began = loop.time()
    assert await asyncio.gather(*(page.get() for _ in range(1_000))) == [b"0"] * 1_000
    assert built == 1
    for state in range(1, 4):
        assert await page.get() == b"%d" % state
    assert built == 4
    assert loop.time() - began >= 3 * 0.05


def test_a_page_that_takes_long_is_built_for_half_of_the_time() -> None:
    began: list[float] = []

    async def build() -> bytes:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(3.0)
        return b""

    async def ask() -> None:
        page = PacedPage(build)
        for _ in range(3):
            await page.get()

    loop = VirtualLoop()
    loop.run_until_complete(ask())
    loop.end()
    assert [at - began[0] for at in began] == [0.0, 6.0, 12.0]
