"""One seed's run: a fleet starts, faults occur while it serves, they end, and at the end nothing may be open."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

import structlog

from tests.support.virtual.costs import AS_BUILT, Declared, draw
from tests.support.virtual.faults import FAULTS
from tests.support.virtual.illnesses import ILLNESSES, STATUSES_OF_ILL
from tests.support.virtual.invariants import InvariantViolation, check_at_rest, check_owned
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.virtual.network import clock_offset_s, owner_of, track_tasks
from tests.support.virtual.world import BROKEN_OFF, MODELS, NONE, REJECTED, World

# Durations in virtual time, s: until the fleet is up; of faults; mean between two faults; longest fault; load after the longest
# fault; from the last answer until the fleet must be at rest.
START_S, TROUBLE_S, EVERY_S, LONGEST_S, RECOVER_S, REST_S = 6.0, 20.0, 1.5, 10.0, 8.0, 16.0

# Causes faults, and describes each by the function that it is given.
Trouble = Callable[[World, Callable[[str], None]], Awaitable[None]]

# Mean time between two illnesses, s.
ILL_EVERY_S = 3.0
# Allowed statuses of answers while faults occur. After each of the errors but 500 clients may retry: two engines have died under
# a request.
STATUSES = {NONE, BROKEN_OFF, REJECTED, 200, 429, 500, 502, 503, 504}


class Ill(enum.Enum):
    """Which ill engines a seed meets."""

    NONE = "none"
    ALONE = "alone"
    """Nothing else befalls the fleet, and all bounds of what an ill engine may cost are checked."""
    AMONG = "among"
    """Other faults befall it, too, and only what must hold in spite of those is checked."""


def ill_of(seed: int) -> Ill:
    """Return which ill engines a seed meets: one of four seeds has some."""
    return {1: Ill.ALONE, 5: Ill.AMONG}.get(seed % 8, Ill.NONE)


@dataclass
class Run:
    """Result of one seed."""

    seed: int
    failure: str = ""
    story: list[str] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)


def run(
    seed: int,
    declared: Declared | None = None,
    policy: str = "",
    trouble: Trouble | None = None,
    *,
    check_each: int = 1,
    ill: Ill | None = None,
) -> Run:
    """Run one seed and return its result; a failure is in the result, not raised.

    The seed draws the size that its fleet stands for, the policy, the faults and whether engines are ill, unless they are given.
    `trouble` causes the faults, and returns when all have ended or will end soon; without `ill` no engine is ill then. A router's
    own invariants are checked after every `check_each`-th event, which changes nothing else.
    """
    result = Run(seed)
    random.seed(seed)
    ill = ill or (Ill.NONE if trouble else ill_of(seed))
    trouble = trouble or TROUBLES[ill]
    loop = new_loop()
    with virtual_clocks(loop, clock_offset_s):
        try:
            watch(loop, result, _live(random.Random(seed), result, declared, policy, trouble, check_each, ill))
        finally:
            loop.end()
    return result


def new_loop() -> VirtualLoop:
    """Return a loop whose tasks belong to nodes."""
    loop = VirtualLoop(owner_of)
    track_tasks(loop)
    return loop


def watch(loop: VirtualLoop, result: Run, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and note in `result` the first error: an exception, a failed task, or a log event of level error or above."""

    def fault(_: object, context: dict[str, Any]) -> None:
        result.failure = result.failure or f"{context['message']}: {context.get('exception')!r}"

    def note(logger: object, level: str, entry: structlog.typing.EventDict) -> NoReturn:
        if level in ("error", "critical", "exception"):
            result.failure = result.failure or f"logged: {entry}"
        raise structlog.DropEvent

    loop.set_exception_handler(fault)
    logging_before = structlog.get_config()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
    try:
        loop.run_until_complete(work)
    except Exception as error:  # any exception is a finding of this seed
        result.failure = result.failure or f"{type(error).__name__}: {error}"
    finally:
        structlog.configure(**logging_before)


async def _live(
    rng: random.Random,
    result: Run,
    declared: Declared | None,
    policy: str,
    trouble: Trouble,
    check_each: int,
    ill: Ill,
) -> None:
    if declared is None:
        declared = draw(rng) if ill is Ill.NONE else AS_BUILT
    world = World(
        rng, declared, policy, check_each=check_each, ill=ill is not Ill.NONE, all_life_checks=ill is Ill.ALONE
    )
    with world.running():
        await asyncio.sleep(START_S)
        await story(world, result, trouble)


async def story(world: World, result: Run, trouble: Trouble) -> None:
    """Run load and faults on a fleet that is up, and check that nothing stays open. Raises InvariantViolation."""
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
    world.end_sessions()
    await asyncio.sleep(REST_S)
    result.answers = dict(sorted(world.answers.items()))
    if world.violations:
        raise InvariantViolation(world.violations[0])
    if unknown := world.answers.keys() - STATUSES - (STATUSES_OF_ILL if world.odd_requests else set()):
        raise InvariantViolation(f"answers of status {unknown}")
    await check_at_rest(world, MODELS)
    world.odd_requests = False
    statuses = [await gateway.ask() for gateway in world.gateways.values() for _ in range(3)]
    if set(statuses) != {200}:
        raise InvariantViolation(f"all is well, and yet the answers are {statuses}")


async def any_faults(world: World, tell: Callable[[str], None]) -> None:
    """Cause one fault after the other, drawn from the world's random numbers."""
    loop, rng = asyncio.get_running_loop(), world.rng
    until = loop.time() + TROUBLE_S
    while loop.time() < until:
        await asyncio.sleep(rng.expovariate(1 / EVERY_S))
        for_s = rng.choice((rng.uniform(0.01, 1.0), rng.uniform(1.0, LONGEST_S)))
        tell(f"{rng.choice(FAULTS)(world, for_s)}, for {for_s:.3f} s")
        world.disturbances.lasts(for_s)


async def any_illnesses(world: World, tell: Callable[[str], None]) -> None:
    """Let one engine after the other fall ill, drawn from the world's random numbers."""
    loop, rng = asyncio.get_running_loop(), world.rng
    until = loop.time() + TROUBLE_S
    while loop.time() < until:
        await asyncio.sleep(rng.expovariate(1 / ILL_EVERY_S))
        for_s = rng.choice((rng.uniform(1.0, LONGEST_S), rng.uniform(LONGEST_S, 2.0 * LONGEST_S)))
        tell(f"{rng.choice(ILLNESSES)(world, for_s)}, for {for_s:.3f} s")
        world.disturbances.lasts(for_s)
    # No load is left to put in again what is still ill after the load.
    await asyncio.sleep(max(world.disturbances.over_at - loop.time() - LONGEST_S, 0.0))


async def illnesses_among_faults(world: World, tell: Callable[[str], None]) -> None:
    """Cause illnesses and other faults at the same time."""
    await asyncio.gather(any_illnesses(world, tell), any_faults(world, tell))


TROUBLES: dict[Ill, Trouble] = {
    Ill.NONE: any_faults,
    Ill.ALONE: any_illnesses,
    Ill.AMONG: illnesses_among_faults,
}
