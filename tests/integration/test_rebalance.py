"""A replica that joins later gets the pools that are its own, and no request is lost or placed twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from pointsman.router.v1 import fleet_pb2
from pointsman_router.core.ownership import preferred
from tests.support.processes.redis import redis_server
from tests.support.processes.replicas import Gateway, Replicas, RouterProcess, keep_reporting
from tests.support.waiting import eventually

MODELS = [f"model-{at}" for at in range(6)]
THEIRS = {model for model in MODELS if preferred(model, ["one", "two"]) == "two"}
LONG_S = 120.0


async def test_pools_move_to_the_replica_that_joins_and_nothing_is_lost(tmp_path: Path) -> None:
    assert 0 < len(THEIRS) < len(MODELS)
    with redis_server(tmp_path) as (url, redis), contextlib.ExitStack() as processes:
        routers = {
            name: RouterProcess(name, url, tmp_path, **{"startup-wait-s": 0.5, "max-requests-per-instance": 2})
            for name in ("one", "two")
        }
        fleet = Replicas(redis, routers, {model: [model] for model in MODELS})

        def start(name: str) -> None:
            routers[name].process.start()
            processes.callback(routers[name].process.kill)

        async with AsyncExitStack() as stack:
            start("one")
            for router in routers.values():
                for model in MODELS:
                    task = asyncio.create_task(keep_reporting(router.address, model, model))
                    stack.push_async_callback(partial(asyncio.gather, task, return_exceptions=True))
                    stack.callback(task.cancel)
            gateway = Gateway("g", [router.address for router in routers.values()])
            fleet.gateways.append(gateway)
            await gateway.client.start()
            stack.push_async_callback(gateway.client.close)
            for model in MODELS:
                assert await owner(gateway, model, {"one"}) == "one"

            # Each pool has a stream that stays open and a session with one request after the other. In one pool that will move,
            # the instance is full and a request is held.
            for model in MODELS:
                await gateway.place(f"open-{model}", model)
            full = min(THEIRS)
            await gateway.place("fills", full)
            asked = time.monotonic()
            held = asyncio.create_task(gateway.place("held", full))
            moved = asyncio.Event()
            load = [asyncio.create_task(keep_asking(gateway, model, moved)) for model in MODELS if model != full]
            start("two")
            for model in MODELS:
                await owner(gateway, model, {"two"} if model in THEIRS else {"one"})
            waited = time.monotonic() - asked
            moved.set()
            assert sum(await asyncio.gather(*load)) > 0
            assert not held.done()
            gateway.finish("fills")
            answer = await held
            assert answer.decision_id.startswith("two")
            async with fleet.client("two") as client:
                wanted = fleet_pb2.GetDecisionRequest(decision_id=answer.decision_id)
                made = (await client.fleet.GetDecision(wanted)).decision
                assert made.held.ToNanoseconds() / 1e9 > waited / 2, "the held request keeps its age"

                async def counted() -> bool:
                    # A gateway may learn of a pool's new owner from the old one before the new owner has read the open requests.
                    instances = await client.instances()
                    return {model for model, instance in instances.items() if instance.num_requests} == THEIRS

                await eventually(counted, "what is open counts at the pools' new owner")
            gateway.finish("held")
            for model in MODELS:
                gateway.finish(f"open-{model}")
            await fleet.idle()
            assert set(gateway.answers.values()) == {1}


async def owner(gateway: Gateway, model: str, wanted: set[str]) -> str:
    async def known() -> str:
        owner = gateway.client._owners.owner(model)
        return owner.router_id if owner is not None and owner.router_id in wanted else ""

    return str(await eventually(known, f"{model} is owned by {wanted}", LONG_S))


async def keep_asking(gateway: Gateway, model: str, until: asyncio.Event) -> int:
    """Place and finish one request after the other until `until` is set; return how many were placed."""
    for number in itertools.count():
        name = f"{model}-{number}"
        await gateway.place(name, model)
        gateway.finish(name)
        if until.is_set():
            return number + 1
        await asyncio.sleep(0.01)
    raise AssertionError("unreachable")
