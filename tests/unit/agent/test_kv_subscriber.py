"""Live KV events: one that arrives as the wait for it times out, and what is logged of unusable ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io import kv_subscriber
from pointsman_agent.io.kv_subscriber import KvEventSource, KvSubscriber
from tests.support.kv_events import store

PATIENCE_S = 0.05


async def test_no_message_is_lost_that_comes_as_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "FIRST_TAIL_CHECK_S", PATIENCE_S)
    blocks, changed = CachedBlocks("tiny"), asyncio.Event()
    context = zmq.asyncio.Context()
    events = context.socket(zmq.PUB)
    events.bind("inproc://events")
    # Without a replay socket a lost message is not sent again.
    subscriber = KvSubscriber(context, KvEventSource("inproc://events"), blocks, changed.set)
    assert await subscriber.start()
    running = asyncio.create_task(subscriber.run())
    loop = asyncio.get_running_loop()
    # The message arrives in the same turn of the event loop as the timeout, because the loop is blocked, as on a busy machine.
    loop.call_later(PATIENCE_S * 0.5, time.sleep, PATIENCE_S)
    loop.call_later(PATIENCE_S * 0.9, events.send_multipart, message(0, store((1,))))
    async with asyncio.timeout(20):
        await changed.wait()
    assert subscriber.applied == 0
    assert len(blocks.blocks) == 1
    running.cancel()
    await asyncio.wait([running])
    subscriber.close()
    context.destroy(linger=0)


class QueuedMessages:
    """A ZMQ context and its SUB socket, which has messages queued; `taken` is set when the subscriber waits for more."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        self._messages = iter(messages)
        self.taken = asyncio.Event()

    def socket(self, kind: int) -> QueuedMessages:
        return self

    def connect(self, *_: object, **__: object) -> None:
        """Do nothing."""

    setsockopt = subscribe = close = connect

    async def poll(self, timeout_ms: float) -> int:
        await asyncio.sleep(timeout_ms / 1e3 if self.taken.is_set() else 0)
        return 0 if self.taken.is_set() else zmq.POLLIN

    async def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        if (message := next(self._messages, None)) is None:
            self.taken.set()
            raise zmq.Again
        return message


def message(seq: int, *events: object) -> list[bytes]:
    return [b"", seq.to_bytes(8, "big", signed=True), msgspec.msgpack.encode([0.0, events, 0])]


async def after(*messages: list[bytes]) -> tuple[KvSubscriber, list[Any]]:
    """Return a subscriber that has received these messages, and what it has logged: event, level, and the rest."""
    queued = QueuedMessages(list(messages))
    context = cast(zmq.asyncio.Context, queued)
    subscriber = KvSubscriber(context, KvEventSource("inproc://events"), CachedBlocks("tiny"), lambda: None)
    with capture_logs() as logs:
        assert await subscriber.start()
        running = asyncio.create_task(subscriber.run())
        async with asyncio.timeout(20):
            await queued.taken.wait()
        running.cancel()
        await asyncio.wait([running])
    subscriber.close()
    assert all(entry.pop("events") == "inproc://events" for entry in logs)
    return subscriber, [(entry.pop("event"), entry.pop("log_level"), entry) for entry in logs]


NAMED = {"type": "BlockStored", "block_hashes": [1]}


def swapped(message: list[bytes], value: bytes, other: bytes) -> list[bytes]:
    return [*message[:2], message[2].replace(value, other)]


UNUSABLE: dict[str, tuple[Callable[[int], list[bytes]], str]] = {
    "a hash of another type": (lambda seq: message(seq, ["BlockStored", "hash", 7]), "batch 1 cannot be decoded: "),
    "no batch": (lambda seq: [*message(seq)[:2], b"\xc1"], "batch 1 cannot be decoded: "),
    "no UTF-8": (
        lambda seq: swapped(message(seq, {**NAMED, "medium": "GPUX"}), b"GPUX", b"GP\xff\xff"),
        "batch 1 cannot be decoded: ",
    ),
    "a deep value": (
        lambda seq: swapped(
            message(seq, {**NAMED, "lookahead_token_ids": "GPUX"}), b"\xa4GPUX", b"\x91" * 5_000 + b"\x05"
        ),
        "batch 1 cannot be decoded: ",
    ),
    "two frames": (lambda seq: message(seq)[:2], "a message of 2 frames"),
    "a short number": (lambda _: [b"", b"\x01", b""], "a sequence frame of 1 bytes"),
}


@pytest.mark.parametrize(("unusable", "problem"), UNUSABLE.values(), ids=UNUSABLE)
async def test_events_that_cannot_be_used_clear_the_copy_and_are_logged_once(
    unusable: Callable[[int], list[bytes]], problem: str
) -> None:
    subscriber, logged = await after(message(0, store((1,))), unusable(1), unusable(2))
    unused, cleared = logged
    assert unused[:2] == ("KV events do not arrive or cannot be used", "warning")
    assert unused[2]["reason"].startswith(problem)
    assert unused[2]["times"] == 1
    assert cleared == (
        *("the copy of the engine's cache is cleared", "warning"),
        {"reason": unused[2]["reason"], "keys": 2},
    )
    assert subscriber.problem
    assert subscriber.counts.undecodable == 2


async def test_events_of_unknown_types_or_fields_are_skipped_and_each_is_logged_once() -> None:
    odd = {"type": "BlockPinned", "block_hashes": [1]}
    newer = {**msgspec.to_builtins(store((2,))), "colour": 7}
    subscriber, logged = await after(*(message(seq, odd, newer) for seq in range(3)))
    [(event, level, rest)] = logged
    assert event == "KV events have types or fields that are not known; they are skipped"
    assert (level, rest) == ("warning", {"names": ["BlockPinned", "BlockStored.colour"]})
    assert not subscriber.problem


async def test_a_batch_is_used_whatever_the_fields_have_that_are_not_known() -> None:
    newer = {**msgspec.to_builtins(store((2,))), "colour": "GPUX"}
    for odd in (b"\xa4GP\xff\xff", b"\x91" * 100 + b"\x81\x80\x05"):
        subscriber, logged = await after(swapped(message(0, newer), b"\xa4GPUX", odd))
        assert not logged
        assert (subscriber.problem, subscriber.counts.undecodable, subscriber.applied) == ("", 0, 0)
