"""The queue before a stream's writer: order, batches of what is ready together, and no loss at the end."""

from __future__ import annotations

import asyncio

from pointsman_common.io.batch_queue import MAX_BATCH, MAX_BATCH_BYTES, BatchQueue

NEVER_S = 3_600.0


async def test_what_is_ready_together_is_taken_together() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    for number in range(3):
        batch_queue.put(number)
    assert await batch_queue.take() == [0, 1, 2]


async def test_a_reader_that_waits_gets_the_next_message() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    reader = asyncio.create_task(batch_queue.take())
    await asyncio.sleep(0)
    assert not reader.done()
    batch_queue.put(1)
    assert await reader == [1]


async def test_what_need_not_hurry_goes_with_what_must() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    reader = asyncio.create_task(batch_queue.take())
    batch_queue.put(1, NEVER_S)
    batch_queue.put(2, NEVER_S)
    await asyncio.sleep(0)
    assert not reader.done()
    batch_queue.put(3)
    assert await reader == [1, 2, 3]


async def test_what_need_not_hurry_goes_by_itself_in_time() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    batch_queue.put(1, 0.001)
    batch_queue.put(2, NEVER_S)
    assert await asyncio.wait_for(batch_queue.take(), 60.0) == [1, 2]
    batch_queue.put(3, 0.001)
    assert await asyncio.wait_for(batch_queue.take(), 60.0) == [3]


async def test_many_messages_are_taken_in_turns() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    for number in range(2 * MAX_BATCH + 1):
        batch_queue.put(number)
    taken = [await batch_queue.take() for _ in range(3)]
    assert [len(batch) for batch in taken] == [MAX_BATCH, MAX_BATCH, 1]
    assert [item for batch in taken for item in batch] == list(range(2 * MAX_BATCH + 1))


async def test_the_end_comes_after_all_that_was_put() -> None:
    batch_queue: BatchQueue[int] = BatchQueue()
    batch_queue.put(1, NEVER_S)
    batch_queue.end()
    assert await batch_queue.take() == [1]
    assert await batch_queue.take() == []
    assert await batch_queue.take() == []
    waiting: BatchQueue[int] = BatchQueue()
    reader = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)
    waiting.end()
    assert await reader == []


async def test_a_batch_has_a_size_and_a_large_message_goes_alone() -> None:
    sizes = {"small": 1, "half": MAX_BATCH_BYTES // 2, "large": MAX_BATCH_BYTES + 1}
    batch_queue: BatchQueue[str] = BatchQueue(sizes.__getitem__)
    put = ["small", "half", "half", "large", "large", "small", "small"]
    for message in put:
        batch_queue.put(message)
    taken = [await batch_queue.take() for _ in range(5)]
    assert taken == [["small", "half"], ["half"], ["large"], ["large"], ["small", "small"]]
