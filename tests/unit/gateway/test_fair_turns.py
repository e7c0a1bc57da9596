"""Turns are shared among tenants, and among each tenant's keys, whatever each has asked for."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.tenants import Client
from pointsman_gateway.io.request.fair_turns import FairTurns

RED, RED_TOO, BLUE = Client("red", b"1"), Client("red", b"2"), Client("blue", b"3")
CLIENTS = (RED, RED_TOO, BLUE, Client("green", b"4"))


async def order_of(asked: list[Client], count: int = 1) -> list[Client]:
    """Return the order in which requests get their turns that are made at once, while all turns are taken."""
    turns, got = FairTurns(count), list[Client]()
    for _ in range(count):
        await turns.take(RED)

    async def one(client: Client) -> None:
        async with turns.turn(client):
            got.append(client)

    tasks = [asyncio.create_task(one(client)) for client in asked]
    await asyncio.sleep(0)
    for _ in range(count):
        turns.give_back()
    await asyncio.gather(*tasks)
    return got


async def test_many_requests_of_one_client_delay_another_by_one_turn() -> None:
    assert await order_of([RED] * 5 + [BLUE] * 2) == [RED, BLUE, RED, BLUE, RED, RED, RED]


async def test_more_keys_are_not_more_turns_of_a_tenant() -> None:
    assert await order_of([RED] * 3 + [RED_TOO] * 2 + [BLUE] * 3) == [
        RED, BLUE, RED_TOO, BLUE, RED, BLUE, RED_TOO, RED
    ]  # fmt: skip


@given(st.lists(st.sampled_from(CLIENTS), max_size=30), st.integers(1, 3))
def test_of_waiting_tenants_none_gets_two_turns_more_than_another(asked: list[Client], count: int) -> None:
    got = asyncio.run(order_of(asked, count))
    assert Counter(got) == Counter(asked)
    for client in set(asked):
        assert [name for name in asked if name == client] == [name for name in got if name == client]
    left, had = Counter(client.tenant for client in asked), Counter[str]()
    for client in got:
        had[client.tenant] += 1
        left[client.tenant] -= 1
        assert all(had[client.tenant] <= had[other] + 1 for other in left if left[other])


@pytest.mark.parametrize("given_first", [False, True], ids=["waiting", "at its turn"])
async def test_who_leaves_passes_its_turn_on(given_first: bool) -> None:
    turns = FairTurns(1)
    await turns.take(RED)
    leaving, staying = (asyncio.create_task(turns.take(client)) for client in (RED, BLUE))
    await asyncio.sleep(0)
    if given_first:
        turns.give_back()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    if not given_first:
        turns.give_back()
    await asyncio.wait_for(staying, 5)
    turns.give_back()
    assert (turns._free, turns._waiting) == (1, {})
