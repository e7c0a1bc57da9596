"""Router processes that share a Redis, agents that keep reporting to all of them, and gateways' router clients."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import END_OF_STREAM, open_channel
from pointsman_gateway.io.routing.router_client import RouterClient
from tests.support.instances import counters
from tests.support.processes.pointsman import pointsman_process
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report
from tests.support.waiting import eventually

# Number of tokens of a big prompt.
BIG = 100_000


class RouterProcess:
    """One router replica as a process."""

    def __init__(self, name: str, redis_url: str, folder: Path, **settings: object) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        flags = {
            "listen": self.address,
            "metrics-listen": "",
            "redis-url": redis_url,
            "router-id": name,
            "gateway-lease-s": 5.0,
            **settings,
        }
        self.process = pointsman_process(name, folder, "router", flags=flags)


async def keep_reporting(address: str, instance: str, model: str, **changes: Any) -> None:
    """Report one instance to one router until cancelled; reconnect when the stream ends. `changes`: fields of the instance."""
    while True:
        async with open_channel(address) as channel:
            report = Report(Client(channel))
            with contextlib.suppress(grpc.aio.AioRpcError, AssertionError, TimeoutError, asyncio.InvalidStateError):
                await report.join(instance, model=model, **changes)
                while await report.call.read() is not END_OF_STREAM:
                    pass
        await asyncio.sleep(0.05)


class Gateway:
    """A gateway as routers see it: its router client, which opens and ends requests."""

    def __init__(self, name: str, routers: list[str], grace_s: float = 20.0) -> None:
        self.client = RouterClient(routers, name, tuple, grace_s, lambda fleet: None, lambda connected: None)
        self.answers: Counter[str] = Counter()

    async def place(self, request_id: str, model: str = "m", tokens: int = BIG) -> placement_pb2.Placement:
        request = placement_pb2.PlacementRequest(request_id=request_id, model=model, input_tokens=tokens)
        step = await self.client.first_step(request, 20.0)
        assert isinstance(step, placement_pb2.Placement), step
        self.answers[request_id] += 1
        return step

    def finish(self, request_id: str) -> None:
        self.client.finished(placement_pb2.Finished(request_id=request_id, outcome=placement_pb2.OUTCOME_OK))


class Replicas:
    """Routers that share a Redis, as many gateways, and instances of each model (m-i0, m-i1, ... of model m)."""

    def __init__(self, redis: Process, routers: dict[str, RouterProcess], models: dict[str, list[str]]) -> None:
        self.redis = redis
        self.routers = routers
        self.models = models
        self.gateways: list[Gateway] = []

    def logs(self) -> list[str]:
        """Return the last lines of all routers' logs."""
        return [router.process.tail() for router in self.routers.values()]

    async def owner(self, model: str = "m", other_than: str = "") -> str:
        """Wait until all gateways agree on an owner of the model that is not `other_than`; return its id."""

        async def known() -> str:
            owners = [gateway.client._owners.owner(model) for gateway in self.gateways]
            names = {owner.router_id if owner is not None else "" for owner in owners}
            return names.pop() if len(names) == 1 and names != {other_than} else ""

        return str(await eventually(known, f"one owner of {model}"))

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[Client]:
        """Yield the stubs of one replica."""
        async with open_channel(self.routers[name].address) as channel:
            yield Client(channel)

    async def ready(self) -> None:
        """Wait until every replica knows all instances, and every gateway every owner."""
        await self.answering(sum(map(len, self.models.values())))
        for model in self.models:
            await self.owner(model)

    async def answering(self, instances: int) -> None:
        """Wait until every replica answers, and knows `instances` instances."""
        for name in self.routers:
            async with self.client(name) as client:

                async def complete(client: Client = client) -> bool:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        return len(await client.instances()) == instances
                    return False

                await eventually(complete, f"{name} knows {instances} instances")

    async def idle(self) -> None:
        """Wait until every load counter of every instance is 0 at every replica that runs."""
        for name, router in self.routers.items():
            if not router.process.alive:
                continue
            async with self.client(name) as client:

                async def empty(client: Client = client) -> bool:
                    known = (await client.instances()).values()
                    return not any(any(counters(instance).values()) for instance in known)

                await eventually(empty, f"all counters of {name} are 0")

    async def burst(self) -> list[str]:
        """Place one big prompt per instance of model m, concurrently through all gateways; return their instances."""
        names = [uuid.uuid4().hex for _ in self.models["m"]]
        gateways = [self.gateways[at % len(self.gateways)] for at in range(len(names))]
        placed = await asyncio.gather(*(gateway.place(name) for gateway, name in zip(gateways, names, strict=True)))
        for gateway, name in zip(gateways, names, strict=True):
            gateway.finish(name)
        return [placement.step.instance.instance_id for placement in placed]


def double_bookings(instances: list[str]) -> int:
    """Return how many big prompts share an instance although each could have had an idle one."""
    return len(instances) - len(set(instances))


@contextmanager
def _processes(redis_url: str, folder: Path, count: int, **settings: object) -> Iterator[dict[str, RouterProcess]]:
    routers = {name: RouterProcess(name, redis_url, folder, **settings) for name in ("one", "two", "three")[:count]}
    with ExitStack() as stack:
        for router in routers.values():
            router.process.start()
            stack.callback(router.process.kill)
        yield routers


@asynccontextmanager
async def replicas(
    folder: Path,
    count: int = 2,
    models: tuple[str, ...] = ("m",),
    instances: int = 4,
    urls: Sequence[str] = (),
    grace_s: float = 20.0,
    **settings: object,
) -> AsyncIterator[Replicas]:
    """Run routers, agents and gateways; yield them when all are ready. `urls`: those of each model's instances. `grace_s`: how
    long gateways wait for a router when they have lost all."""
    with redis_server(folder) as (url, redis), _processes(url, folder, count, **settings) as routers:
        names = {model: [f"{model}-i{at}" for at in range(instances)] for model in models}
        fleet = Replicas(redis, routers, names)
        async with AsyncExitStack() as stack:
            # All replicas start before the first report: a replica that is alone takes every pool and keeps it for a while.
            await fleet.answering(0)
            for router in routers.values():
                for model, members in names.items():
                    for at, instance in enumerate(members):
                        changes = {"url": urls[at]} if urls else {}
                        task = asyncio.create_task(keep_reporting(router.address, instance, model, **changes))
                        stack.push_async_callback(partial(asyncio.gather, task, return_exceptions=True))
                        stack.callback(task.cancel)
            addresses = [router.address for router in routers.values()]
            for at in range(count):
                # Each gateway lists the routers in another order, as real gateways do.
                gateway = Gateway(f"g{at}", addresses[at:] + addresses[:at], grace_s)
                fleet.gateways.append(gateway)
                await gateway.client.start()
                stack.push_async_callback(gateway.client.close)
            await fleet.ready()
            yield fleet
