"""Work of many callers that leaves the loop to others in between."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from pointsman_router.io.rpc import turn_budget
from pointsman_router.io.rpc.turn_budget import TurnBudget


class Clock:
    """Time passes by work alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turn_budget, "time", clock)
    return clock


async def turns_of(clock: Clock, stop: asyncio.Event) -> list[float]:
    """How long each turn of the loop took."""
    turns, before = [], clock.now
    while not stop.is_set():
        await asyncio.sleep(0)
        turns.append(clock.now - before)
        before = clock.now
    return turns


@pytest.mark.parametrize("each_s", [0.004, 0.001, 0.02, 0.0001])
async def test_callers_that_come_at_once_leave_the_loop_to_others(clock: Clock, each_s: float) -> None:
    budget, stop = TurnBudget(0.005), asyncio.Event()
    others = asyncio.create_task(turns_of(clock, stop))
    done: list[int] = []

    async def call(number: int) -> None:
        assert await budget.run(partial(clock.work, each_s)) == each_s
        done.append(number)

    await asyncio.gather(*(call(number) for number in range(300)))
    stop.set()
    turns = await others
    assert done == list(range(300)), "in the order of their coming"
    assert max(turns) <= 0.005 + each_s
    assert sum(turns) == pytest.approx(300 * each_s)


async def test_a_caller_that_leaves_keeps_nobody_waiting(clock: Clock) -> None:
    budget = TurnBudget(0.005)
    await budget.run(partial(clock.work, 1.0))
    callers = [asyncio.create_task(budget.run(partial(clock.work, 1.0))) for _ in range(3)]
    await asyncio.sleep(0)
    callers[1].cancel()
    assert await callers[2] == 1.0
    assert callers[1].cancelled()
    assert clock.now == 3.0


async def test_what_work_raises_is_its_callers(clock: Clock) -> None:
    budget = TurnBudget(0.005)

    def fail() -> None:
        clock.work(1.0)
        raise LookupError

    with pytest.raises(LookupError):
        await budget.run(fail)
    assert await budget.run(partial(clock.work, 1.0)) == 1.0
