"""A live KV event that arrives at the moment at which the subscriber's wait for it times out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io import kv_subscriber
from pointsman_agent.io.kv_subscriber import KvEventSource, KvSubscriber
from tests.support.kv_events import store

PATIENCE_S = 0.05


class LateSocket:
    """A SUB socket whose first message arrives in the same turn of the event loop as the subscriber's timeout."""

    def __init__(self) -> None:
        self.asked = 0

    def connect(self, *_: object, **__: object) -> None:
        """Do nothing."""

    setsockopt = subscribe = close = connect

    def recv_multipart(self) -> asyncio.Future[list[bytes]]:
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[list[bytes]] = loop.create_future()
        self.asked += 1
        if self.asked == 1:
            payload = msgspec.msgpack.encode([0.0, [store((1,))], 0])
            loop.call_later(PATIENCE_S * 0.9, coming.set_result, [b"", (0).to_bytes(8, "big"), payload])
            # Block the event loop, as on a busy machine.
            loop.call_later(PATIENCE_S * 0.5, time.sleep, PATIENCE_S)
        return coming


class Context:
    """Has one socket."""

    def socket(self, kind: int) -> Any:
        return LateSocket()


async def test_no_message_is_lost_that_comes_as_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "FIRST_TAIL_CHECK_S", PATIENCE_S)
    blocks, changed = CachedBlocks("tiny"), asyncio.Event()
    # Without a replay socket a lost message is not sent again.
    context: Any = Context()
    subscriber = KvSubscriber(context, KvEventSource("inproc://events"), blocks, changed.set)
    assert await subscriber.start()
    running = asyncio.create_task(subscriber.run())
    async with asyncio.timeout(20):
        await changed.wait()
    assert subscriber.applied == 0
    assert len(blocks.blocks) == 1
    running.cancel()
    await asyncio.wait([running])
    subscriber.close()
