"""What a sender of pushed loads can do to the agent, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
import structlog.testing
import zmq.asyncio

from pointsman_agent.io.step_load_receiver import receive_step_loads


class QueuedMessages:
    """A ZMQ context and its socket, which has messages queued. It ends the receiver after the last one."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = iter(messages)
        self.taken = 0

    def socket(self, kind: int) -> QueuedMessages:
        return self

    def setsockopt(self, option: int, value: int) -> None: ...

    def bind(self, address: str) -> None: ...

    def close(self, linger: int) -> None: ...

    async def recv(self) -> bytes:
        try:
            message = next(self.messages)
        except StopIteration:
            raise asyncio.CancelledError from None
        self.taken += 1
        return message


def received(queued: QueuedMessages) -> asyncio.Task[None]:
    return asyncio.create_task(receive_step_loads(cast(zmq.asyncio.Context, queued), "inproc://loads", []))


# The message of an earlier version of the connector package, and one of nested lists.
OLD = msgspec.msgpack.encode({"process": 1.0, "ports": [8_000], "rank": 0, "running": 1, "waiting": 0, "kv_usage": 0.1})
NESTED = b"\x81\xa1x" + b"\x91" * 4_000 + b"\xc0"


@pytest.mark.parametrize("message", [OLD, NESTED], ids=["another version", "nested"])
async def test_a_sender_of_unreadable_messages_does_not_fill_the_log(message: bytes) -> None:
    queued = QueuedMessages([message] * 500)
    with structlog.testing.capture_logs() as logs:
        await asyncio.wait([received(queued)])
    assert queued.taken == 500
    assert [(entry["event"], entry["messages"]) for entry in logs] == [("load messages are dropped", 1)]


async def test_a_sender_that_never_pauses_does_not_keep_other_tasks_from_running() -> None:
    queued = QueuedMessages([OLD] * 1_000)
    seen: list[Any] = []

    async def other() -> None:
        seen.append(queued.taken)

    await asyncio.wait([received(queued), asyncio.create_task(other())])
    assert seen[0] < 10
