"""The fleet that a router sends to its gateways: in any order of changes and connects, each gateway has all of it."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_gateway.core.known_fleet import KnownFleet as GatewaysFleet
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import EngineLife
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.ownership import Owner
from pointsman_router.core.placement_types import InstanceInfo, KvTransfer, Load
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.io.convert.sent_fleet import SentFleet
from pointsman_router.io.router import GatewayStream, Router
from pointsman_router.io.settings import RouterSettings
from pointsman_router.io.store.redis_store import _Reading
from tests.support.router_values import info

MODELS = st.sampled_from("mno")
NAMES = st.lists(st.sampled_from("pqrs"), max_size=2, unique=True).map(tuple)
INSTANCES = st.builds(
    info,
    st.sampled_from("abcdef"),
    incarnation=st.sampled_from("12"),
    model=MODELS,
    served_names=NAMES,
    lora_names=NAMES,
    model_root=st.sampled_from(["", "root"]),
    max_model_len=st.integers(0, 2),
    kv_capacity_tokens=st.integers(0, 1),
)


class FleetMachine(RuleBasedStateMachine):
    """Instances come, go, fail, drain, are cordoned and change their names; owners change; gateways come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = InstanceRegistry(PrefixIndex())
        self.owners: dict[str, Owner] = {}
        self.starting = True
        self.sent = SentFleet(5.0)
        self.gateways: list[GatewaysFleet] = []

    @rule(one=INSTANCES)
    def add(self, one: InstanceInfo) -> None:
        self.registry.add(one, 1, 0.0)

    @precondition(lambda self: self.registry.records())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.registry.remove(self._one(data))

    @precondition(lambda self: self.registry.records())
    @rule(data=st.data(), healthy=st.booleans(), suspended=st.sampled_from(["", "paused"]))
    def report(self, data: st.DataObject, healthy: bool, suspended: str) -> None:
        record = self.registry.get(self._one(data))
        assert record is not None
        record.load = Load(0.0, healthy=healthy, suspended=suspended)
        self.registry.refresh(record)

    @precondition(lambda self: self.registry.records())
    @rule(data=st.data(), opened=st.integers(0, 2))
    def judge(self, data: st.DataObject, opened: int) -> None:
        record = self.registry.get(self._one(data))
        assert record is not None
        record.life = EngineLife(record.life.pool, opened=opened)
        self.registry.refresh(record)

    @precondition(lambda self: self.registry.records())
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.registry.drain({self._one(data): "1"})

    @precondition(lambda self: self.registry.records())
    @rule(data=st.data(), cordoned=st.booleans(), weight=st.sampled_from([0.5, 1.0]))
    def order(self, data: st.DataObject, cordoned: bool, weight: float) -> None:
        instance_id = self._one(data)
        self.registry.order({instance_id: InstanceOrder(cordoned, weight)})
        record = self.registry.get(instance_id)
        assert record is not None
        self.registry.shares(record.info.model, record.info.model)

    @rule(model=MODELS, epoch=st.integers(0, 2))
    def own(self, model: str, epoch: int) -> None:
        self.owners.pop(model, None)
        if epoch:
            self.owners[model] = Owner("r", "r:1", epoch)

    @rule()
    def start(self) -> None:
        self.starting = not self.starting

    @rule(after=st.booleans())
    def tell(self, after: bool) -> None:
        """Send an update to all gateways. `after`: a further gateway connects, which gets the whole fleet."""
        update = self.sent.update(self.registry.pools(), self.owners.get, starting=self.starting)
        if update is not None:
            for gateway in self.gateways:
                gateway.apply(_sent(update))
        assert self.sent.update(self.registry.pools(), self.owners.get, starting=self.starting) is None
        if after:
            self.gateways.append(GatewaysFleet(_whole(self.sent)))
        afresh = SentFleet(5.0)
        afresh.update(self.registry.pools(), self.owners.get, starting=self.starting)
        now = _whole(afresh)
        assert self.sent.whole() == now
        for gateway in self.gateways:
            assert (gateway.starting, gateway.pools) == (now.starting, {pool.model: pool for pool in now.pools})

    @invariant()
    def is_consistent(self) -> None:
        self.registry.check_invariants()

    def _one(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([record.info.instance_id for record in self.registry.records()]))


def test_weights_follow_an_instance_that_is_out_and_becomes_unhealthy() -> None:
    registry = InstanceRegistry(PrefixIndex())
    record = registry.add(info("a"), 1, 0.0)
    record.life = EngineLife(record.life.pool, opened=1)
    registry.refresh(record)
    registry.order({"a": InstanceOrder(False, 0.5)})
    assert registry.shares("m", "m"), "it may be placed on"
    record.load = Load(0.0, healthy=False)
    registry.refresh(record)
    assert not registry.shares("m", "m")
    registry.check_invariants()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40)


def _sent(update: placement_pb2.FleetUpdate) -> placement_pb2.FleetUpdate:
    return placement_pb2.FleetUpdate.FromString(update.SerializeToString())


def _whole(sent: SentFleet) -> placement_pb2.Fleet:
    return placement_pb2.Fleet.FromString(sent.whole().SerializeToString())


def registry(*infos: InstanceInfo) -> InstanceRegistry:
    known = InstanceRegistry(PrefixIndex())
    for instance_info in infos:
        known.add(instance_info, 1, 0.0)
    return known


def sent_of(known: InstanceRegistry) -> SentFleet:
    sent = SentFleet(5.0)
    assert sent.update(known.pools(), lambda _: None, starting=True) is not None
    return sent


def test_only_what_changed_is_sent() -> None:
    known = registry(info("a"), info("b"), info("x", model="n"))
    sent = sent_of(known)
    known.add(replace(info("a"), incarnation="2", kv_transfer=KvTransfer("NIXL")), 2, 0.0)
    update = sent.update(known.pools(), lambda _: None, starting=True)
    assert update is not None
    [pool] = update.pools
    assert (pool.model, pool.HasField("description"), list(pool.removed_instance_ids)) == ("m", False, [])
    assert [(instance.instance_id, instance.incarnation) for instance in pool.instances] == [("a", "2")]
    known.remove("x")
    assert sent.update(known.pools(), lambda _: None, starting=True) == placement_pb2.FleetUpdate(
        starting=True, removed_models=["n"]
    )
    update = sent.update(known.pools(), {"m": Owner("r", "r:1", 1)}.get, starting=True)
    assert update is not None
    assert (update.pools[0].description.owner.epoch, len(update.pools[0].instances)) == (1, 0)


def test_an_agent_that_comes_back_and_tells_the_same_is_no_news() -> None:
    known = registry(info("a"), info("b"))
    sent = sent_of(known)
    known.add(replace(info("a"), kv_capacity_tokens=99), 2, 1.0)
    assert sent.update(known.pools(), lambda _: None, starting=True) is None


def test_a_pool_is_the_same_object_until_gateways_are_to_know_something_else_of_it() -> None:
    known = registry(info("a"), info("b"), info("x", model="n"))
    before = known.pools()
    record = known.get("a")
    assert record is not None
    record.load = Load(0.0, running=7)
    known.refresh(record)
    assert [one is two for one, two in zip(before, known.pools(), strict=True)] == [True, True]
    record.load = Load(0.0, healthy=False)
    known.refresh(record)
    assert [one is two for one, two in zip(before, known.pools(), strict=True)] == [False, True]
    assert [*known.pools()[0].instances] == ["b"]


async def test_pools_that_get_an_owner_in_one_turn_are_sent_together() -> None:
    """A gateway announces all its streams to the owner for each update that has new owners."""
    router = Router(RouterSettings(router_id="r", redis_url="redis://none:1", startup_wait_s=0.0))
    for number in range(20):
        one = info(f"i{number}", model=f"m{number}", served_names=())
        router.submit(ev.AgentHello(number, one, KEY_SCHEME, 1, 0))
    await asyncio.sleep(0)
    stream = router.gateways["g"] = GatewayStream()
    store: Any = router.store
    for pool in store._pools.values():
        store._take_over(pool, _Reading())
    [message] = await stream.batch_queue.take()
    assert {update.description.owner.router_id for update in message.fleet_update.pools} == {"r"}
    assert len(message.fleet_update.pools) == 20
    router.decisions.close()
