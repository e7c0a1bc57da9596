"""PoolOwners: what a gateway derives from the fleets that several routers send."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.pool_owners import DEFAULT_OWNER_TIMEOUT_S, PoolOwners


def fleet(timeout_s: int | None = None) -> placement_pb2.Fleet:
    message = placement_pb2.Fleet()
    if timeout_s is not None:
        message.ownerless_timeout.FromSeconds(timeout_s)
    return message


def test_the_most_patient_router_says_how_long_a_pool_may_have_no_owner() -> None:
    owners = PoolOwners()
    assert owners.timeout_s == DEFAULT_OWNER_TIMEOUT_S
    owners.begin("1", "one", fleet(3))
    owners.begin("2", "two", fleet(8))
    owners.begin("3", "three", fleet())
    assert owners.timeout_s == 8
    owners.forget("2")
    assert owners.timeout_s == 3


def test_a_router_that_claims_a_pool_of_a_newer_owner_is_named() -> None:
    def claims(router_id: str, epoch: int) -> placement_pb2.Fleet:
        return placement_pb2.Fleet(
            pools=[placement_pb2.Pool(model="m", owner=placement_pb2.Owner(router_id=router_id, epoch=epoch))]
        )

    owners = PoolOwners()
    owners.begin("1", "one", claims("one", 1))
    owners.begin("3", "three", claims("one", 1))
    assert owners.outdated_claims() == []
    owners.begin("2", "two", claims("two", 2))
    ((address, model, owner),) = owners.outdated_claims()
    assert (address, model, owner.router_id, owner.epoch) == ("1", "m", "two", 2)


def test_of_two_pools_that_serve_a_name_the_first_one_by_name_has_it() -> None:
    """As for routers, in whatever order they describe the pools."""
    owners = PoolOwners()
    pools = [placement_pb2.Pool(model=model, served_names=["both"], lora_names=["red"]) for model in ("n", "m")]
    owners.begin("1", "one", placement_pb2.Fleet(pools=pools))
    assert [owners.pool_of(name) for name in ("both", "red", "n", "other")] == ["m", "m", "n", "other"]
