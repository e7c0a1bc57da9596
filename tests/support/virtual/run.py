"""One seed's run: a fleet starts, things happen to it while it serves, all is well again, and then nothing may be left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from tests.support.virtual.costs import Declared, draw
from tests.support.virtual.faults import FAULTS
from tests.support.virtual.invariants import InvariantViolation, check_at_rest, check_owned
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.virtual.network import clock_offset_s, owner_of, track_tasks
from tests.support.virtual.world import BROKEN_OFF, MODELS, NONE, World

# In s of virtual time.
START_S, TROUBLE_S, EVERY_S, LONGEST_S, RECOVER_S, REST_S = 6.0, 20.0, 1.5, 10.0, 8.0, 16.0

# What befalls a fleet, and how it is told.
Trouble = Callable[[World, Callable[[str], None]], Awaitable[None]]

# Of answers in bad times. Every error is one after which clients try again.
STATUSES = {NONE, BROKEN_OFF, 200, 429, 502, 503, 504}


@dataclass
class Run:
    """What a seed came to."""

    seed: int
    failure: str = ""
    story: list[str] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)


def run(seed: int, declared: Declared | None = None, policy: str = "", trouble: Trouble | None = None) -> Run:
    """Run one seed; never raises for what it finds. It draws the size that its fleet stands for, the policy and the faults,
    where they are not given: `trouble` does to the fleet what it likes, and returns when all is about to be well."""
    result = Run(seed)
    random.seed(seed)
    loop = new_loop()
    with virtual_clocks(loop, clock_offset_s):
        try:
            watch(loop, result, _live(random.Random(seed), result, declared, policy, trouble or any_faults))
        finally:
            loop.end()
    return result


def new_loop() -> VirtualLoop:
    """A loop whose tasks belong to nodes."""
    loop = VirtualLoop(owner_of)
    track_tasks(loop)
    return loop


def watch(loop: VirtualLoop, result: Run, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and note the first thing that goes wrong anywhere."""

    def fault(_: object, context: dict[str, Any]) -> None:
        result.failure = result.failure or f"{context['message']}: {context.get('exception')!r}"

    def note(logger: object, level: str, entry: dict[str, Any]) -> None:
        if level in ("error", "critical", "exception"):
            result.failure = result.failure or f"logged: {entry}"
        raise structlog.DropEvent

    loop.set_exception_handler(fault)
    logging_before = structlog.get_config()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
    try:
        loop.run_until_complete(work)
    except Exception as error:  # whatever it is, it is this seed's finding
        result.failure = result.failure or f"{type(error).__name__}: {error}"
    finally:
        structlog.configure(**logging_before)


async def _live(rng: random.Random, result: Run, declared: Declared | None, policy: str, trouble: Trouble) -> None:
    declared = draw(rng) if declared is None else declared
    world = World(rng, declared, policy)
    with world.running():
        await asyncio.sleep(START_S)
        await story(world, result, trouble)


async def story(world: World, result: Run, trouble: Trouble) -> None:
    """What befalls a fleet that is up, until nothing may be left of it. Raises InvariantViolation."""
    loop = asyncio.get_running_loop()

    def tell(what: str) -> None:
        result.story.append(f"{loop.time() - 1_000:7.3f} {what}")

    tell(f"all is up, under {world.policy}; the size is {world.charges.declared}")
    until = loop.time() + TROUBLE_S
    load = asyncio.create_task(world.load(until + LONGEST_S + RECOVER_S))
    await trouble(world, tell)
    await check_owned(world, MODELS)
    await load
    tell("the last answer")
    await asyncio.sleep(REST_S)
    result.answers = dict(sorted(world.answers.items()))
    if world.violations:
        raise InvariantViolation(world.violations[0])
    if unknown := world.answers.keys() - STATUSES:
        raise InvariantViolation(f"answers of status {unknown}")
    await check_at_rest(world, MODELS)
    statuses = [await gateway.ask() for gateway in world.gateways.values() for _ in range(3)]
    if set(statuses) != {200}:
        raise InvariantViolation(f"all is well, and yet the answers are {statuses}")


async def any_faults(world: World, tell: Callable[[str], None]) -> None:
    """One fault after the other, as the world's random numbers have it."""
    loop, rng = asyncio.get_running_loop(), world.rng
    until = loop.time() + TROUBLE_S
    while loop.time() < until:
        await asyncio.sleep(rng.expovariate(1 / EVERY_S))
        for_s = rng.choice((rng.uniform(0.01, 1.0), rng.uniform(1.0, LONGEST_S)))
        tell(f"{rng.choice(FAULTS)(world, for_s)}, for {for_s:.3f} s")
        world.disturbances.lasts(for_s)
