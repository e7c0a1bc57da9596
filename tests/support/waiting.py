"""Polling with a deadline, for states that no event reports."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Default timeout of a wait, s.
WITHIN_S = 60.0


def until(ready: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """Call `ready` until its result is true; return it. Raises AssertionError with `what` and the last result."""
    deadline = time.monotonic() + within_s
    while True:
        answer = ready()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last answer: {answer!r})")
        time.sleep(0.05)


async def eventually(
    check: Callable[[], Awaitable[Any] | object], what: str = "what is waited for", within_s: float = WITHIN_S
) -> Any:
    """Like until(), in a running event loop. `check` may be a coroutine function."""
    deadline = time.monotonic() + within_s
    while True:
        answer = check()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what} (last answer: {answer!r})"
        await asyncio.sleep(0.02)
