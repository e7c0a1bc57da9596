"""A Prometheus page that is written in pieces, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

# The library adds a series with the time of its creation to each series of a counter or histogram, which nobody reads: a third of
# a page.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Minimum interval between the beginnings of two pages, s.
PERIOD_S = 1.0
# Maximum number of samples that are read, merged or written at once: each step takes at most 5 us for one.
PIECE = 100
# Number of written pieces that are put together at once.
JOINED = 20
Page = TypeVar("Page")


class Piece(NamedTuple):
    """Some series of a family of the page: the family's name and first lines there, each series' text and its value."""

    name: str
    head: str
    series: list[tuple[str, float]]


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


async def pieces(families: Iterable[Metric]) -> AsyncIterator[Piece]:
    """Yield the families in pieces of at most PIECE samples, which are read only then. The event loop runs other tasks between
    two of them."""
    for family in families:
        head = generate_latest(_One(Metric(family.name, family.documentation, family.type))).decode()
        samples, first = iter(family.samples), True
        while (found := [*islice(samples, PIECE)]) or first:
            yield Piece(family.name, head, [(_series(sample), sample.value) for sample in found])
            first = False
            await asyncio.sleep(0)


def _series(sample: Sample) -> str:
    if not sample.labels:
        return sample.name
    labels = [f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())]
    return f"{sample.name}{{{','.join(labels)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    number: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return number


async def metrics_page(registry: CollectorRegistry) -> bytes:
    """Return the page of `registry`. The event loop runs other tasks between two pieces of it."""
    return await written(pieces(registry.collect()))


async def written(found: AsyncIterator[Piece]) -> bytes:
    """Return the page of these pieces, as generate_latest() writes it."""
    page: dict[str, list[bytes]] = {}
    async for piece in found:
        lines = "".join([f"{series} {_number(value)}\n" for series, value in piece.series])
        page.setdefault(piece.name, [piece.head.encode()]).append(lines.encode())
    # Put together in pieces, too: the first writes to 7 MB of new memory take 5 to 20 ms. The buffer becomes the page uncopied.
    whole = io.BytesIO()
    for family in page.values():
        while family:
            whole.write(b"".join(family[:JOINED]))
            del family[:JOINED]
            await asyncio.sleep(0)
    return whole.getvalue()


class PacedPage(Generic[Page]):
    """Builds a page at most once in PERIOD_S and for half of the time, for all who ask. Each gets one that was begun after its
    call."""

    def __init__(self, build: Callable[[], Awaitable[Page]]) -> None:
        self._build = build
        self._next: asyncio.Task[Page] | None = None
        self._next_at = 0.0
        self._building = asyncio.Lock()

    async def get(self) -> Page:
        """Return the next page that is begun."""
        if self._next is None:
            self._next = asyncio.create_task(self._build_next())
        return await asyncio.shield(self._next)

    async def _build_next(self) -> Page:
        loop = asyncio.get_running_loop()
        async with self._building:
            await asyncio.sleep(max(0.0, self._next_at - loop.time()))
            began_at, self._next = loop.time(), None
            try:
                return await self._build()
            finally:
                now = loop.time()
                self._next_at = max(began_at + PERIOD_S, now + (now - began_at))
