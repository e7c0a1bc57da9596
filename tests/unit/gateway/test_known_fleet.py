"""What a router tells of its fleet, as one gateway keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.known_fleet import KnownFleet, OutOfStep
from pointsman_gateway.core.pool_owners import PoolOwners


def ref(instance_id: str, incarnation: str = "1") -> placement_pb2.InstanceRef:
    return placement_pb2.InstanceRef(instance_id=instance_id, url=f"http://{instance_id}", incarnation=incarnation)


def fleet(*instances: str, owner: str = "r") -> placement_pb2.Fleet:
    pool = placement_pb2.Pool(model="m", lora_names=["l"], instances=map(ref, instances))
    pool.owner.router_id = owner
    return placement_pb2.Fleet(pools=[pool])


def update(*pools: placement_pb2.PoolUpdate, **values: Any) -> placement_pb2.FleetUpdate:
    return placement_pb2.FleetUpdate(pools=pools, **values)


def test_instances_come_change_and_go_in_order_and_the_rest_stays() -> None:
    known = KnownFleet(fleet("b", "d"))
    known.apply(update(placement_pb2.PoolUpdate(model="m", instances=[ref("c"), ref("a"), ref("d", "2")])))
    assert [(instance.instance_id, instance.incarnation) for instance in known.pools["m"].instances] == [
        ("a", "1"),
        ("b", "1"),
        ("c", "1"),
        ("d", "2"),
    ]
    known.apply(update(placement_pb2.PoolUpdate(model="m", removed_instance_ids=["d", "a", "nobody"])))
    assert list(known.pools["m"].instances) == [ref("b"), ref("c")]
    assert (known.pools["m"].owner.router_id, list(known.pools["m"].lora_names)) == ("r", ["l"])


def test_an_instance_that_gets_no_requests_is_known_as_such_until_it_goes() -> None:
    known = KnownFleet(fleet("b", "d"))
    known.apply(
        update(placement_pb2.PoolUpdate(model="m", removed_instance_ids=["d"], other_instances=[ref("d"), ref("a")]))
    )
    pool = known.pools["m"]
    assert (list(pool.instances), list(pool.other_instances)) == ([ref("b")], [ref("a"), ref("d")])
    known.apply(update(placement_pb2.PoolUpdate(model="m", description=placement_pb2.Pool(model="m"))))
    assert known.pools["m"].other_instances == pool.other_instances
    known.apply(update(placement_pb2.PoolUpdate(model="m", removed_instance_ids=["a", "d"], instances=[ref("d")])))
    assert (list(known.pools["m"].instances), len(known.pools["m"].other_instances)) == ([ref("b"), ref("d")], 0)
    assert list(KnownFleet(placement_pb2.Fleet(pools=[pool])).pools["m"].other_instances) == [ref("a"), ref("d")]


def test_a_description_replaces_all_but_the_instances() -> None:
    known = KnownFleet(fleet("a"))
    described = placement_pb2.Pool(model="m", max_model_len=7)
    known.apply(update(placement_pb2.PoolUpdate(model="m", description=described)))
    assert known.pools["m"] == placement_pb2.Pool(model="m", max_model_len=7, instances=[ref("a")])


def test_pools_come_and_go_and_the_start_comes_to_its_end() -> None:
    known = KnownFleet(placement_pb2.Fleet(starting=True))
    described = placement_pb2.Pool(model="n")
    known.apply(update(placement_pb2.PoolUpdate(model="n", description=described, instances=[ref("x")]), starting=True))
    assert (known.starting, [*known.pools], list(known.pools["n"].instances)) == (True, ["n"], [ref("x")])
    known.apply(update(removed_models=["n", "nothing"]))
    assert (known.starting, known.pools) == (False, {})
    known.apply(update(placement_pb2.PoolUpdate(model="n", description=described)))
    assert known.pools == {"n": described}, "it begins without the instances of the pool that went"


def test_a_pool_that_was_given_out_stays_as_it_is() -> None:
    known = KnownFleet(fleet("a"))
    before = known.pools["m"]
    known.apply(update(placement_pb2.PoolUpdate(model="m", instances=[ref("a", "2"), ref("b")])))
    assert before == fleet("a").pools[0]
    assert known.pools["m"] is not before


def test_a_fleet_that_was_sent_in_no_order_is_put_in_order() -> None:
    known = KnownFleet(fleet("b", "a", "c"))
    known.apply(update(placement_pb2.PoolUpdate(model="m", removed_instance_ids=["a"], instances=[ref("c", "2")])))
    assert list(known.pools["m"].instances) == [ref("b"), ref("c", "2")]


def test_an_update_of_what_was_never_sent_is_out_of_step() -> None:
    known = KnownFleet(fleet("a"))
    with pytest.raises(OutOfStep, match="'other'"):
        known.apply(update(placement_pb2.PoolUpdate(model="other", instances=[ref("x")])))
    owners = PoolOwners()
    with pytest.raises(OutOfStep):
        owners.update("1", update(starting=True))
    owners.begin("1", "r", fleet("a"))
    owners.update("1", update(starting=True))
    owners.forget("1")
    with pytest.raises(OutOfStep):
        owners.update("1", update())


def test_what_one_router_updates_is_merged_with_what_the_others_tell() -> None:
    owners = PoolOwners()
    mine, other = fleet("a", owner="one"), fleet("b", owner="two")
    mine.pools[0].owner.epoch, other.pools[0].owner.epoch = 1, 2
    owners.begin("1", "one", mine)
    owners.begin("2", "two", other)
    owners.update("1", update(placement_pb2.PoolUpdate(model="m", instances=[ref("c")])))
    assert owners.pools() == [other.pools[0]], "two owns it by the higher epoch, and describes it"
    owners.update("2", update(placement_pb2.PoolUpdate(model="m", instances=[ref("d")])))
    [pool] = owners.pools()
    assert ([instance.instance_id for instance in pool.instances], pool.owner.router_id) == (["b", "d"], "two")
    described = placement_pb2.Pool(model="m", owner=placement_pb2.Owner(router_id="one", epoch=3))
    owners.update("1", update(placement_pb2.PoolUpdate(model="m", description=described)))
    [pool] = owners.pools()
    assert ([instance.instance_id for instance in pool.instances], pool.owner.epoch) == (["a", "c"], 3)
