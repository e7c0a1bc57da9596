"""Cordons and weights over real gRPC, with a real Redis where they are to outlive routers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from hashlib import sha1
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from redis import Redis
from structlog.testing import capture_logs

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_router.core.instances import instance_orders
from pointsman_router.io import operator_config
from pointsman_router.io.store import redis_scripts
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.waiting import eventually

READY, CORDONED = fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_CORDONED


async def order(client: Client, name: str, **changes: Any) -> fleet_pb2.SetInstanceOrderResponse:
    request = fleet_pb2.SetInstanceOrderRequest(instance_id=name, **changes)
    answer: fleet_pb2.SetInstanceOrderResponse = await client.fleet.SetInstanceOrder(request)
    return answer


async def orders(client: Client) -> dict[str, tuple[bool, float, str, bool]]:
    answer = await client.fleet.ListInstanceOrders(fleet_pb2.ListInstanceOrdersRequest())
    return {
        order.instance_id: (order.cordoned, order.weight, _reasons(order), order.instance_known)
        for order in answer.orders
    }


def _reasons(order: fleet_pb2.InstanceOrder) -> str:
    return ", ".join(filter(None, (order.cordon_reason, order.weight_reason)))


def has_orders(client: Client, **wanted: tuple[bool, float, str, bool]) -> Any:
    async def check() -> bool:
        return await orders(client) == wanted

    return check


def knows(client: Client, *names: str) -> Any:
    async def check() -> bool:
        return {*names} <= (await orders(client)).keys()

    return check


async def refused_as(call: Any) -> tuple[str, str, str]:
    """Return the code, the reason and the message of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    info = error_details_pb2.ErrorInfo()
    assert details_of(error.value)[0].Unpack(info)
    return error.value.code().name, info.reason, str(error.value.details())


async def test_an_order_is_of_all_replicas_and_outlives_all_restarts(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, redis):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            for client in (one, two):
                for name in "ab":
                    await Report(client).join(name)
            answer = await order(one, "a", cordoned=True, reason="a new disk")
            assert (answer.instance.state, answer.instance.cordoned, answer.this_replica_only) == (
                CORDONED,
                True,
                False,
            )
            assert (await order(two, "late", weight=0.25)).order.weight == 0.25
            both = {"a": (True, 1.0, "a new disk", True), "late": (False, 0.25, "", False)}
            for client in (one, two):
                await eventually(has_orders(client, **both), "each knows what was said to the other")
            for client in (one, two):
                await Report(client).join("a", incarnation="2")
                await Report(client).join("late")
                known = await client.instances()
                assert (known["a"].state, known["a"].cordon_reason) == (CORDONED, "a new disk"), "its engine's restart"
                assert (known["b"].state, known["b"].weight, known["late"].weight) == (READY, 1.0, 0.25)
            # Both replicas change the same order, each another field.
            await asyncio.gather(order(one, "b", cordoned=True), order(two, "b", weight=0.5))
            both |= {"b": (True, 0.5, "", True), "late": (False, 0.25, "", True)}
            for client in (one, two):
                await eventually(has_orders(client, **both), "neither change is lost")
        # All routers restart.
        async with AsyncExitStack() as stack:
            (_, one), (_, two) = [
                await stack.enter_async_context(running(router_id=name, **shared)) for name in ("one", "two")
            ]
            unknown = {name: (*said[:3], False) for name, said in both.items()}
            for client in (one, two):
                await eventually(has_orders(client, **unknown), "read from Redis again")
            await Report(one).join("a", incarnation="3")
            assert (await one.instances())["a"].state == CORDONED
            redis.kill()
            alone = await order(one, "a", cordoned=False)
            assert (alone.this_replica_only, alone.instance.state) == (True, READY)
            del unknown["a"]
            with redis_server(tmp_path, port=int(url.rpartition(":")[2].partition("/")[0])):
                await eventually(has_orders(two, **unknown), "written again into an empty Redis")
                assert await orders(one) == unknown


@pytest.mark.parametrize("comes_back", ["as it was", "empty"])
async def test_orders_of_two_replicas_without_redis_are_both_kept(tmp_path: Path, comes_back: str) -> None:
    """Orders that each replica accepts while Redis is away are new to the other one, and none of them is lost."""
    with ExitStack() as processes:
        url, redis = processes.enter_context(redis_server(tmp_path))
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            clients = (one, two)
            for client in clients:
                for name in "abcd":
                    await Report(client).join(name)
            await order(one, "before", cordoned=True)
            await order(two, "lifted", cordoned=True)
            for client in clients:
                await eventually(knows(client, "before", "lifted"), "both know what was said before")
            os.kill(redis.pid, signal.SIGSTOP) if comes_back == "as it was" else redis.kill()
            answers = [
                await order(two, "a", cordoned=True, reason="a new disk"),
                await order(one, "b", weight=0.5),
                await order(one, "lifted", cordoned=False),
                # The same order, each replica another field.
                await order(two, "c", cordoned=True),
                await order(one, "c", weight=0.25),
                # The same field: the later change wins, whichever replica writes first.
                await order(one, "d", weight=0.75),
                await order(two, "d", weight=0.125),
            ]
            assert all(answer.this_replica_only for answer in answers)
            await two.fleet.Drain(fleet_pb2.DrainRequest(instance_id="b"))
            policy = fleet_pb2.Policy(name="round_robin")
            await one.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=policy))
            if comes_back == "as it was":
                os.kill(redis.pid, signal.SIGCONT)
            else:
                processes.enter_context(redis_server(tmp_path, port=int(url.rpartition(":")[2].partition("/")[0])))
            wanted = {
                "a": (True, 1.0, "a new disk", True),
                "b": (False, 0.5, "", True),
                "before": (True, 1.0, "", False),
                "c": (True, 0.25, "", True),
                "d": (False, 0.125, "", True),
            }
            for client in clients:
                await eventually(has_orders(client, **wanted), "all that was said, wherever")
                assert (await client.instances())["b"].state == fleet_pb2.INSTANCE_STATE_DRAINING
                listed = await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())
                assert listed.policy.name == "round_robin"


async def test_each_change_is_logged_by_the_router_that_was_asked_and_by_those_that_take_it_over(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path) as (url, _), capture_logs() as logged:
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            await Report(one).join("a")
            await order(one, "a", cordoned=True, reason="a new disk")
            await eventually(has_orders(two, a=(True, 1.0, "a new disk", False)), "two takes it over")
            await order(one, "a", cordoned=False)
            await order(one, "b", weight=0.5)
            await eventually(has_orders(two, b=(False, 0.5, "", False)), "two takes them over")
            await one.fleet.Drain(fleet_pb2.DrainRequest(instance_id="a"))
        changes = Counter(
            (line["instance"], line["kind"], line["now"], line["reason"])
            for line in logged
            if line["event"] == "operators changed an instance's order"
        )
    assert changes.pop(("a", "drain", "1", "")) >= 1
    assert changes == {
        ("a", "cordon", True, "a new disk"): 2,
        ("a", "cordon", False, ""): 2,
        ("b", "weight", 0.5, ""): 2,
    }


async def test_a_drain_that_newer_ones_push_out_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_config, "MAX_DRAINS", 2)
    with capture_logs() as logged:
        async with running() as (_, client):
            for name in ("a", "b", "c"):
                await Report(client).join(name)
                await client.fleet.Drain(fleet_pb2.DrainRequest(instance_id=name))
            states = {name: instance.state for name, instance in (await client.instances()).items()}
    draining = fleet_pb2.INSTANCE_STATE_DRAINING
    assert states == {"a": READY, "b": draining, "c": draining}
    [line] = [line for line in logged if line["event"] == "drains have ended: newer ones take their places"]
    assert line["instances"] == ["a"]


async def test_a_heartbeat_carries_no_orders_that_its_router_has(tmp_path: Path) -> None:
    """10,000 of them are a megabyte, and each router sends four heartbeats in a lease."""
    with redis_server(tmp_path) as (url, _):
        async with running(router_id="one", redis_url=url) as (_, one):
            await order(one, "a", cordoned=True)
            with Redis.from_url(url, decode_responses=True) as client:
                names = ("replicas", "addresses", "replica_info", "config", "lost", "joined")
                keys = [f"pointsman:{{default}}:{name}" for name in names]
                version, config = client.hmget("pointsman:{default}:config", "version", "config")
                assert version == "1"

                def config_in_heartbeat(version: int, digest: str) -> list[object]:
                    beat: Any = client.register_script(redis_scripts.HEARTBEAT)
                    return list(beat(keys=keys, args=["two", "two:1", 1_000, "", version, digest])[1:3])

                assert config_in_heartbeat(1, sha1(config.encode()).hexdigest()) == [1, ""]
                assert config_in_heartbeat(1, sha1(b"what was set elsewhere as often").hexdigest()) == [1, config]
                assert config_in_heartbeat(0, sha1(b"").hexdigest()) == [1, config]


async def test_a_cordon_is_seen_in_decisions_and_by_gateways() -> None:
    async with running() as (_, client):
        for name in "ab":
            await Report(client).join(name)
        session = Session(client)
        await session.hello()

        async def placeable() -> set[str]:
            return {instance.instance_id for instance in (await session.fleet()).pools["m"].instances}

        assert await placeable() == {"a", "b"}
        await order(client, "a", cordoned=True)
        assert await placeable() == {"b"}, "a gateway without a router would place on b alone"
        for number in range(4):
            assert (await session.place(f"r{number}", 160)).step.instance.instance_id == "b"
        made = (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r0"))).decision
        assert {candidate.instance_id: (candidate.state, candidate.excluded) for candidate in made.candidates} == {
            "a": (CORDONED, "cordoned"),
            "b": (READY, ""),
        }

        await order(client, "a", cordoned=False)
        await order(client, "b", weight=0.0)
        asked = placement_pb2.PlacementRequest(request_id="x", model="m", input_tokens=160, session_id="s")
        would = (await client.fleet.Explain(fleet_pb2.ExplainRequest(request=asked))).decision
        assert {candidate.instance_id: candidate.excluded for candidate in would.candidates} == {"a": "", "b": "canary"}


async def test_orders_are_listed_in_pages_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_orders, "MAX_ORDERS", 5)
    async with running() as (_, client):
        assert await orders(client) == {}
        for name in "ebdac":
            await order(client, name, weight=0.5)
        request = fleet_pb2.ListInstanceOrdersRequest(page_size=2)
        seen = []
        while True:
            answer = await client.fleet.ListInstanceOrders(request)
            seen.append([order.instance_id for order in answer.orders])
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
        assert seen == [["a", "b"], ["c", "d"], ["e"]]
        assert (await refused_as(order(client, "f", cordoned=True)))[:2] == ("RESOURCE_EXHAUSTED", "TOO_MANY_ORDERS")
        for changes, said in (
            ({"weight": math.nan}, "weight: must be 0 to 1"),
            ({"weight": 2.0}, "weight: must be 0 to 1"),
            ({}, "cordoned: cordoned or weight is needed"),
        ):
            assert await refused_as(order(client, "a", **changes)) == ("INVALID_ARGUMENT", "INVALID_FIELD", said)
        assert (await refused_as(order(client, "", cordoned=True)))[1] == "INVALID_FIELD"
        assert len(await orders(client)) == 5
        assert (await order(client, "a", weight=1.0)).order.weight == 1.0
        assert len(await orders(client)) == 4


async def test_by_command() -> None:
    async with running() as (server, client):
        await Report(client).join("a")

        async def pointsman(*arguments: str) -> str:
            process = await asyncio.create_subprocess_exec(
                *pointsman_command(*arguments, "--router", f"127.0.0.1:{server.port}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            out, _ = await process.communicate()
            return out.decode()

        alone = (
            "warning: no instance of m can answer now: new requests for it may get 503, until one can or until you run "
        )
        assert await pointsman("cordon", "a", "--reason", "a new disk") == (
            f"a is CORDONED, 0 requests open (cordoned: a new disk)\n{alone}`pointsman uncordon a`\n"
        )
        unknown = await pointsman("drain", "http://a")
        assert "no instance 'http://a' (`pointsman instances` lists those that there are)" in unknown
        await Report(client).join("b")
        assert await pointsman("cordon", "a") == "a is CORDONED, 0 requests open (cordoned: a new disk)\n"
        assert await pointsman("weight", "late", "0.1") == "late: no agent reports it (weight 0.1)\n"
        listed = await pointsman("instances")
        assert "CORDONED (a new disk" in listed
        assert "late: no agent reports it (weight 0.1)" in listed
        assert await pointsman("weight", "a", "0.5") == (
            "a is CORDONED, 0 requests open (cordoned: a new disk, weight 0.5)\n"
        )
        assert await pointsman("uncordon", "a") == "a is READY, 0 requests open (weight 0.5)\n"
        # The line also says that the cache counts as empty, if commands take longer than an agent may be silent.
        assert "READY (weight 0.5" in await pointsman("instances")
        for given in ("1.5", "-1", "-0.5"):
            assert "weight: must be 0 to 1" in await pointsman("weight", "a", given)
        assert "Usage: " in await pointsman("weight", "a", "--wieght", "1")
