"""What a service collects, and when."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from pointsman_common.io.garbage import collect_garbage

INTERVAL_S = 0.2


class Loop:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


async def test_all_objects_are_looked_at_once_an_interval_and_not_as_they_grow() -> None:
    begun: list[int] = []

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            begun.append(details["generation"])

    collecting = asyncio.ensure_future(collect_garbage(INTERVAL_S))
    await asyncio.sleep(0)
    gc.callbacks.append(note)
    try:
        kept = [[[number]] for number in range(100_000)]
        assert begun.count(1) > 10
        assert 2 not in begun, "Python would have done so some times by now"
        left = weakref.ref(Loop())
        async with asyncio.timeout(10.0):
            while left() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(kept) == 100_000
        assert set(begun) == {0, 1, 2}
    finally:
        gc.callbacks.remove(note)
        collecting.cancel()
