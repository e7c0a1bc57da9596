"""The memory budget that requests share, and what of an engine's response counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.memory_budget import Holding, MemoryBudget
from pointsman_gateway.io.engines.engine_client import AnswerTooLong, NoRoomForAnswer, Upstream, UpstreamError
from pointsman_gateway.io.engines.engine_connection import UpstreamResponse
from pointsman_gateway.io.settings import GatewaySettings


def holding(budget: MemoryBudget, holder: bytes = b"") -> Holding:
    one = Holding(budget)
    one.holder = holder
    return one


def test_what_is_let_go_makes_room() -> None:
    budget = MemoryBudget(100)
    first, second = holding(budget), holding(budget)
    assert first.take(60)
    assert not second.take(41)
    assert second.take(40)
    first.let_go()
    first.let_go()
    assert (budget.used, first.size, second.size) == (40, 0, 40)


def test_who_holds_much_leaves_room_for_others() -> None:
    budget = MemoryBudget(100)
    greedy = [holding(budget, b"a") for _ in range(20)]
    assert sum(holding.take(10) for holding in greedy) == 7
    assert holding(budget, b"b").take(25)
    for greedy_holding in greedy:
        greedy_holding.let_go()
    assert holding(budget, b"a").take(75), "alone, all that is free"


class Connection:
    """What an answer is read from: it only notes whether it was closed."""

    closed = False

    def abort(self) -> None:
        self.closed = True

    def pause(self) -> None: ...
    def resume(self) -> None: ...


def answer(pieces: Iterable[bytes], length: int | None = None, *, whole: bool = True) -> UpstreamResponse:
    connection: Any = Connection()
    found = UpstreamResponse(connection)
    found.headers = Headers([] if length is None else [("Content-Length", str(length))])
    for piece in pieces:
        found.take(piece)
    if whole:
        found.end(None)
    return found


async def read(of: UpstreamResponse, held: Holding, limit: int | None = None) -> bytes:
    return await Upstream(GatewaySettings()).read_all(of, limit, held)


@pytest.mark.parametrize("length", [None, 80])
async def test_an_answer_counts_until_it_is_let_go(length: int | None) -> None:
    budget = MemoryBudget(100)
    held = holding(budget)
    assert await read(answer([b"x" * 50, b"x" * 30], length), held) == b"x" * 80
    assert budget.used == 80
    assert await read(answer([b"y" * 90], None if length is None else 90), held) == b"y" * 90, (
        "it replaces the first response in the budget"
    )
    assert budget.used == 90


@pytest.mark.parametrize("length", [None, 80])
async def test_what_finds_no_room_is_closed_and_counts_nothing(length: int | None) -> None:
    budget = MemoryBudget(100)
    first, second = holding(budget), holding(budget)
    assert first.take(30)
    late = answer([b"x" * 50, b"x" * 30], length, whole=False)
    connection: Any = late._carrier
    with pytest.raises(NoRoomForAnswer) as refused:
        await read(late, second)
    assert refused.value.headers() == {"Retry-After": "1"}
    assert (connection.closed, budget.used) == (True, 30)


async def test_an_answer_that_ends_badly_counts_nothing() -> None:
    budget = MemoryBudget(100)
    broken = answer([b"x" * 50], 80, whole=False)
    broken.end(UpstreamError("broke off"))
    for failing, error in (
        (broken, UpstreamError),
        (answer([], 80), AnswerTooLong),
        (answer([b"x" * 80]), AnswerTooLong),
    ):
        held = holding(budget)
        with pytest.raises(error):
            await read(failing, held, 60 if error is AnswerTooLong else None)
        assert budget.used == 0


async def test_an_answer_that_never_finds_room_is_not_to_be_tried_again() -> None:
    held = holding(MemoryBudget(100))
    with pytest.raises(AnswerTooLong):
        await read(answer([], 101), held)
