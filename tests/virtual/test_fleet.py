"""Tests of a fleet in virtual time: the seeds, and a separate test of each defect that earlier seeds have found."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from redis.asyncio import Redis

from pointsman.router.v1 import placement_pb2 as pb
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_gateway.core.request.local_pace import BURST_UNITS
from pointsman_gateway.core.request.local_placement import unfit
from pointsman_gateway.core.request.request_events import PLACEMENT_TIMEOUT
from pointsman_gateway.io.routing import router_client
from pointsman_gateway.io.routing.router_client import NoRouter, OpenAnswer, RouterClient, WithoutRouter
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_orders import OrderChange
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.ownership import preferred
from pointsman_router.io.operator_config import OperatorConfig
from pointsman_router.io.router import merged_operator_configs
from pointsman_router.io.store import redis_store
from pointsman_router.io.store.redis_address import RedisAddress
from pointsman_router.io.store.store import StoreEvent
from tests.support.fleet_updates import fleet_update
from tests.support.virtual.loop import EPOCH, VirtualLoop, virtual_clocks
from tests.support.virtual.network import Channel, Method, Network, Node, clock_offset_s, owner_of, track_tasks
from tests.support.virtual.run import run
from tests.support.virtual.store import NAME as REDIS
from tests.support.virtual.store import Client, VirtualRedis
from tests.support.virtual.world import MODELS, World
from tests.support.waiting import eventually

SEEDS = 200


def virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in virtual time."""
    loop = VirtualLoop(owner_of)
    track_tasks(loop)
    with virtual_clocks(loop, clock_offset_s):
        try:
            loop.run_until_complete(Node("test").spawn_on(loop, work))
        finally:
            loop.end()


@pytest.mark.timeout(2_400)  # It only computes, at a low priority, so a busy machine may need long.
def test_nothing_is_lost_left_or_hung_whatever_happens() -> None:
    """The output names the seeds that failed. `python -m tests.virtual NUMBER` prints a seed's story."""
    half = SEEDS // 2
    ranges = ((0, half), (half, SEEDS))
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.virtual", str(first), str(end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for first, end in ranges
    ]
    try:
        outputs = [run.communicate()[0] for run in runs]
    finally:
        for run in runs:
            with run:
                run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)


@pytest.mark.timeout(1_300)
def test_a_seed_stands_for_one_story() -> None:
    stories = [
        subprocess.run(
            [sys.executable, "-m", "tests.virtual", "3"], capture_output=True, text=True, check=True, timeout=600
        ).stdout
        for _ in range(2)
    ]
    assert stories[0] == stories[1]
    assert "the last answer" in stories[0]


def test_a_run_that_leaves_something_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ends of requests never reach a router, their reservations stay."""
    report = RouterClient._report

    def lose_ends(self: RouterClient, entry: Any, message: pb.SessionRequest) -> None:
        if not message.HasField("finished"):
            report(self, entry, message)

    monkeypatch.setattr(RouterClient, "_report", lose_ends)
    assert "reservations" in run(0).failure


async def an_owner_is_cut_off(world: World, tell: Callable[[str], None]) -> None:
    """Cut an owner off Redis, and its successor off one of two gateways."""
    owner = next(
        name for name, node in world.routers.items() if node.router and node.router.state.owned.owns(MODELS[0])
    )
    world.disturbances.note(owner, 14.0)
    world.network.cut(owner, REDIS, 14.0)
    world.network.cut("g1", next(name for name in world.routers if name != owner), 14.0)
    tell(f"{owner} is alone with g1")
    await asyncio.sleep(16.0)


@pytest.mark.parametrize("in_doubt", [True, False])
def test_two_routers_that_place_in_one_pool_are_found(in_doubt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_doubt:
        monkeypatch.setattr(redis_store.RedisStore, "_in_doubt", lambda *_: False)
        monkeypatch.setattr(redis_store.RedisStore, "claimed", lambda *_: None)
    failure = run(1, trouble=an_owner_is_cut_off, policy="unified", check_each=0).failure
    assert ("all place in" in failure) == (not in_doubt), failure
    assert in_doubt == (not failure), failure


def test_a_process_that_stops_goes_on_later_with_what_was_due() -> None:
    """Also, each process has its own wall clock."""
    ran: list[tuple[float, float]] = []

    async def work() -> None:
        loop, network, node = asyncio.get_running_loop(), Network(random.Random(1)), Node("n")

        async def tick() -> None:
            while True:
                ran.append((loop.time() - 1_000.0, time.time() - EPOCH - loop.time()))
                await asyncio.sleep(1.0)

        node.spawn(tick())
        await asyncio.sleep(1.5)
        node.clock_s = -60.0
        network.stop(node, 3.0)
        await asyncio.sleep(4.5)
        network.kill(node)

    virtually(work())
    assert ran == [(0.0, 0.0), (1.0, 0.0), (4.5, -60.0), (5.5, -60.0)]


def a_store(
    network: Network,
    redis: VirtualRedis,
    router_id: str,
    *,
    on_event: Callable[[StoreEvent], None] = lambda event: None,
    snapshot: Callable[[str], Iterator[Any]] = lambda pool: iter(()),
    merge_config: Callable[[str, str, str], str] = lambda before, own, stored: stored or own,
) -> redis_store.RedisStore:
    """Return a router's store on that Redis."""

    def from_url(url: str, *, socket_timeout: float, **_: Any) -> Client:
        return Client(network, redis, socket_timeout)

    with mock.patch.object(Redis, "from_url", from_url):
        return redis_store.RedisStore(
            RedisAddress(("redis://redis",)),
            router_id=router_id,
            fleet="f",
            lease_s=1.0,
            settle_s=9.0,
            affinity_ttl_s=60.0,
            on_event=on_event,
            on_owners=lambda: None,
            snapshot=snapshot,
            merge_config=merge_config,
        )


def test_what_ends_while_the_store_comes_back_is_not_kept_for_ever() -> None:
    """One pool is rewritten, and one of its requests ends before the other pool is rewritten."""

    async def work() -> None:
        network, redis = Network(random.Random(1)), VirtualRedis()
        open_one = Reservation("x", "g", "e", "d", 10, 10, pool="m")

        def snapshot(pool: str) -> Iterator[Any]:
            if pool == "m":
                asyncio.get_running_loop().call_soon(lambda: store.record([ev.Released("x", "m")]))
                yield ev.Reserved(open_one)
                yield None

        degraded: list[bool] = []

        def on_event(event: StoreEvent) -> None:
            if isinstance(event, ev.StoreState):
                degraded.append(event.degraded)

        store = a_store(network, redis, "r", on_event=on_event, snapshot=snapshot)
        store.compete_for(["m", "n"])
        running = asyncio.create_task(store.run())
        await asyncio.sleep(5.0)
        store.record([ev.Reserved(open_one)])
        await asyncio.sleep(1.0)
        assert redis.hash("pointsman:{f:m}:open").keys() == {"x"}
        redis.down = True
        await asyncio.sleep(3.0)
        redis.down = False
        await asyncio.sleep(3.0)
        assert degraded == [True, False]
        assert redis.hash("pointsman:{f:m}:open") == {}
        running.cancel()

    virtually(work())


def test_a_clock_of_redis_that_is_set_back_keeps_no_dead_router_alive() -> None:
    """The dead router's pools are taken over and none is handed to it, although its writes seem to be of the future."""

    async def work() -> None:
        network, redis = Network(random.Random(1)), VirtualRedis()
        nodes = {name: Node(name) for name in ("one", "two")}
        stores: dict[str, redis_store.RedisStore] = {}

        async def serve(name: str) -> None:
            stores[name] = a_store(network, redis, name)
            stores[name].compete_for(["m"])
            await stores[name].run()

        for name, node in nodes.items():
            node.spawn(serve(name))
        await asyncio.sleep(5.0)
        owner = stores["one"].owner("m")
        assert owner is not None
        other = stores["two" if owner.router_id == "one" else "one"]
        network.kill(nodes[owner.router_id])
        redis.clock_s = -3_600.0
        await asyncio.sleep(5.0)
        taken = other.owner("m")
        assert taken is not None
        assert taken.router_id != owner.router_id
        assert [replica.router_id for replica in other.replicas()] == [taken.router_id]

    virtually(work())


@pytest.mark.parametrize("seed", range(20))
def test_no_order_is_lost_however_redis_fails(seed: int) -> None:
    """Three replicas receive orders while Redis stops, loses replies, carries out commands late, or restarts empty.

    After Redis has recovered, all three and Redis have the last order for each instance.
    """

    async def work() -> None:
        rng = random.Random(seed)
        network, redis = Network(random.Random(seed)), VirtualRedis()
        stores: dict[str, redis_store.RedisStore] = {}
        taken: dict[str, OperatorConfig] = {}
        wanted: dict[str, float] = {}

        async def serve(name: str) -> None:
            stores[name] = store = a_store(network, redis, name, merge_config=merged_operator_configs)
            store.on_operator_config = lambda text: taken.update({name: OperatorConfig.read(text)})
            await store.run()

        async def tell(name: str, instance: str, weight: float) -> None:
            change = OrderChange(instance, asyncio.get_running_loop().time(), weight=weight, reason=str(weight))
            await stores[name].change_operator_config(
                lambda text: OperatorConfig.read(text).with_order(change).written()
            )

        for name in ("one", "two", "three"):
            Node(name).spawn(serve(name))
        await asyncio.sleep(1.0)
        for number in range(30):
            redis.flaky, redis.down = rng.random() < 0.3, rng.random() < 0.3
            if rng.random() < 0.2:
                redis.stopped_until = asyncio.get_running_loop().time() + rng.uniform(0.0, 3.0)
            if rng.random() < 0.1:
                redis.wipe()
            # Orders of one instance are sent one after the other, orders of several instances concurrently to any replicas.
            weights = {f"i{rng.randrange(4)}": (number * 3 + index + 1) / 100 for index in range(3)}
            await asyncio.gather(*(tell(rng.choice(sorted(stores)), *each) for each in weights.items()))
            wanted |= weights
            await asyncio.sleep(rng.choice([0.01, 0.1, 2.0]))
        redis.flaky = redis.down = False
        await asyncio.sleep(8.0)
        kept = OperatorConfig.read(redis.hash("pointsman:{f}:config")["config"])
        for config in (kept, *taken.values()):
            assert {name: order.weight for name, order in config.orders_in_force.items()} == wanted
            assert all(order.weight_reason == str(order.weight) for order in config.orders.values())

    virtually(work())


@pytest.mark.parametrize("seed", range(4))
def test_a_redis_that_loses_its_data_unnoticed_leaves_pools_to_their_owner(seed: int) -> None:
    """The other replica does not know of an owner yet: for it the pool has been free since its start."""

    async def work() -> None:
        network, redis = Network(random.Random(seed)), VirtualRedis()
        stores: dict[str, redis_store.RedisStore] = {}

        async def serve(name: str) -> None:
            stores[name] = a_store(network, redis, name)
            await stores[name].run()

        first, other = sorted(("one", "two"), key=lambda name: name != preferred("m", ("one", "two")))
        for name in (first, other):  # Both poll every 0.25 s, the second 0.1 s after the first.
            Node(name).spawn(serve(name))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.85)
        stores[other].compete_for(["m"])
        await asyncio.sleep(0.3)
        stores[first].compete_for(["m"])
        for _ in range(100):
            if stores[first].epoch:
                break
            await asyncio.sleep(0.005)
        epoch = stores[first].epoch
        assert epoch
        assert stores[other].owner("m") is None
        redis.wipe()
        await asyncio.sleep(5.0)
        assert (stores[first].epoch, stores[other].epoch) == (epoch, 0)

    virtually(work())


@pytest.mark.parametrize("later", range(4))
def test_a_router_told_to_end_as_a_change_wakes_it_leaves_its_pools(later: int) -> None:
    async def work() -> None:
        network, redis = Network(random.Random(1)), VirtualRedis()

        store = a_store(network, redis, "one")
        store.compete_for(["m"])
        running = asyncio.create_task(store.run())
        await asyncio.sleep(5.1)
        store._wake.set()
        for _ in range(later):
            await asyncio.sleep(0.0)
        running.cancel()
        await asyncio.wait([running], timeout=5.0)
        assert running.cancelled()

    virtually(work())


def test_an_owner_that_always_has_something_to_write_keeps_its_pools() -> None:
    """At full load each write is followed by the next. Lease renewals and another pool's writes do not wait for the last."""

    async def work() -> None:
        lost: list[str] = []

        def on_event(event: StoreEvent) -> None:
            if isinstance(event, ev.PoolLost):
                lost.append(event.pool)

        store = a_store(Network(random.Random(1)), VirtualRedis(), "one", on_event=on_event)
        store.compete_for(["m", "n"])
        running = asyncio.create_task(store.run())
        await asyncio.sleep(3.0)
        written: list[bool] = []

        def resume_owner(kept: bool) -> None:
            written.append(kept)
            if kept:
                store.record([ev.SessionOwnerSet("s", "e", "m")])
                store.when_stored("m", resume_owner)

        resume_owner(True)
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert store.may_place("m")
        other: list[bool] = []
        store.record([ev.SessionOwnerSet("s", "e", "n")])
        store.when_stored("n", other.append)
        await asyncio.sleep(1.0)
        assert other == [True]
        assert len(written) > 1_000
        assert (all(written), lost) == (True, [])
        running.cancel()
        await asyncio.wait([running], timeout=5.0)
        assert (running.cancelled(), lost) == (True, ["m", "n"])

    virtually(work())


class ScriptedRouter:
    """A router that sends what the test wants, and records the messages that it receives."""

    def __init__(self, router_id: str, network: Network) -> None:
        self.router_id = router_id
        self.network = network
        self.node = Node(router_id)
        self.heard: list[pb.SessionRequest] = []
        self.context: Any = None
        self.sent_fleet = pb.Fleet()
        self.sessions = 0

    async def session(self, _: object, context: Any) -> None:
        """PlacementService.Session."""
        self.context = context
        self.sessions += 1
        await context.write(
            pb.SessionResponse(welcome=pb.GatewayWelcome(router_id=self.router_id, key_scheme=KEY_SCHEME))
        )
        await context.write(pb.SessionResponse(fleet=self.sent_fleet))
        while message := await context.read():
            self.heard += message.batch.requests if message.HasField("batch") else [message]

    async def owner(self, router_id: str, epoch: int) -> None:
        """Send the pool's owner. Empty id: the pool does not exist."""
        owner = pb.Owner(router_id=router_id, address=f"{router_id}:1", epoch=epoch)
        instances = [pb.InstanceRef(instance_id="e", url="http://e")]
        await self.pools(
            [pb.Pool(model="m", served_names=["m"], owner=owner, instances=instances)] if router_id else []
        )

    async def pools(self, pools: Sequence[pb.Pool]) -> None:
        """Send the pools that there are now."""
        before, self.sent_fleet = self.sent_fleet, pb.Fleet(pools=pools)
        await self.context.write(pb.SessionResponse(fleet_update=fleet_update(before, self.sent_fleet)))

    async def place(self, request_id: str) -> None:
        """Send a placement."""
        step = pb.Step(kind=pb.STEP_KIND_SERVE, instance=pb.InstanceRef(instance_id="e", url="http://e"))
        await self.context.write(
            pb.SessionResponse(placement=pb.Placement(request_id=request_id, step=step, last=True))
        )

    async def park(self, request_id: str, bound_s: int) -> None:
        """Report that a request is parked."""
        parked = pb.Parked(request_id=request_id)
        parked.bound.FromSeconds(bound_s)
        await self.context.write(pb.SessionResponse(parked=parked))

    async def not_serving(self, request_id: str) -> None:
        """Refuse a request because the router does not serve its pool."""
        await self.context.write(pb.SessionResponse(refusal=pb.Refusal(request_id=request_id, not_serving=True)))

    async def confirm_end(self, tenant: str, session_id: str) -> None:
        """Report that the end of a session is stored."""
        ended = pb.SessionEnded(tenant=tenant, session_id=session_id, models=["m"])
        await self.context.write(pb.SessionResponse(session_ended=ended))

    def ended(self) -> list[str]:
        """Return the sessions of the received ends."""
        return [message.end_session.session_id for message in self.heard if message.HasField("end_session")]

    def finished(self) -> list[tuple[str, int]]:
        """Return the received ends of requests."""
        return [
            (message.finished.request_id, message.finished.outcome)
            for message in self.heard
            if message.HasField("finished")
        ]

    def asked(self) -> list[str]:
        """Return the ids of the received placement requests."""
        return [message.place.request_id for message in self.heard if message.HasField("place")]


async def two_routers() -> tuple[RouterClient, ScriptedRouter, ScriptedRouter]:
    """Return a gateway's client that is connected to two routers, and the routers. The first owns the pool."""
    network = Network(random.Random(1))
    routers = ScriptedRouter("r0", network), ScriptedRouter("r1", network)
    for router in routers:
        method = Method(router.session, pb.SessionRequest.FromString)
        network.listen(f"{router.router_id}:1", router.node, {"/pointsman.router.v1.PlacementService/Session": method})

    def dial(address: str) -> Any:
        return Channel(network, address)

    client = RouterClient(
        ["r0:1", "r1:1"],
        "g",
        tuple,
        5.0,
        lambda pools: None,
        lambda connected: None,
        dial,
    )
    await client.start()
    await asyncio.sleep(1.0)
    await routers[0].owner("r0", 1)
    await asyncio.sleep(0.5)
    return client, *routers


def instance_of(answer: pb.Placement | pb.Refusal | WithoutRouter) -> str:
    assert isinstance(answer, pb.Placement), answer
    return answer.step.instance.instance_id


def test_a_placement_that_comes_too_late_is_given_back() -> None:
    """The pool's owner changed while the answer was on its way, and the first owner does not know this yet."""

    async def work() -> None:
        client, first, second = await two_routers()
        asking = asyncio.create_task(client.first_step(pb.PlacementRequest(request_id="x", model="m"), 9.0))
        await asyncio.sleep(0.5)
        await second.owner("r1", 2)
        await asyncio.sleep(0.5)
        await first.place("x")
        await asyncio.sleep(0.5)
        assert (first.asked(), second.asked()) == (["x"], ["x"])
        assert first.finished() == [("x", pb.OUTCOME_CANCELLED)]
        await second.place("x")
        assert instance_of(await asking) == "e"
        assert second.finished() == []

    virtually(work())


def test_when_an_engines_last_byte_came_is_told_before_a_client_that_has_left() -> None:
    """The router has to know whether the engine has sent anything since the request was placed."""

    async def work() -> None:
        client, first, _ = await two_routers()
        asking = [client.first_step(pb.PlacementRequest(request_id=name, model="m"), 9.0) for name in "xy"]
        answers = asyncio.gather(*asking)
        await asyncio.sleep(0.5)
        for name in "xy":
            await first.place(name)
        for name, answer in zip("xy", await answers, strict=True):
            client.placed(pb.PlacementRequest(request_id=name, model="m"), instance_of(answer), 0)
        tokens, heard_at = 0, time.monotonic() + 0.1
        client.answer_begins("x", OpenAnswer(lambda: tokens, lambda: True, lambda: heard_at))
        tokens = 5
        await asyncio.sleep(0.6)
        client.finished(pb.Finished(request_id="y", outcome=pb.OUTCOME_CANCELLED))
        await asyncio.sleep(0.1)
        heard, finished = first.heard[-2:]
        assert finished.finished.request_id == "y"
        assert heard.heard == pb.Heard(instance_ids=["e"], ago_ms=[500])

    virtually(work())


def test_while_no_owner_is_known_the_router_that_was_asked_is_waited_for() -> None:
    """The pool's agents are disconnected for a moment, so no router reports the pool at all."""

    async def work() -> None:
        client, first, second = await two_routers()
        await second.owner("r1", 2)
        await asyncio.sleep(0.5)
        asking = asyncio.create_task(client.first_step(pb.PlacementRequest(request_id="x", model="m"), 9.0))
        await asyncio.sleep(0.5)
        await first.owner("", 0)
        await asyncio.sleep(0.5)
        await second.owner("", 0)
        await asyncio.sleep(0.5)
        await second.place("x")
        assert instance_of(await asking) == "e"
        client.finished(pb.Finished(request_id="x", outcome=pb.OUTCOME_OK))
        await asyncio.sleep(0.5)
        # The present owner is not known, so the end is sent to all routers.
        assert first.finished() == second.finished() == [("x", pb.OUTCOME_OK)]
        assert first.asked() == []

    virtually(work())


def test_a_router_that_tells_what_changed_of_an_unknown_pool_is_asked_for_the_whole_fleet() -> None:
    """If the update were ignored, the gateway's fleet would differ from the router's until one of them restarts."""

    async def work() -> None:
        client, first, second = await two_routers()
        unknown = pb.PoolUpdate(model="n", removed_instance_ids=["x"])
        await first.context.write(pb.SessionResponse(fleet_update=pb.FleetUpdate(pools=[unknown])))
        asking = asyncio.create_task(client.first_step(pb.PlacementRequest(request_id="x", model="m"), 9.0))
        await asyncio.sleep(1.5)
        assert (first.sessions, second.sessions, client.connected) == (2, 1, True)
        await first.place("x")
        assert instance_of(await asking) == "e"

    virtually(work())


def test_an_owner_that_took_its_pool_again_is_told_anew_what_is_open() -> None:
    """Another router owned the pool in between, unnoticed. The owner knows what was stored by then, including ended requests."""

    async def work() -> None:
        _, first, _ = await two_routers()
        await first.owner("r0", 3)
        await asyncio.sleep(0.5)
        # At the stream's beginning, when the router was first named as owner, and now.
        assert [message.HasField("hello") for message in first.heard] == [True, True, True]

    virtually(work())


def test_an_owner_that_was_told_of_an_end_before_it_took_the_pool_is_told_again() -> None:
    """The other router names it as soon as its lease begins. It confirms the end of a session once it has stored it."""

    async def work() -> None:
        client, first, second = await two_routers()
        await second.owner("r0", 1)
        await first.owner("", 0)
        await second.owner("", 0)
        client.end_session("t", "s")
        await first.owner("r1", 2)
        await asyncio.sleep(0.5)
        assert second.ended() == ["s"]
        await second.owner("r1", 2)
        await eventually(lambda: len(second.ended()) == 2, "the owner is told again")
        assert client.unconfirmed_ends == 1
        await second.confirm_end("t", "s")
        await asyncio.sleep(60.0)
        assert (second.ended(), client.unconfirmed_ends) == (["s", "s"], 0)

    virtually(work())


async def both_owners(client: RouterClient, routers: Sequence[ScriptedRouter]) -> None:
    """Let both routers name r0 as the owner."""
    await routers[1].owner("r0", 1)
    await asyncio.sleep(0.5)
    assert client.connected


def ask(client: RouterClient, name: str) -> asyncio.Task[tuple[Any, float]]:
    """Submit a request; return its answer and how long that took, s."""

    async def work() -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await client.first_step(pb.PlacementRequest(request_id=name, model="m"), 60.0)
        return answer, loop.time() - began

    return asyncio.create_task(work())


async def placed_after(asking: asyncio.Task[tuple[Any, float]]) -> float:
    """Wait until a request is placed without a router; return how long that took from its submission, s."""
    async with asyncio.timeout(30.0):
        answer, took_s = await asking
    assert isinstance(answer, WithoutRouter)
    assert answer.instance is not None
    assert answer.instance.instance_id == "e"
    return took_s


@pytest.mark.parametrize("alone", [True, False])
def test_whoever_waits_at_an_owner_that_dies_is_placed_as_a_new_request_is(alone: bool) -> None:
    """With another router, which goes on naming the dead one, and without. Later requests do not wait again."""

    async def work() -> None:
        client, *routers = await two_routers()
        await both_owners(client, routers)
        asking = ask(client, "x")
        await asyncio.sleep(3.0)
        assert routers[0].asked() == ["x"]
        for router in routers if alone else routers[:1]:
            router.network.kill(router.node)
        await asyncio.sleep(1.0)
        later = ask(client, "later")
        assert await placed_after(asking) == pytest.approx(3.0 + 5.0, abs=0.1)
        assert await placed_after(later) == pytest.approx(5.0 - 1.0, abs=0.1)
        for number in range(3):
            assert await placed_after(ask(client, f"after {number}")) < 0.1
        assert routers[1].asked() == []

    virtually(work())


def test_what_a_request_excludes_is_looked_up_only_once_it_is_placed_without_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The death of an owner would else cost the gateway a walk through the pool for each request that waits."""
    looked_up = mock.Mock(wraps=unfit)
    monkeypatch.setattr(router_client, "unfit", looked_up)

    async def work() -> None:
        client, *routers = await two_routers()
        owner = pb.Owner(router_id="r0", address="r0:1", epoch=1)
        instances = [
            pb.InstanceRef(instance_id="large", max_model_len=1_000, lora_names=["adapter"]),
            pb.InstanceRef(instance_id="other", max_model_len=1_000),
            pb.InstanceRef(instance_id="small", max_model_len=10, lora_names=["adapter"]),
        ]
        for router in routers:
            await router.pools([pb.Pool(model="m", lora_names=["adapter"], owner=owner, instances=instances)])
        await asyncio.sleep(0.5)
        requests = [pb.PlacementRequest(request_id=f"{at}", model="adapter", input_tokens=100) for at in range(8)]
        asking = [asyncio.create_task(client.first_step(request, 60.0)) for request in requests]
        await asyncio.sleep(0.5)
        routers[0].network.kill(routers[0].node)
        await asyncio.sleep(4.0)
        assert looked_up.call_count == 0
        async with asyncio.timeout(5.0):
            answers = await asyncio.gather(*asking)
        placed = [answer.instance for answer in answers if isinstance(answer, WithoutRouter)]
        assert [instance.instance_id for instance in placed if instance is not None] == ["large"] * 8
        assert looked_up.call_count == 8

    virtually(work())


def test_a_request_without_an_owner_follows_its_models_name_to_another_pool() -> None:
    async def work() -> None:
        client, first, _ = await two_routers()
        lost = pb.Owner(router_id="lost", address="lost:1", epoch=2)

        async def names(of_m: Sequence[str], of_n: Sequence[str]) -> None:
            pools = (("m", of_m, ("e", "f")), ("n", of_n, ("d",)))
            await first.pools(
                [
                    pb.Pool(
                        model=model,
                        lora_names=served,
                        owner=lost,
                        instances=[pb.InstanceRef(instance_id=name) for name in ids],
                    )
                    for model, served, ids in pools
                ]
            )
            await asyncio.sleep(0.5)

        await names(["adapter"], [])
        asking = [
            asyncio.create_task(client.first_step(pb.PlacementRequest(request_id=model, model=model), 60.0))
            for model in ("adapter", "m")
        ]
        await asyncio.sleep(0.5)
        await names([], ["adapter"])
        async with asyncio.timeout(20.0):
            answers = [await task for task in asking]
        placed = [answer.instance for answer in answers if isinstance(answer, WithoutRouter)]
        assert [instance.instance_id for instance in placed if instance is not None] in (["d", "e"], ["d", "f"])

    virtually(work())


def test_requests_parked_at_an_owner_that_dies_wait_within_their_bounds_for_the_next_one() -> None:
    async def work() -> None:
        client, first, second = await two_routers()
        await both_owners(client, (first, second))
        asking = {name: ask(client, name) for name in ("short", "long")}
        await asyncio.sleep(0.5)
        await first.park("short", 20)
        await first.park("long", 40)
        await asyncio.sleep(0.5)
        first.network.kill(first.node)
        answer, took_s = await asking["short"]
        assert (answer.instance, answer.code) == (None, PLACEMENT_TIMEOUT)
        assert took_s == pytest.approx(20.5, abs=0.1)
        crowd = [ask(client, f"new {number}") for number in range(int(BURST_UNITS) + 1)]
        await second.owner("r1", 2)
        await asyncio.sleep(0.5)
        # The instance has got what it may get at once without a router.
        assert second.asked() == ["long", f"new {len(crowd) - 1}"]
        for task in crowd[:-1]:
            assert await placed_after(task) < 0.1
        (again,) = (message.place for message in second.heard if message.place.request_id == "long")
        assert again.parked.ToSeconds() == 20
        for name in second.asked():
            await second.place(name)
        assert {instance_of((await task)[0]) for task in (asking["long"], crowd[-1])} == {"e"}

    virtually(work())


def test_an_owner_that_does_not_serve_is_not_asked_by_all_at_once() -> None:
    """Each of its refusals would bring thousands of prompts again."""

    async def work() -> None:
        client, first, second = await two_routers()
        await both_owners(client, (first, second))
        asking = []
        for number in range(50):
            asking.append(ask(client, f"r{number}"))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert len(first.asked()) == 50
        for name in first.asked():
            await first.not_serving(name)
        for _ in range(20):
            seen = len(first.asked())
            await asyncio.sleep(0.05)
            for name in first.asked()[seen:]:
                await first.not_serving(name)
        assert 55 <= len(first.asked()) <= 62
        assert set(first.asked()[50:]) == {"r0"}
        await asyncio.sleep(0.5)
        # Not refused, so it serves.
        assert set(first.asked()[-49:]) == {f"r{number}" for number in range(1, 50)}
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert len(client._waiting) == 0

    virtually(work())


async def placed_steps(client: RouterClient, owner: ScriptedRouter, names: Sequence[str]) -> None:
    """Let the owner place requests, each by a first step."""
    asking = [ask(client, name) for name in names]
    await asyncio.sleep(0.5)
    for name in names:
        await owner.place(name)
    assert {instance_of(answer) for answer, _ in await asyncio.gather(*asking)} == {"e"}


def step_ends(client: RouterClient, name: str) -> asyncio.Task[Any]:
    """Report the end of a request's first step, and wait for the next one."""
    return asyncio.create_task(client.next_step(name, 0, "", False, 60.0))


def test_an_owner_that_does_not_know_a_requests_plan_serves_its_pool() -> None:
    """It has taken the pool from the router that made the plans, and their steps end one after the other."""

    async def work() -> None:
        client, first, _ = await two_routers()
        names = [f"x{number}" for number in range(20)]
        await placed_steps(client, first, names)
        steps = [step_ends(client, name) for name in names]
        await asyncio.sleep(0.5)
        for number, name in enumerate(names):
            await first.not_serving(name)
            await asyncio.sleep(0.05)
            if number == 9:
                ask(client, "y")
        assert first.asked() == [*names, "y"]
        assert [type(lost) for lost in await asyncio.gather(*steps, return_exceptions=True)] == [NoRouter] * 20

    virtually(work())


@pytest.mark.parametrize("taken_by", [0, 1])
def test_a_step_that_ends_while_its_pool_has_no_owner_is_not_waited_for(taken_by: int) -> None:
    """The router that is told does not own the pool then: it knows no plan, also if it takes the pool afterwards."""

    async def work() -> None:
        client, *routers = await two_routers()
        await placed_steps(client, routers[0], ["x", "other"])
        taker = routers[taken_by]
        for router in routers:
            await router.pools([pb.Pool(model="m", served_names=["m"], instances=[pb.InstanceRef(instance_id="e")])])
        if taken_by == 1:
            routers[0].network.kill(routers[0].node)
        await asyncio.sleep(0.5)
        step = step_ends(client, "x")
        await asyncio.sleep(0.5)
        assert any(message.HasField("step_done") for message in taker.heard)
        await taker.owner(taker.router_id, 2)
        async with asyncio.timeout(1.0):
            with pytest.raises(NoRouter):
                await step
        await asyncio.sleep(0.5)
        # Both still run.
        announced = [message.hello.open_streams for message in taker.heard if message.HasField("hello")][-1]
        assert {stream.request.request_id for stream in announced} == {"x", "other"}
        assert client.open_count == 2

    virtually(work())
