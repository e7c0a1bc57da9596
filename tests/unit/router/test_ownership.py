"""Who takes a free pool, and when a router that has just started may place."""

from __future__ import annotations

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.ownership import SettledReplicas, preferred
from pointsman_router.core.placement_types import Phase
from tests.support.router_values import hello, join, place, request, state


def test_replicas_agree_and_one_that_leaves_moves_only_its_own_pools() -> None:
    pools = [f"pool-{at}" for at in range(60)]
    before = {pool: preferred(pool, ["one", "two", "three"]) for pool in pools}
    assert before == {pool: preferred(pool, ["three", "one", "two"]) for pool in pools}
    assert min(list(before.values()).count(name) for name in ("one", "two", "three")) > 5
    after = {pool: preferred(pool, ["one", "two"]) for pool in pools}
    assert all(after[pool] == owner for pool, owner in before.items() if owner != "three")
    assert preferred("m", []) == ""


def test_placements_wait_for_the_first_reports_but_not_for_ever() -> None:
    router = state(startup_wait_s=3.0)
    router.handle(ev.Tick(), 10.0)
    early = place(router, request("r0", tokens=1), 10.1)
    assert isinstance(early, ev.Refused)
    assert (early.code, early.not_serving) == ("UNAVAILABLE", True)
    hello(router, "a", 1, 10.2)
    join(router, "b", 2, now=10.3)
    assert isinstance(place(router, request("r1", tokens=1), 10.4), ev.Refused)
    assert isinstance(place(router, request("r2", tokens=1), 13.0), ev.Placed)


def test_an_instance_that_is_ready_ends_the_wait_early() -> None:
    router = state(startup_wait_s=3.0)
    join(router, "a", 1, now=10.0)
    assert isinstance(place(router, request("r", tokens=1), 10.0), ev.Placed)


def test_instances_that_a_gateway_remembers_are_waited_for_but_not_for_ever() -> None:
    router = state(startup_wait_s=3.0)
    join(router, "a", 1, now=10.0)
    assert not router.starting(10.0)
    effects = router.handle(ev.GatewayHello("g", known=frozenset({"a", "b"})), 10.1)
    assert ev.FleetChanged() in effects
    assert isinstance(place(router, request("r0", tokens=1), 10.2), ev.Refused)
    hello(router, "b", 2, 10.3)
    assert router.starting(10.3), "its keys are not there yet"
    join(router, "b", 2, now=10.4)
    assert not router.starting(10.4)
    router.handle(ev.GatewayHello("h", known=frozenset({"a", "b"})), 10.5)
    assert not router.starting(10.5), "nothing new is expected"
    running = ev.OpenStream(request("r1", tokens=1), "c", Phase.DECODE, 0)
    router.handle(ev.GatewayHello("h", (running,)), 10.6)
    assert router.starting(10.6), "c runs a request, so it exists"
    assert not router.starting(13.0)
    router.handle(ev.GatewayHello("h", known=frozenset({"d"})), 13.1)
    assert not router.starting(13.1)


def test_a_pool_goes_to_its_preferred_replica_once_that_has_settled_and_is_offered_once() -> None:
    pools = [f"pool-{at}" for at in range(20)]
    theirs = [pool for pool in pools if preferred(pool, ["one", "two"]) == "two"]
    settled = SettledReplicas(3.0)
    settled.seen(["one"], 0.0)
    assert not any(settled.successor(pool, "one", 10.0) for pool in pools)
    settled.seen(["one", "two"], 10.0)
    settled.seen(["one", "two"], 12.9)
    assert not any(settled.successor(pool, "one", 12.9) for pool in pools)
    settled.seen(["one", "two"], 13.0)
    assert [pool for pool in pools if settled.successor(pool, "one", 13.0)] == theirs
    assert settled.successor(theirs[0], "two", 13.0) == ""
    settled.offered(theirs[0], "two")
    assert settled.successor(theirs[0], "one", 14.0) == "", "it did not keep the pool: not again and again"
    settled.seen(["one"], 15.0)
    settled.seen(["one", "two"], 16.0)
    assert settled.successor(theirs[0], "one", 18.0) == "", "the replica came back, and its time to settle began anew"
    settled.seen(["one", "two"], 19.0)
    assert settled.successor(theirs[0], "one", 19.0) == "two"
