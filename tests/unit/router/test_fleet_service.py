"""FleetService's lists while the fleet changes, without a server."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pointsman.router.v1 import fleet_pb2
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.history.rows import POOL_BUCKETS, POOL_STEP_S, PoolMeasure, PoolSample
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.router import Router
from pointsman_router.io.rpc import paged_lists
from pointsman_router.io.rpc.fleet_service import FleetService
from pointsman_router.io.telemetry.decision_log import DecisionLog
from tests.support.router_values import join, place, request, state


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


async def test_decisions_are_looked_for_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, log = state(), DecisionLog(100)
    join(fleet, "a", 1)
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        decide(f"later-{pauses}")

    def decide(request_id: str) -> None:
        placed = place(fleet, request(request_id, tokens=1))
        assert isinstance(placed, ev.Placed)
        log.decided(placed.decision, 0.0, 0.0)

    for number in range(100):
        decide(f"r{number}")
    monkeypatch.setattr(asyncio, "sleep", pause)
    asked, nobody = service(fleet, decisions=log), fleet_pb2.DecisionFilter(tenant="nobody")
    assert not (await asked.ListDecisions(fleet_pb2.ListDecisionsRequest(filter=nobody), None)).decisions
    assert pauses == 100
    assert not (await asked.SummarizeDecisions(fleet_pb2.SummarizeDecisionsRequest(filter=nobody), None)).decided
    assert pauses == 200


async def test_pages_of_decisions_go_on_where_the_one_before_ended() -> None:
    fleet, log = state(), DecisionLog(100)
    join(fleet, "a", 1)
    for number in range(10):
        placed = place(fleet, request(f"r{number}", tokens=1))
        assert isinstance(placed, ev.Placed)
        log.decided(placed.decision, 0.0, 0.0)
    asked, wanted = service(fleet, decisions=log), fleet_pb2.ListDecisionsRequest(page_size=4)
    pages: list[list[str]] = []
    while not pages or wanted.page_token:
        answer = await asked.ListDecisions(wanted, None)
        pages.append([decision.request_id for decision in answer.decisions])
        wanted.page_token = answer.next_page_token
    assert pages == [["r9", "r8", "r7", "r6"], ["r5", "r4", "r3", "r2"], ["r1", "r0"]]


@pytest.mark.parametrize(("name", "found"), [("", 1), ("m", 1), ("alias", 1), ("other", 0)])
async def test_decisions_and_sessions_are_found_by_any_name_of_their_model(name: str, found: int) -> None:
    fleet, log = state(), DecisionLog(10)
    join(fleet, "a", 1)
    placed = place(fleet, request("r", tokens=1, session_id="s", model="alias"), time.monotonic())
    assert isinstance(placed, ev.Placed)
    log.decided(placed.decision, 0.0, 0.0)
    asked, wanted = service(fleet, decisions=log), fleet_pb2.DecisionFilter(model=name)
    decisions = (await asked.ListDecisions(fleet_pb2.ListDecisionsRequest(filter=wanted), None)).decisions
    sessions = (await asked.ListSessions(fleet_pb2.ListSessionsRequest(model=name), None)).sessions
    assert (len(decisions), len(sessions)) == (found, found)


# What a client of gRPC takes by default, bytes.
MESSAGE_BYTES = 4 << 20


async def test_a_page_of_instances_with_many_adapters_fits_into_a_message() -> None:
    fleet = state()
    adapters = tuple(f"adapter-{number:050}" for number in range(500))
    for number in range(200):
        join(fleet, f"i{number:03}", number, lora_names=adapters)
    found: list[str] = []
    wanted = fleet_pb2.ListInstancesRequest()
    while not found or wanted.page_token:
        page = await service(fleet).ListInstances(wanted, None)
        assert page.ByteSize() < MESSAGE_BYTES
        found += [status.instance.instance_id for status in page.instances]
        wanted.page_token = page.next_page_token
    assert found == [f"i{number:03}" for number in range(200)]


async def test_a_page_of_decisions_on_instances_with_many_adapters_fits_into_a_message() -> None:
    fleet, log = state(), DecisionLog(200)
    join(fleet, "a", 1, lora_names=tuple(f"adapter-{number:050}" for number in range(500)))
    for number in range(200):
        placed = place(fleet, request(f"r{number}", tokens=1))
        assert isinstance(placed, ev.Placed)
        log.decided(placed.decision, 0.0, 0.0)
    found: list[str] = []
    wanted = fleet_pb2.ListDecisionsRequest(page_size=1_000)
    while not found or wanted.page_token:
        page = await service(fleet, decisions=log).ListDecisions(wanted, None)
        assert page.ByteSize() < MESSAGE_BYTES
        found += [decision.request_id for decision in page.decisions]
        wanted.page_token = page.next_page_token
    assert found == [f"r{number}" for number in reversed(range(200))]


async def test_a_page_of_pools_histories_fits_into_a_message() -> None:
    now = time.monotonic()
    begun = (now // POOL_STEP_S - POOL_BUCKETS) * POOL_STEP_S
    history = FleetHistory(begun)
    sample = PoolSample(True, 1, 2, 3, 4.0, 0.5, 0.6)
    for pool in (f"m{number:03}" for number in range(500)):
        for bucket in range(POOL_BUCKETS + 1):
            history.sample_pool(pool, sample, begun + bucket * POOL_STEP_S)
    # All have the series that a pool has without requests; the other four are as long.
    wanted = fleet_pb2.ListPoolHistoriesRequest(page_size=1_000)
    first = await service(state(), history=history).ListPoolHistories(wanted, None)
    assert len(first.pools[0].series) >= 8
    assert first.ByteSize() / len(first.pools[0].series) * len(PoolMeasure) < MESSAGE_BYTES
    wanted.page_token = first.next_page_token
    second = await service(state(), history=history).ListPoolHistories(wanted, None)
    assert [row.model for row in [*first.pools, *second.pools]] == sorted(history.pools)
