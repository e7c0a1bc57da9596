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
