"""The engines of an agent: those of its settings, and those of Services, which come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

import structlog

from pointsman_agent.core.engine_address import EngineAddress
from pointsman_agent.io.engine_monitor import EngineMonitor

log = structlog.get_logger()

GONE = "its endpoint is gone"


class MonitoredEngines:
    """Runs a monitor for each engine. `make` returns the monitor of an address; `forget` removes what was saved of an engine that
    has left."""

    def __init__(self, make: Callable[[EngineAddress], EngineMonitor], forget: Callable[[EngineAddress], None]) -> None:
        self.all: list[EngineMonitor] = []
        """The monitors that run, in the order of their start."""
        self._make = make
        self._forget = forget
        self._tasks: dict[EngineMonitor, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._by_source: dict[str, tuple[Mapping[str, EngineAddress], frozenset[str]]] = {}
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_engines(self, source: str, engines: Mapping[str, EngineAddress], not_ready: Collection[str] = ()) -> None:
        """Set the engines of a source, by URL, and the URLs of those that are not ready. Those that no source has any more leave
        the fleet; of an engine that two sources have, the address and the readiness of the first one count. An engine whose
        options have changed is monitored anew. Mutates."""
        self._by_source[source] = engines, frozenset(not_ready)
        wanted: dict[str, EngineAddress] = {}
        unready: set[str] = set()
        for of_source, without in self._by_source.values():
            unready |= without - wanted.keys()
            wanted = {**of_source, **wanted}
        for monitor in [monitor for monitor in self.all if wanted.get(monitor.address.url) != monitor.address]:
            self._leave(monitor)
        monitored = {monitor.address.url for monitor in self.all}
        for url, address in wanted.items():
            if url not in monitored:
                self._start(address)
        for monitor in self.all:
            monitor.set_ready(monitor.address.url not in unready)

    async def failed(self) -> None:
        """Wait until a monitor ends by a fault, and raise its error."""
        await asyncio.shield(self._fault)

    async def stop(self, goodbye: str = "") -> None:
        """Stop all monitors; the state of their instances is saved. `goodbye`: why the engines end, too; empty: they do not.
        Raises the error of a monitor that fails."""
        tasks = [*self._tasks.values(), *self._leaving]
        for monitor, task in self._tasks.items():
            if goodbye:
                monitor.leave(goodbye)
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._fault.cancel()

    def _start(self, address: EngineAddress) -> None:
        monitor = self._make(address)
        task = asyncio.create_task(monitor.run(), name=f"watch {address.url}")
        task.add_done_callback(self._ended)
        self.all.append(monitor)
        self._tasks[monitor] = task

    def _leave(self, monitor: EngineMonitor) -> None:
        log.info("an engine has left its service", engine=monitor.address.url)
        self.all.remove(monitor)
        task = self._tasks.pop(monitor)
        self._leaving.add(task)
        task.add_done_callback(partial(self._left, monitor.address))
        monitor.leave(GONE)
        task.cancel()

    def _left(self, address: EngineAddress, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        # Not of an engine that is monitored anew.
        if all(monitor.address.url != address.url for monitor in self.all):
            self._forget(address)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._fault.done():
            self._fault.set_exception(error)
