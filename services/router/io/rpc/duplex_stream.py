"""A stream's two halves: what is read and what is written of it run at once, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

Read = TypeVar("Read")
Written = TypeVar("Written")


async def run_duplex(
    reading: Coroutine[None, None, Read], writing: Coroutine[None, None, Written], gone: Callable[[], None]
) -> tuple[Read | BaseException, Written | BaseException]:
    """Run both until either ends, then end the other; what each returned or raised. `gone` is called once, whatever ends them.

    It is called before the two are awaited: grpc cancels a call when its peer is gone, which may be while they end, and whoever
    had not been told by then would take the peer for present for ever.
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
