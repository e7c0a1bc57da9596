"""Lets the first of several equal fetches run alone, since the instance has the prefix cached when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FirstFetches:
    """The fetches under way that others wait for."""

    def __init__(self) -> None:
        self._ended: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, fetch: Hashable) -> AsyncIterator[None]:
        """Run the block, once the first block with an equal `fetch`, if one runs, has ended in whatever way."""
        if (first := self._ended.get(fetch)) is not None:
            await first.wait()
            yield
            return
        ended = self._ended[fetch] = asyncio.Event()
        try:
            yield
        finally:
            del self._ended[fetch]
            ended.set()
