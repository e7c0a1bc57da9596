"""The stream of decisions to the console as server-sent events. Each event is encoded once for all viewers, contains at most as
many decisions as people can follow, and is dropped for viewers that are too slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format

from pointsman.router.v1 import fleet_pb2
from pointsman_router.io.telemetry.decision_log import DecisionLog, LoggedDecision

# Interval between two events, s.
PERIOD_S = 0.25
# Maximum number of decisions in an event: the newest. Of the others, only their number is sent.
AT_MOST = 20
# Maximum number of messages that wait for a viewer, 30 s of a busy fleet. A viewer with more is disconnected; it reconnects and
# requests the list.
WAITING = 120
# A comment that keeps a connection without decisions alive.
NOTHING = ": nothing happened\n\n"


class Viewer:
    """One viewer's bounded queue of messages. `drop` is called if the queue is full, to end a write that waits for the viewer."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self._waiting: deque[str] = deque()
        self._some = asyncio.Event()
        self.dropped = False

    def tell(self, message: str) -> None:
        """Queue a message. Drops the viewer if its queue is full."""
        if len(self._waiting) >= WAITING:
            self._waiting.clear()
            self.dropped = True
            self._drop()
        else:
            self._waiting.append(message)
        self._some.set()

    async def next(self, within_s: float) -> str:
        """Wait for messages and return all that are queued, or a comment if none arrives within `within_s`; "" if the viewer is
        dropped."""
        if not self._waiting and not self.dropped:
            self._some.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._some.wait()
            if not self._waiting and not self.dropped:
                return NOTHING
        text = "".join(self._waiting)
        self._waiting.clear()
        return text


class DecisionStream:
    """Sends the log's new and changed decisions to all viewers. Costs nothing without viewers."""

    def __init__(self, log: DecisionLog, to_wire: Callable[[LoggedDecision], fleet_pb2.Decision]) -> None:
        self._log = log
        self._to_wire = to_wire
        self._viewers: set[Viewer] = set()
        self._pump: asyncio.Task[None] | None = None

    def join(self, drop: Callable[[], None]) -> Viewer:
        """Add a viewer, until `leave`. `drop`: see Viewer."""
        viewer = Viewer(drop)
        self._viewers.add(viewer)
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer. Stops the work if it was the last one."""
        self._viewers.discard(viewer)
        if not self._viewers and self._pump is not None:
            self._pump.cancel()
            self._pump = None

    def tell(self, message: str) -> None:
        """Queue a message for all viewers."""
        for viewer in self._viewers:
            if not viewer.dropped:
                viewer.tell(message)

    async def _run(self) -> None:
        watch = self._log.watch()
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                news: dict[str, LoggedDecision] = {}
                waiting, dropped = watch.read_all()
                for logged in waiting:
                    # Of a decision that occurs twice, only the later state is sent.
                    news.pop(logged.decision.decision_id, None)
                    news[logged.decision.decision_id] = logged
                if news:
                    self.tell(await self._message(list(news.values()), dropped))
        finally:
            self._log.unwatch(watch)

    async def _message(self, news: list[LoggedDecision], dropped: int) -> str:
        decisions: list[dict[str, Any]] = []
        for logged in news[-AT_MOST:]:
            decisions.append(json_format.MessageToDict(self._to_wire(logged)))
            await asyncio.sleep(0)  # Let placements run in between.
        return f"data: {json.dumps({'decisions': decisions, 'skipped': len(news) - len(decisions) + dropped})}\n\n"
