"""The faults of a virtual fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pointsman.router.v1 import fleet_pb2
from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.io.rpc import fleet_service
from tests.support.virtual.routers import RouterNode
from tests.support.virtual.store import LATEST_S
from tests.support.virtual.store import NAME as REDIS
from tests.support.virtual.world import World

# Maximum number of decisions that one WhatIf call makes again.
MANY_DECISIONS = 1_000
# Maximum number of decisions that one recorded decision stands for. A turn handles at least one, so this sets its minimum cost.
MOST_ALIKE = 50.0
# Causes a fault for a duration, s; returns the fault's description for the story.
Fault = Callable[[World, float], str]


def _dies(group: str) -> Fault:
    def die(world: World, for_s: float) -> str:
        ones: dict[str, Any] = vars(world)[group]
        name = world.rng.choice(sorted(ones))
        process = ones[name]
        if not process.up:
            return f"{name} is dead already"
        world.disturbances.note(name, for_s)
        process.kill()
        asyncio.get_running_loop().call_later(for_s, lambda: process.up or process.start())
        return f"{name} dies"

    return die


def _stops(group: str) -> Fault:
    def stop(world: World, for_s: float) -> str:
        name = world.rng.choice(sorted(vars(world)[group]))
        world.disturbances.note(name, for_s)
        world.network.stop(vars(world)[group][name].node, for_s)
        return f"{name} stops"

    return stop


def _clock_jumps(group: str) -> Fault:
    def jump(world: World, for_s: float) -> str:
        process = vars(world)[group][world.rng.choice(sorted(vars(world)[group]))]
        process.node.clock_s = world.rng.choice((world.rng.uniform(-5.0, 5.0), world.rng.uniform(-3_600.0, 3_600.0)))
        return f"the clock of {process.node.name} is {process.node.clock_s:+.3f} s off"

    return jump


def _redis_clock_jumps(world: World, for_s: float) -> str:
    world.disturbances.note(REDIS, 0.0)
    world.redis.clock_s = world.rng.choice((world.rng.uniform(-5.0, 5.0), world.rng.uniform(-3_600.0, 3_600.0)))
    return f"the clock of redis is {world.redis.clock_s:+.3f} s off"


def _redis_stops(world: World, for_s: float) -> str:
    world.disturbances.note(REDIS, for_s)
    world.redis.stopped_until = asyncio.get_running_loop().time() + for_s
    return "redis stops"


def _router_ends(world: World, for_s: float) -> str:
    address = world.rng.choice(sorted(world.routers))
    router = world.routers[address]
    if not router.up:
        return f"{address} is dead already"
    world.disturbances.note(address, for_s)

    async def roll() -> None:
        await router.stop()
        await asyncio.sleep(for_s)
        router.start()

    world.chores.append(asyncio.create_task(roll()))
    return f"{address} stops in order"


def _drains(world: World, for_s: float) -> str:
    """Drain an instance for `for_s`, in one case of two with its requests, then resume it until that has reached all routers.

    The order is repeated until a router reports that all replicas have it, and all routers know the instance as not draining. A
    router that has just started without Redis knows no orders.
    """
    instance_id = world.engines[world.rng.choice(sorted(world.engines))].instance_id
    move = world.rng.random() < 0.5

    def known(node: RouterNode) -> InstanceRecord | None:
        return node.router.state.instances.get(instance_id) if node.router is not None else None

    async def order(node: RouterNode, *, resume: bool) -> bool:
        if node.router is None or (record := known(node)) is None:
            return False
        # Waits without a limit: a stopped router that has not answered may still carry out the order.
        ordering = node.node.spawn(node.router.drain(record.info, resume=resume, move=move))
        await asyncio.wait([ordering])
        return not ordering.cancelled() and ordering.exception() is None and bool(ordering.result())

    async def roll() -> None:
        await order(world.routers[world.rng.choice(sorted(world.routers))], resume=False)
        await asyncio.sleep(for_s)
        everywhere, nodes = False, list(world.routers.values())
        while True:
            not_back = [node for node in nodes if (instance := known(node)) is None or instance.draining]
            if everywhere and not not_back:
                return
            everywhere = await order((not_back or nodes)[0], resume=True)
            await asyncio.sleep(1.0)

    world.chores.append(asyncio.create_task(roll()))
    return f"{instance_id} is to drain{', and its requests move' if move else ''}"


def _cut(ones: str, others: str) -> Fault:
    def cut(world: World, for_s: float) -> str:
        names: dict[str, Any] = {**vars(world), "redis_itself": (REDIS,)}
        one, other = (world.rng.choice(sorted(names[group])) for group in (ones, others))
        if other == REDIS:
            world.disturbances.note(one, for_s)
        world.network.cut(one, other, for_s)
        return f"no way between {one} and {other}"

    return cut


def metrics_fail(world: World, for_s: float) -> str:
    """An engine answers requests, and its page of metrics does not come. That disturbs nothing."""
    engine = world.engines[world.rng.choice(sorted(world.engines))]
    loop = asyncio.get_running_loop()
    engine.unreadable = loop.time()
    loop.call_later(for_s, setattr, engine, "unreadable", None)
    return f"{engine.instance_id} has no metrics"


def redis_down(world: World, for_s: float) -> str:
    world.disturbances.note(REDIS, for_s)
    world.redis.down = True
    asyncio.get_running_loop().call_later(for_s, setattr, world.redis, "down", False)
    return "redis is down"


def redis_flaky(world: World, for_s: float) -> str:
    world.disturbances.note(REDIS, for_s + LATEST_S)
    world.redis.flaky = True
    asyncio.get_running_loop().call_later(for_s, setattr, world.redis, "flaky", False)
    return "redis loses replies"


def _redis_forgets(world: World, for_s: float) -> str:
    world.redis.wipe()
    redis_down(world, min(for_s, 1.0))
    return "redis restarts empty"


def operators_ask(world: World, for_s: float) -> str:
    """Send WhatIf to each router, for all decisions that the router has recorded. In a large fleet these stand for many."""
    for node in world.routers.values():
        if node.router is None or not (known := sum(1 for _ in node.router.decisions.newest(lambda _: True))):
            continue
        if world.charges.declared.large:
            world.charges.decisions = min(max(MANY_DECISIONS / known, 1.0), MOST_ALIKE)
        asked = fleet_pb2.WhatIfRequest(last=MANY_DECISIONS, policy=fleet_pb2.Policy(name="lmetric"))
        node.node.spawn(fleet_service.FleetService(node.router).WhatIf(asked, None))
    return "operators ask what-if"


agent_dies = _dies("agents")

FAULTS: tuple[Fault, ...] = (
    _dies("routers"),
    _router_ends,
    _dies("gateways"),
    agent_dies,
    _dies("engines"),
    _drains,
    _cut("gateways", "routers"),
    _cut("agents", "routers"),
    _cut("gateways", "engines"),
    _cut("routers", "redis_itself"),
    redis_down,
    redis_flaky,
    _redis_forgets,
    _redis_stops,
    _redis_clock_jumps,
    _stops("routers"),
    _stops("gateways"),
    _stops("agents"),
    _stops("engines"),
    metrics_fail,
    _clock_jumps("routers"),
    _clock_jumps("gateways"),
    _clock_jumps("agents"),
    operators_ask,
)
