"""What a router tells gateways of a fleet of 1,000 instances. No sockets."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from pointsman.router.v1.placement_pb2 import InstanceRef
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.io.batch_queue import BatchQueue
from pointsman_gateway.core.known_fleet import KnownFleet
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import InstanceInfo, Load
from pointsman_router.io.convert import sent_fleet
from pointsman_router.io.convert.gateway_messages import instance_ref
from pointsman_router.io.router import GatewayStream, Router
from pointsman_router.io.settings import RouterSettings
from tests.support.router_values import info, request

INSTANCES = 1_000
GATEWAYS = 4


class Gateway:
    """A gateway's end of its stream, which reads only when read() is called."""

    def __init__(self, router: Router, gateway_id: str) -> None:
        self.known_fleet: KnownFleet | None = None
        self.kinds: list[str] = []  # kinds of the messages that the last read() returned
        self._stream = GatewayStream()
        assert router.gateway_claims.opened(gateway_id, b"secret", time.monotonic())
        router.opened(ev.GatewayHello(gateway_id), self._stream)

    async def read(self) -> int:
        """Read all messages that have arrived; return their size in bytes."""
        await asyncio.sleep(0)  # the turn in which the fleet has changed ends
        # An ended queue can be read until it is empty; a new one takes later messages.
        come, self._stream.batch_queue = self._stream.batch_queue, BatchQueue()
        come.end()
        size, self.kinds = 0, []
        while messages := await come.take():
            for message in messages:
                self.kinds.append(str(message.WhichOneof("kind")))
                size += message.ByteSize()
                if message.HasField("fleet"):
                    self.known_fleet = KnownFleet(message.fleet)
                elif message.HasField("fleet_update"):
                    assert self.known_fleet is not None
                    self.known_fleet.apply(message.fleet_update)
        return size

    def incarnations(self) -> dict[str, str]:
        """The incarnations of the instances that the gateway knows."""
        assert self.known_fleet is not None
        return {
            instance.instance_id: instance.incarnation
            for pool in self.known_fleet.pools.values()
            for instance in pool.instances
        }


class Fleet:
    """Agents that report INSTANCES instances to one router, with four gateways that are connected from the start."""

    def __init__(self) -> None:
        self.router = Router(RouterSettings(redis_url="", metrics_listen="", startup_wait_s=0.0))
        self.gateways = [Gateway(self.router, f"g{number}") for number in range(GATEWAYS)]
        self.infos = [info(f"vllm-{number:04d}.fleet.example") for number in range(INSTANCES)]

    def hello(self, number: int, stream_id: int) -> None:
        """The instance's agent opens a stream."""
        self.router.submit(ev.AgentHello(stream_id, self.infos[number], KEY_SCHEME, 1, 0))

    def report(self, number: int, stream_id: int, healthy: bool) -> None:
        """The instance's health."""
        load = Load(time.monotonic(), healthy=healthy)
        self.router.submit(ev.LoadReported(stream_id, self.infos[number].instance_id, load))

    async def read(self) -> list[int]:
        """What each gateway was sent, in bytes."""
        return [await gateway.read() for gateway in self.gateways]


@pytest.fixture
async def fleet() -> Fleet:
    """A fleet whose instances are all reported and known to all gateways."""
    fleet = Fleet()
    await fleet.read()
    for number in range(INSTANCES):
        fleet.hello(number, number)
    sent = await fleet.read()
    assert sum(sent) < 2_000_000, "all agents said hello in one turn"
    assert all(gateway.kinds == ["fleet_update"] for gateway in fleet.gateways), (
        "what changes in one turn is one update"
    )
    return fleet


async def test_an_engine_that_restarts_is_sent_alone(fleet: Fleet) -> None:
    known = {info.instance_id: info.incarnation for info in fleet.infos}
    assert all(gateway.incarnations() == known for gateway in fleet.gateways)
    fleet.report(7, 7, healthy=False)
    fleet.router.submit(ev.AgentLost(7, fleet.infos[7].instance_id))
    fleet.infos[7] = replace(fleet.infos[7], incarnation="2")
    fleet.hello(7, INSTANCES)
    fleet.report(7, INSTANCES, healthy=False)
    fleet.report(7, INSTANCES, healthy=True)
    assert max(await fleet.read()) < 10_000
    known[fleet.infos[7].instance_id] = "2"
    assert all(gateway.incarnations() == known for gateway in fleet.gateways)


async def test_a_gateway_that_comes_is_told_all_and_then_what_changes(fleet: Fleet) -> None:
    fleet.report(7, 7, healthy=False)
    newcomer = Gateway(fleet.router, "new")
    assert await newcomer.read() > INSTANCES * 20
    assert newcomer.incarnations().keys() == {info.instance_id for info in fleet.infos} - {fleet.infos[7].instance_id}
    fleet.report(7, 7, healthy=True)
    assert max([await newcomer.read(), *await fleet.read()]) < 1_000
    assert newcomer.incarnations() == fleet.gateways[0].incarnations()
    assert len(newcomer.incarnations()) == INSTANCES


async def test_a_change_of_health_is_made_of_that_instance_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(info: InstanceInfo) -> InstanceRef:
        made.append(info.instance_id)
        return instance_ref(info)

    monkeypatch.setattr(sent_fleet, "instance_ref", noted)
    fleet.report(7, 7, healthy=False)
    await asyncio.sleep(0)
    assert made == [fleet.infos[7].instance_id]  # as one that gets no requests now
    fleet.report(7, 7, healthy=True)
    await asyncio.sleep(0)
    assert set(made) == {fleet.infos[7].instance_id}


async def test_an_instance_is_announced_before_what_is_placed_on_it(fleet: Fleet) -> None:
    """Also if the request is placed in the turn of the event loop in which the agent said hello."""
    fleet.infos.append(info("new.fleet.example", model="another", served_names=("another",)))
    fleet.hello(INSTANCES, INSTANCES)
    fleet.report(INSTANCES, INSTANCES, healthy=True)
    fleet.router.place(ev.PlaceRequested(request("r", model="another"), "g0"), "")
    first = fleet.gateways[0]
    await first.read()
    assert first.kinds == ["fleet_update", "placement"]
