"""FleetService's lists while the fleet changes, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pointsman.router.v1 import fleet_pb2
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.router import Router
from pointsman_router.io.rpc import paged_lists
from pointsman_router.io.rpc.fleet_service import FleetService
from tests.support.router_values import join, state


def service(state_: RouterState, **parts: Any) -> FleetService:
    """A service whose loops give others their turn after each entry."""
    router = SimpleNamespace(state=state_, settings=SimpleNamespace(router_id="r1"), absent=tuple, **parts)
    return FleetService(cast(Router, router))


@pytest.fixture(autouse=True)
def _turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_lists, "TURN_S", 0.0)
    monkeypatch.setattr(paged_lists, "PAUSE_S", 0.0)


async def test_instances_that_leave_while_they_are_listed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = state()
    for stream, name in enumerate("abcd"):
        join(fleet, name, stream, model="m" if name < "c" else "other")

    async def leave(_: float) -> None:
        for name in "bcd":
            if fleet.instances.get(name) is not None:
                fleet.instances.remove(name)

    monkeypatch.setattr(asyncio, "sleep", leave)
    listed = await service(fleet).ListInstances(fleet_pb2.ListInstancesRequest(), None)
    assert [status.instance.instance_id for status in listed.instances] == ["a"]


async def test_an_instance_that_leaves_while_its_drain_is_stored_is_still_answered() -> None:
    fleet = state()
    join(fleet, "a", 1)

    async def drain(*_: object, **__: object) -> bool:
        fleet.instances.remove("a")
        return True

    answer = await service(fleet, drain=drain).Drain(fleet_pb2.DrainRequest(instance_id="a"), None)
    assert answer.instance.instance.instance_id == "a"
