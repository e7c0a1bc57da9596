"""What the routers' words about the fleet come to."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from services.gateway.owners import OWNER_S, Owners


def fleet(within_s: int | None = None) -> placement_pb2.Fleet:
    told = placement_pb2.Fleet()
    if within_s is not None:
        told.owner_within.FromSeconds(within_s)
    return told


def test_the_most_patient_router_says_how_long_a_pool_may_have_no_owner() -> None:
    owners = Owners()
    assert owners.within_s == OWNER_S
    owners.tell("1", "one", fleet(3))
    owners.tell("2", "two", fleet(8))
    owners.tell("3", "three", fleet())
    assert owners.within_s == 8
    owners.forget("2")
    assert owners.within_s == 3
