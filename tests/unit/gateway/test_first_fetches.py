"""Equal fetches wait for the first of them, and for no longer."""

from __future__ import annotations

import asyncio

import pytest

from pointsman_gateway.io.request.first_fetches import FirstFetches


@pytest.mark.parametrize("how", ["ends", "fails", "is cancelled"])
async def test_equal_fetches_run_together_once_the_first_has_ended(how: str) -> None:
    fetches, go, running = FirstFetches(), asyncio.Event(), list[int]()

    async def fetch(name: str, number: int) -> None:
        async with fetches.turn(name):
            running.append(number)
            await go.wait()
            if number == 0 and how == "fails":
                raise OSError

    tasks = [asyncio.create_task(fetch(name, number)) for number, name in enumerate(["a", "a", "a", "b"])]
    await asyncio.sleep(0)
    assert running == [0, 3]
    tasks[1].cancel()
    if how == "is cancelled":
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert running == [0, 3, 2]
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert running == [0, 3, 2]
    await asyncio.wait_for(fetch("a", 4), 10)
    assert running[-1] == 4
