"""What FleetService lists besides instances and decisions: sessions, outcomes, policies, replicas."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from pointsman.router.core.policy.registry import POLICIES
from pointsman.router.v1 import fleet_pb2, placement_pb2
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import eventually


async def replicas_of(client: Client) -> fleet_pb2.ListReplicasResponse:
    return await client.fleet.ListReplicas(fleet_pb2.ListReplicasRequest())


async def sessions_of(client: Client, **wanted: object) -> list[tuple[str, str, str]]:
    answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(**wanted))  # type: ignore[arg-type]
    return [(one.tenant, one.session_id, one.instance_id) for one in answer.sessions]


async def test_sessions_are_listed_by_their_last_use_and_filtered() -> None:
    async with running(policy="round_robin") as (_, client):
        for name in ("a", "b"):
            await Report(client).join(name)
        gateway = Session(client)
        await gateway.hello()
        owners = {}
        for number in range(4):
            placement = await gateway.place(f"r{number}", session_id=f"s{number}", tenant="t" if number else "")
            owners[number] = placement.step.instance.instance_id
        listed = await sessions_of(client)
        assert listed == [("t" if number else "", f"s{number}", owners[number]) for number in (3, 2, 1, 0)]
        assert await sessions_of(client, page_size=2) == listed[:2]
        assert await sessions_of(client, text="t/s1") == [listed[2]]
        assert await sessions_of(client, instance_id="a") == [one for one in listed if one[2] == "a"]
        assert await sessions_of(client, model="other") == []
        answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(page_size=1))
        assert (answer.total, answer.time_to_live.seconds) == (4, 3_600)


async def test_decisions_are_summed_up_by_how_they_ended() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        gateway = Session(client)
        await gateway.hello()
        for number in range(3):
            await gateway.place(f"r{number}", tokens=160, session_id=f"s{number}")
        timings = placement_pb2.Timings(first_token_ms=250.0)
        await gateway.finish("r0", cached_tokens=32, timings=timings)
        await gateway.finish("r1", outcome=placement_pb2.OUTCOME_FAILED)

        async def summed(**wanted: object) -> fleet_pb2.SummarizeDecisionsResponse:
            return await client.fleet.SummarizeDecisions(fleet_pb2.SummarizeDecisionsRequest(**wanted))  # type: ignore[arg-type]

        async def both_ended() -> bool:
            return dict((await summed()).groups[0].outcomes) == {"OK": 1, "FAILED": 1, "OPEN": 1}

        await eventually(both_ended, "the ends of two requests")
        answer = await summed()
        (group,) = answer.groups
        assert (answer.decided, group.decided, group.route_class, group.mode) == (3, 3, "LIGHT", "COLOCATED")
        assert (group.input_tokens, group.reported, group.reported_cached_tokens) == (480, 1, 32)
        assert group.ttft_p50.ToMilliseconds() == group.ttft_p95.ToMilliseconds() == 250
        assert (await summed(last=2)).decided == 2
        assert (await summed(filter=fleet_pb2.DecisionFilter(session_id="s1"))).groups[0].outcomes == {"FAILED": 1}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await summed(last=10_001)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_policies_are_listed_with_what_may_be_set() -> None:
    async with running() as (_, client):
        answer = await client.fleet.ListPolicies(fleet_pb2.ListPoliciesRequest())
        assert [one.name for one in answer.policies] == list(POLICIES)
        in_force = (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy
        described = next(one for one in answer.policies if one.name == in_force.name)
        defaults = {one.name: one.default_value.number_value for one in described.settings}
        assert defaults == dict(in_force.settings.items())


async def test_a_router_by_itself_tells_its_own_health() -> None:
    async with running(router_id="one") as (server, client):
        await Report(client).join("a")
        gateway = Session(client)
        await gateway.hello()
        await gateway.place("r", session_id="s")
        answer = await replicas_of(client)
        address = f"127.0.0.1:{server.port}"
        assert [(one.router_id, one.address, one.HasField("heartbeat_age")) for one in answer.replicas] == [
            ("one", address, False)
        ]
        (pool,) = answer.pools
        assert (pool.model, pool.owner.router_id, pool.owner.address, pool.instances) == ("m", "one", address, 1)
        own = answer.this_replica
        assert (own.router_id, own.store, own.ready, own.degraded) == ("one", "memory", True, False)
        assert (own.gateways, own.agent_streams, own.open_requests, own.sessions, own.decisions) == (1, 1, 1, 1, 1)
        assert not own.HasField("store_answer_age")


async def test_replicas_that_share_a_redis_see_each_other_come_and_go(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, redis):
        shared = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (first, client):
            await Report(client).join("a")

            async def owned() -> bool:
                return [pool.owner.router_id for pool in (await replicas_of(client)).pools] == ["one"]

            await eventually(owned, "the pool's owner")
            async with running(router_id="two", **shared) as (second, other):

                async def both() -> bool:
                    seen = [
                        [(one.router_id, one.address) for one in (await replicas_of(of)).replicas]
                        for of in (client, other)
                    ]
                    both = [("one", f"127.0.0.1:{first.port}"), ("two", f"127.0.0.1:{second.port}")]
                    return seen == [both, both]

                await eventually(both, "each knows both")
                answer = await replicas_of(client)
                assert all(one.heartbeat_age.ToMilliseconds() < 30_000 for one in answer.replicas)
                assert (answer.this_replica.store, answer.this_replica.HasField("store_answer_age")) == ("redis", True)

            async def alone() -> bool:
                return [one.router_id for one in (await replicas_of(client)).replicas] == ["one"]

            await eventually(alone, "two has left")
            redis.kill()

            async def degraded() -> bool:
                return (await replicas_of(client)).this_replica.degraded

            await eventually(degraded, "Redis is missed")
            heartbeat_age = (await replicas_of(client)).this_replica.store_answer_age.ToNanoseconds()

            async def more_silent() -> bool:
                return (await replicas_of(client)).this_replica.store_answer_age.ToNanoseconds() > heartbeat_age

            await eventually(more_silent, "the silence lasts")
