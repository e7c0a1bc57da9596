"""The page is the library's own, and others have their turns while it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, ItemsView

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from pointsman_common.io import metrics_page as module
from pointsman_common.io.metrics_page import PIECE, PacedPage, metrics_page


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


async def most_written_in_a_turn(page: Callable[[], Awaitable[bytes]]) -> int:
    """Return the largest number of samples that are written between two turns of another task."""
    most = before = Labels.written = 0

    async def others() -> None:
        nonlocal most, before
        while True:
            most, before = max(most, Labels.written - before), Labels.written
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await page()
    await asyncio.sleep(0)
    task.cancel()
    return most


async def test_no_turn_writes_more_than_a_piece() -> None:
    registry = CollectorRegistry()
    registry.register(Many())
    assert 0 < await most_written_in_a_turn(lambda: metrics_page(registry)) <= PIECE


async def test_a_page_in_pieces_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 3)
    registry = CollectorRegistry()
    for number in range(5):
        gauge = Gauge(f"gauge{number}", "some", ["a"], registry=registry)
        for label in range(number):
            gauge.labels(f'"quoted"\n{label}').set(number)
    counter = Counter("counter", "more\nlines", ["a"], registry=registry)
    histogram = Histogram("histogram", "most", ["a"], registry=registry)
    for letter in "abcdefgh":
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
