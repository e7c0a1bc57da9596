"""A Prometheus page that is written in pieces, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Minimum interval between the beginnings of two pages, s.
PERIOD_S = 1.0
# Maximum number of samples that are written at once: a line takes about 30 us.
PIECE = 100


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


async def pieces(families: Iterable[Metric]) -> AsyncIterator[Metric]:
    """Yield the families in pieces of at most PIECE samples. The event loop runs other tasks between two of them."""
    for family in families:
        for at in range(0, len(family.samples) or 1, PIECE):
            piece = Metric(family.name, family.documentation, family.type)
            piece.samples = family.samples[at : at + PIECE]
            yield piece
            await asyncio.sleep(0)


async def metrics_page(registry: CollectorRegistry) -> bytes:
    """Return the page of `registry`. The event loop runs other tasks between two pieces of it."""
    return await written(registry.collect())


async def written(families: Iterable[Metric]) -> bytes:
    """Return the page of these families, as generate_latest() writes it."""
    page: list[bytes] = []
    for family in families:
        own: list[Sample] = []
        created: list[Sample] = []
        for sample in family.samples:
            (created if sample.name == f"{family.name}_created" else own).append(sample)
        for samples, head in ((own, 2), (created, 4)):
            if samples or samples is own:
                part = Metric(family.name, family.documentation, family.type)
                part.samples = samples
                await _write(part, head, page)
    return b"".join(page)


async def _write(family: Metric, head: int, page: list[bytes]) -> None:
    """Append the family's lines to `page`: without the first lines of a later piece, of which `head` name the family."""
    first = True
    async for piece in pieces([family]):
        single = CollectorRegistry(auto_describe=False)
        single.register(_One(piece))
        text = generate_latest(single)
        # Creation times are a family of their own behind the family's two lines.
        skipped = (0 if head == 2 else 2) if first else head
        page.append(text.split(b"\n", skipped)[-1])
        first = False


class PacedPage:
    """Builds a page at most once in PERIOD_S, for all who ask. Each gets one that was begun after its call."""

    def __init__(self, build: Callable[[], Awaitable[bytes]]) -> None:
        self._build = build
        self._next: asyncio.Task[bytes] | None = None
        self._began_at = -PERIOD_S
        self._building = asyncio.Lock()

    async def get(self) -> bytes:
        """Return the next page that is begun."""
        if self._next is None:
            self._next = asyncio.create_task(self._build_next())
        return await asyncio.shield(self._next)

    async def _build_next(self) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._building:
            await asyncio.sleep(max(0.0, self._began_at + PERIOD_S - loop.time()))
            self._began_at, self._next = loop.time(), None
            return await self._build()
