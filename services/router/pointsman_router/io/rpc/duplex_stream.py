"""Runs the reading and the writing half of a bidirectional stream concurrently, and ends both together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

Read = TypeVar("Read")
Written = TypeVar("Written")


async def run_duplex(
    reading: Coroutine[None, None, Read], writing: Coroutine[None, None, Written], gone: Callable[[], None]
) -> tuple[Read | BaseException, Written | BaseException]:
    """Run both coroutines until either ends, then cancel the other. Return the result or the exception of each.

    `gone` is called exactly once, before the two cancelled tasks are awaited. grpc cancels this call when its peer disconnects,
    possibly during that wait. Without `gone`, the peer would then count as connected for ever.
    """
    reader, writer = asyncio.ensure_future(reading), asyncio.ensure_future(writing)
    try:
        await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        reader.cancel()
        writer.cancel()
        gone()
        ended = await asyncio.gather(reader, writer, return_exceptions=True)
    return ended
