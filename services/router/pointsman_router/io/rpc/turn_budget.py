"""Limits how long one kind of work blocks the event loop when many callers do it at the same time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class TurnBudget:
    """Limits the work of all its callers to `budget_s` seconds per turn of the event loop. Other work waits for the next turns,
    in the order of the calls. A piece of work is never interrupted, so each should take less. Belongs to one event loop."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._spent_s = 0.0
        self._renewing = False
        self._waiting: deque[tuple[Callable[[], object], asyncio.Future[Any]]] = deque()

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` once the budget permits, and return what it returns. Raises what it raises."""
        if not self._waiting and self._spent_s < self._budget_s:
            with self._spending():
                return work()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        return await done

    @contextmanager
    def _spending(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - begun
            if not self._renewing:
                self._renewing = True
                asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begin a new turn of the event loop: reset the budget and run waiting work until the budget is spent."""
        self._renewing, self._spent_s = False, 0.0
        while self._waiting and self._spent_s < self._budget_s:
            work, done = self._waiting.popleft()
            if done.done():
                continue  # the caller was cancelled
            with self._spending():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
