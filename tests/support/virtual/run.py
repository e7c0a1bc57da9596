"""One seed's run: a fleet starts, things happen to it while it serves, all is well again, and then nothing may be left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import structlog

from tests.support.virtual.faults import FAULTS
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.virtual.network import clock_offset_s, owner_of, track_tasks
from tests.support.virtual.world import BROKEN_OFF, NONE, InvariantViolation, World

# In s of virtual time.
START_S, TROUBLE_S, EVERY_S, LONGEST_S, RECOVER_S, REST_S = 6.0, 20.0, 1.5, 10.0, 8.0, 16.0

# Of answers in bad times. Every error is one after which clients try again.
STATUSES = {NONE, BROKEN_OFF, 200, 429, 502, 503}


@dataclass
class Run:
    """What a seed came to."""

    seed: int
    failure: str = ""
    story: list[str] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)


def run(seed: int) -> Run:
    """Run one seed; never raises for what it finds."""
    result = Run(seed)
    random.seed(seed)
    loop = VirtualLoop(owner_of)
    track_tasks(loop)

    def fault(_: object, context: dict[str, Any]) -> None:
        result.failure = result.failure or f"{context['message']}: {context.get('exception')!r}"

    loop.set_exception_handler(fault)

    def note(logger: object, level: str, entry: dict[str, Any]) -> None:
        if level in ("error", "critical", "exception"):
            result.failure = result.failure or f"logged: {entry}"
        raise structlog.DropEvent

    logging_before = structlog.get_config()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
    with virtual_clocks(loop, clock_offset_s):
        try:
            loop.run_until_complete(_live(random.Random(seed), result))
        except Exception as error:  # whatever it is, it is this seed's finding
            result.failure = result.failure or f"{type(error).__name__}: {error}"
        finally:
            loop.end()
            structlog.configure(**logging_before)
    return result


async def _live(rng: random.Random, result: Run) -> None:
    loop = asyncio.get_running_loop()
    world = World(rng)

    def tell(what: str) -> None:
        result.story.append(f"{loop.time() - 1_000:7.3f} {what}")

    with world.running():
        await asyncio.sleep(START_S)
        tell(f"all is up, under {world.policy}")
        until = loop.time() + TROUBLE_S
        load = asyncio.create_task(world.load(until + LONGEST_S + RECOVER_S))
        while loop.time() < until:
            await asyncio.sleep(rng.expovariate(1 / EVERY_S))
            for_s = rng.choice((rng.uniform(0.01, 1.0), rng.uniform(1.0, LONGEST_S)))
            tell(f"{rng.choice(FAULTS)(world, for_s)}, for {for_s:.3f} s")
        await load
        tell("the last answer")
        await asyncio.sleep(REST_S)
        result.answers = dict(sorted(world.answers.items()))
        if unknown := world.answers.keys() - STATUSES:
            raise InvariantViolation(f"answers of status {unknown}")
        world.check_at_rest()
        statuses = [await gateway.ask() for gateway in world.gateways.values() for _ in range(3)]
        if set(statuses) != {200}:
            raise InvariantViolation(f"all is well, and yet the answers are {statuses}")
