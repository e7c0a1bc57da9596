"""Runs seeds on a large fleet in full size. The fleet is built once, and each seed continues from there in a forked process.

`python -m tests.virtual forks [SEEDS [SESSIONS [KEYS [INSTANCES]]]]`: by default 20 seeds on a million sessions, 4 million keys
and 256 instances, which needs 9 GB of memory. Routers are charged as in any virtual fleet, for the sizes that are built.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

from pointsman_agent.core.kv_events import BlockRemoved
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.placement_types import InstanceState
from tests.support.virtual import engines
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.virtual.network import clock_offset_s
from tests.support.virtual.run import Run, any_faults, new_loop, story, watch
from tests.support.virtual.world import MODELS, World

SEEDS, SESSIONS, KEYS, INSTANCES = 20, 1_000_000, 4_000_000, 256
# Number of blocks of one cached prompt.
CHAIN_BLOCKS = 250
# Interval between two saves of an agent's state, s. Saving 15,000 keys of each of 256 instances every 2 s would be too slow.
SAVE_S = 30.0


def main(arguments: list[str]) -> int:
    """Run the seeds; exits the process, with status 1 if a seed failed."""
    seeds, sessions, keys, instances = [*map(int, arguments), *(SEEDS, SESSIONS, KEYS, INSTANCES)[len(arguments) :]]
    began = time.process_time()
    gc.disable()
    loop, failed = new_loop(), 0
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engines, "SAVE_S", SAVE_S))
        stack.enter_context(virtual_clocks(loop, clock_offset_s))
        result, worlds = Run(-1), list[World]()

        async def begin() -> None:
            worlds.append(_build(keys // instances, instances, sessions))
            stack.enter_context(worlds[0].running())
            await _settle(worlds[0], sessions)

        watch(loop, result, begin())
        if result.failure:
            print(f"the fleet is not up: {result.failure}", flush=True)
            os._exit(1)
        gc.freeze()
        gc.enable()
        print(f"built in {time.process_time() - began:.0f} s of CPU", flush=True)
        for seed in range(seeds):
            child = os.fork()
            if not child:
                os._exit(_go_on(loop, worlds[0], result, seed))
            failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        print(f"{failed} of {seeds} failed", flush=True)
        # Exit without cleaning up: ending the fleet in order would take longer than a seed.
        os._exit(min(failed, 1))


def _build(keys: int, instances: int, sessions: int) -> World:
    """Build a fleet whose engines have `keys` cached keys each; the fleet is not started."""
    world = World(random.Random(0), policy="unified", engines=instances, capacity_blocks=keys)
    world.check_each = 0
    for at, engine in enumerate(world.engines.values()):
        engine.fill(_chains(at, keys // CHAIN_BLOCKS))
    for model in MODELS:
        owners = [engine.instance_id for engine in world.engines.values() if engine.model == model]
        count = sessions // len(MODELS)
        world.redis.prebuild(model, {f"{model}-{at}": owners[at % len(owners)] for at in range(count)})
    return world


def _chains(engine: int, count: int) -> Iterator[list[int]]:
    """Yield prompts of CHAIN_BLOCKS blocks without a common prefix. Their tokens are small ints, which Python shares."""
    for number in range(count):
        yield [*engine.to_bytes(4, "big"), *number.to_bytes(4, "big"), *([7] * (CHAIN_BLOCKS * KEY_TOKENS - 8))]


async def _settle(world: World, sessions: int) -> None:
    """Wait until the routers know all instances, keys and sessions."""
    while True:
        await asyncio.sleep(1.0)
        routers = world.live_routers()
        known = all(
            len(router.state.instances.records()) == len(world.engines)
            and all(record.state is InstanceState.READY for record in router.state.instances.records())
            for router in routers
        )
        if known and sum(len(router.state.affinity) for router in routers) >= sessions // len(MODELS) * len(MODELS):
            break
    for engine in world.engines.values():
        # Agents have read these events and do not need them again. The events take much memory.
        engine.log[:] = [BlockRemoved(block_hashes=[], medium="GPU") for _ in engine.log]


def _go_on(loop: VirtualLoop, world: World, result: Run, seed: int) -> int:
    """Run one seed's faults in this process; return 1 if the seed failed.

    `result`: must be the one of the build, because loggers that were made then write to it.
    """
    began, result.seed = time.process_time(), seed
    random.seed(seed)
    world.rng.seed(seed)
    watch(loop, result, story(world, result, any_faults))
    spent_s = time.process_time() - began
    print(f"seed {seed}: {result.failure or 'ok'}; {result.answers}; {spent_s:.0f} s of CPU", flush=True)
    if result.failure:
        print("\n".join(result.story), flush=True)
    return 1 if result.failure else 0
