"""Engines behind TCP links, whose connections a test without an event loop can break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.engines.servers import Engine
from tests.support.tcp_proxies import Link


class LinkedEngine:
    """An engine as the gateway sees it through a link: with the link's address as its id. All else is the engine's own."""

    def __init__(self, engine: Engine, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._link, self._loop = engine, link, loop
        self.instance_id = link.address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def target(self) -> str:
        """Its address with what an agent must be told of it: agents do not use the link."""
        return f"{self._engine.url}?advertise=http://{self._link.address}"

    def cut(self) -> None:
        """Break all connections through the link. New ones can be made at once."""

        async def cut() -> None:
            self._link.break_()
            self._link.repair()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(10.0)


@contextmanager
def linked(engines: Sequence[Engine]) -> Iterator[list[LinkedEngine]]:
    """Run a link for each of the engines, in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    links = [Link(engine.port) for engine in engines]

    def in_loop(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(10.0)

    try:
        for link in links:
            in_loop(link.start())
        yield [LinkedEngine(engine, link, loop) for engine, link in zip(engines, links, strict=True)]
    finally:
        for link in links:
            if link.port:
                in_loop(link.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()
