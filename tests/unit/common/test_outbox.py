"""What waits for a stream's writer: in order, together where it is ready together, and nothing lost at the end."""

from __future__ import annotations

import asyncio

from services.common.outbox import MAX_BATCH, Outbox

NEVER_S = 3_600.0


async def test_what_is_ready_together_is_taken_together() -> None:
    outbox: Outbox[int] = Outbox()
    for number in range(3):
        outbox.put(number)
    assert await outbox.take() == [0, 1, 2]


async def test_a_reader_that_waits_gets_the_next_message() -> None:
    outbox: Outbox[int] = Outbox()
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    outbox.put(1)
    assert await reader == [1]


async def test_what_need_not_hurry_goes_with_what_must() -> None:
    outbox: Outbox[int] = Outbox()
    reader = asyncio.create_task(outbox.take())
    outbox.put(1, NEVER_S)
    outbox.put(2, NEVER_S)
    await asyncio.sleep(0)
    assert not reader.done()
    outbox.put(3)
    assert await reader == [1, 2, 3]


async def test_what_need_not_hurry_goes_by_itself_in_time() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put(1, 0.001)
    outbox.put(2, NEVER_S)
    assert await asyncio.wait_for(outbox.take(), 60.0) == [1, 2]
    outbox.put(3, 0.001)
    assert await asyncio.wait_for(outbox.take(), 60.0) == [3]


async def test_many_messages_are_taken_in_turns() -> None:
    outbox: Outbox[int] = Outbox()
    for number in range(2 * MAX_BATCH + 1):
        outbox.put(number)
    taken = [await outbox.take() for _ in range(3)]
    assert [len(batch) for batch in taken] == [MAX_BATCH, MAX_BATCH, 1]
    assert [one for batch in taken for one in batch] == list(range(2 * MAX_BATCH + 1))


async def test_the_end_comes_after_all_that_was_put() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put(1, NEVER_S)
    outbox.end()
    assert await outbox.take() == [1]
    assert await outbox.take() == []
    assert await outbox.take() == []
    waiting: Outbox[int] = Outbox()
    reader = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)
    waiting.end()
    assert await reader == []
