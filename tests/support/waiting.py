"""Waiting with a deadline, for what nobody tells us of."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 60.0


def until(ready: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """Ask `ready` until its answer is true and return that. Raises AssertionError with `what` and the last answer otherwise."""
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
    """The same in a running loop: `check` may be a coroutine function."""
    deadline = time.monotonic() + within_s
    while True:
        answer = check()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what} (last answer: {answer!r})"
        await asyncio.sleep(0.02)
