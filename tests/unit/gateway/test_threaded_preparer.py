"""Work that waits for a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from pointsman_gateway.core.tenants import ANYONE, Client
from pointsman_gateway.core.tokens.encoders import LARGE_PIECE_CHARS
from pointsman_gateway.core.tokens.render_budget import OverBudget, Unrenderable
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.request.threaded_preparer import COUNTED_BYTES, TURN_BYTES, ThreadedPreparer, _Threads
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    """An executor would keep the bodies of all that wait, whoever has gone."""
    threads, begun, go_on = _Threads(1, "test"), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def busy() -> str:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return "done"

    try:
        first = asyncio.create_task(threads.run(ANYONE, busy))
        await begun.wait()
        first.cancel()  # it is left, and its thread goes on
        waiting = [asyncio.create_task(threads.run(ANYONE, lambda: "never")) for _ in range(9)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)
        assert threads._executor._work_queue.qsize() == 0
        last = asyncio.create_task(threads.run(ANYONE, lambda: "last"))
        go_on.set()
        assert await last == "last"
    finally:
        go_on.set()
        threads.close()


async def test_clients_take_turns_at_a_thread() -> None:
    threads, go_on, done = _Threads(1, "test"), threading.Event(), list[str]()
    red, blue = Client("red", b"1"), Client("blue", b"2")
    try:
        busy = asyncio.create_task(threads.run(red, go_on.wait))
        works = [(client, partial(done.append, client.tenant)) for client in (red, red, red, blue)]
        tasks = [asyncio.create_task(threads.run(client, work)) for client, work in works]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(busy, *tasks)
        assert done == ["red", "blue", "red", "red"]
    finally:
        go_on.set()
        threads.close()


async def test_an_error_keeps_no_body_in_memory() -> None:
    class Body:
        pass

    threads, kept = _Threads(1, "test"), list[weakref.ref[Body]]()

    def refused() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            await threads.run(ANYONE, refused)
        await asyncio.wait_for(threads.run(ANYONE, lambda: None), 5)  # the thread itself has let go of the first work
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()
        threads.close()


async def test_bodies_that_arrive_at_once_are_prepared_in_several_turns_of_the_loop() -> None:
    preparer = ThreadedPreparer(GatewayMetrics(cache := TokenCache(0)), cache)
    loop, turn, seen = asyncio.get_running_loop(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def prepare(size: int) -> None:
        await preparer.loop_turn(size)
        seen.append((turn, size))

    count()
    sizes = [TURN_BYTES * 2, *[TURN_BYTES // 3] * 7, TURN_BYTES, 1]
    await asyncio.gather(*map(prepare, sizes))
    preparer.close()
    for at in {at for at, _ in seen}:
        together = [size for its_turn, size in seen if its_turn == at]
        assert len(together) == 1 or sum(together) <= TURN_BYTES
    assert sorted(size for _, size in seen) == sorted(sizes)
    assert len({at for at, _ in seen}) < len(sizes)


async def test_a_body_is_rendered_in_another_turn_of_the_loop_than_it_is_decoded() -> None:
    """Each may take milliseconds."""
    preparer = ThreadedPreparer(GatewayMetrics(cache := TokenCache(0)), cache)
    turn, rendered = 0, list[int]()

    class Rendering:
        def prepare(self, *_: object, **__: object) -> None:
            rendered.append(turn)
            raise Unrenderable

    call = SimpleNamespace(light=True, payload=b"x" * (COUNTED_BYTES + 1))
    context: Any = SimpleNamespace(
        call=call, client=ANYONE, state=SimpleNamespace(pool=SimpleNamespace(max_model_len=9))
    )
    tokenizer: Any = Rendering()

    async def prepare() -> None:
        await preparer.loop_turn(TURN_BYTES)  # as it is decoded
        asyncio.get_running_loop().call_soon(next_turn)
        with suppress(Unrenderable):
            await preparer._tokens(context, tokenizer)

    def next_turn() -> None:
        nonlocal turn
        turn += 1

    await prepare()
    preparer.close()
    assert rendered == [1]


async def test_a_light_body_with_a_large_prompt_waits_for_a_turn_as_large_bodies_do() -> None:
    """Its rendering takes as much memory as theirs."""
    preparer = ThreadedPreparer(GatewayMetrics(cache := TokenCache(0)), cache)
    threads, ends = list[str](), list[asyncio.Event]()

    class Rendering:
        def prepare(self, *_: object, light: bool = False) -> None:
            if light:
                raise OverBudget("steps")
            threads.append(threading.current_thread().name)
            raise Unrenderable

    async def hold() -> None:
        ends.append(end := asyncio.Event())
        async with preparer.large_turns.turn(ANYONE):
            await end.wait()

    call = SimpleNamespace(light=True, payload=b"x")
    pool = SimpleNamespace(max_model_len=9)
    context: Any = SimpleNamespace(call=call, client=ANYONE, state=SimpleNamespace(pool=pool))
    tokenizer: Any = Rendering()
    try:
        holding = [asyncio.create_task(hold()) for _ in range(preparer.large_turns._free)]
        rendering = asyncio.create_task(preparer._tokens(context, tokenizer))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.light
        assert threads == []
        ends[0].set()
        with suppress(Unrenderable):
            await rendering
        assert [name.partition("_")[0] for name in threads] == ["large-bodies"]
    finally:
        for end in ends:
            end.set()
        await asyncio.gather(*holding)
        preparer.close()


async def test_a_large_piece_is_encoded_alone() -> None:
    """By a thread of its own: it takes much memory."""
    preparer = ThreadedPreparer(GatewayMetrics(cache := TokenCache(0)), cache)
    names: list[str] = []

    class Pending:
        def __init__(self, longest: int) -> None:
            self.longest = longest

        async def tokenize_by(self, run_in_thread: Any) -> None:
            await run_in_thread(lambda: names.append(threading.current_thread().name))
            raise Unrenderable

    context: Any = SimpleNamespace(client=ANYONE)
    for longest in (LARGE_PIECE_CHARS, LARGE_PIECE_CHARS + 1):
        pending: Any = Pending(longest)
        with suppress(Unrenderable):
            await preparer._tokenized(context, pending)
    preparer.close()
    assert [name.partition("_")[0] for name in names] == ["tokenizing", "large-pieces"]
    assert preparer._large_pieces._executor._max_workers == 1
