"""The page is the library's own, and others have their turns while it is written."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pointsman_common.io.metrics_page import metrics_page


async def test_a_page_is_written_family_by_family() -> None:
    registry = CollectorRegistry()
    for number in range(5):
        Gauge(f"gauge{number}", "some", ["a"], registry=registry).labels('"quoted"').set(number)
    Counter("counter", "more", registry=registry).inc()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    page = await metrics_page(registry)
    task.cancel()
    assert page == generate_latest(registry)
    assert turns == 6
