"""What FleetService lists besides instances and decisions: sessions, outcomes, policies, replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import redis.asyncio
from google.rpc import error_details_pb2
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.core.enum_words import word
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import InstanceInfo, PlacementRequest
from pointsman_router.core.policy.reasons import REASONS, ROUTE_CLASSES
from pointsman_router.core.policy.registry import POLICIES, make_policy
from pointsman_router.io.router import VERSION
from pointsman_router.io.store import redis_scripts
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.waiting import eventually


async def replicas_of(client: Client) -> fleet_pb2.ListReplicasResponse:
    return await client.fleet.ListReplicas(fleet_pb2.ListReplicasRequest())


def ends(group: fleet_pb2.SummarizeDecisionsResponse.Group) -> dict[str, int]:
    return {word(fleet_pb2.DecisionOutcome, outcome.outcome): outcome.decided for outcome in group.outcomes}


async def test_a_change_of_a_pools_policy_is_listed_logged_and_counted_with_its_reason() -> None:
    with capture_logs() as logged:
        async with running(policy="lpwl") as (server, client):
            await Report(client).join("a")
            gateway = Session(client)
            await gateway.hello()
            await gateway.place("r")
            server.router.submit(ev.PolicySet(make_policy("auto")))

            async def listed() -> bool:
                return len((await replicas_of(client)).policy_changes) == 1

            await eventually(listed, "the change is listed")
            answer = await replicas_of(client)
            samples = server.router.telemetry.registry.get_sample_value
            labels = {"model": "m", "policy": "unified", "reason": "curve_not_learned"}
            assert samples("pointsman_router_policy_changes_total", labels) == 1
    [change], [pool] = answer.policy_changes, answer.pools
    assert (change.model, change.name, change.name_before) == ("m", "unified", "lpwl")
    assert (change.reason, change.reason_before) == ("curve_not_learned", "")
    assert abs(change.time.ToNanoseconds() / 1e9 - time.time()) < 60
    assert (pool.policy.reason, pool.policy.asked_name) == ("curve_not_learned", "")
    assert pool.policy.age.ToNanoseconds() >= 0
    [entry] = [entry for entry in logged if entry["event"] == "auto took another policy for a pool"]
    assert (entry["reason"], entry["before"]) == ("curve_not_learned", "lpwl")


async def sessions_of(client: Client, **wanted: Any) -> list[tuple[str, str, str]]:
    answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(**wanted))
    return [(session.tenant, session.session_id, session.instance_id) for session in answer.sessions]


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
        assert await sessions_of(client, instance_id="a") == [session for session in listed if session[2] == "a"]
        assert await sessions_of(client, model="other") == []
        answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(page_size=1))
        assert (answer.total, answer.time_to_live.seconds) == (4, 3_600)


async def test_sessions_are_listed_with_what_the_log_tells_of_their_turns() -> None:
    async with running(policy="sticky", decision_log_size=4) as (_, client):
        await Report(client).join("a")
        gateway = Session(client)
        await gateway.hello()
        started = time.time()
        for turn, (session, tokens) in enumerate([("gone", 16), ("s", 100), ("s", 300), ("other", 16), ("s", 320)]):
            await gateway.place(f"r{turn}", session_id=session, tokens=tokens)
            await gateway.finish(f"r{turn}", cached_tokens=turn * 32)

        async def sessions() -> list[tuple[str, int, int, int, int]]:
            answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest())
            assert started <= answer.counted_since.ToNanoseconds() / 1e9 <= time.time()
            return [
                (
                    session.session_id,
                    session.turns,
                    session.input_tokens,
                    session.cached_tokens,
                    session.last_input_tokens,
                )
                for session in answer.sessions
            ]

        # The log no longer contains its first turn.
        expected = [("s", 3, 720, 32 + 64 + 128, 320), ("other", 1, 16, 16, 16), ("gone", 0, 0, 0, 0)]

        async def counted() -> bool:
            return await sessions() == expected

        await eventually(counted, "the ends of five requests")


async def test_a_request_that_outlives_the_log_counts_in_metrics_and_history() -> None:
    async with running(policy="sticky", decision_log_size=1) as (server, client):
        await Report(client).join("a")
        gateway = Session(client)
        await gateway.hello()
        for number in range(2):
            await gateway.place(f"r{number}", tokens=160)
        for number in range(2):
            timings = placement_pb2.Timings(first_token_ms=250.0)
            await gateway.finish(f"r{number}", cached_tokens=32, timings=timings)
        value = server.router.telemetry.registry.get_sample_value

        async def both_ended() -> bool:
            return value("pointsman_router_outcomes_total", {"outcome": "OK"}) == 2

        await eventually(both_ended, "the ends of two requests")
        assert value("pointsman_router_ttft_seconds_count", {"route_class": "LIGHT"}) == 2
        assert value("pointsman_router_reported_cached_tokens_total") == 64
        assert server.router.history.total._reported == 64


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

        async def summed(**wanted: Any) -> fleet_pb2.SummarizeDecisionsResponse:
            return await client.fleet.SummarizeDecisions(fleet_pb2.SummarizeDecisionsRequest(**wanted))

        async def both_ended() -> bool:
            return ends((await summed()).groups[0]) == {"OK": 1, "FAILED": 1, "OPEN": 1}

        await eventually(both_ended, "the ends of two requests")
        answer = await summed()
        (group,) = answer.groups
        assert (answer.decided, group.decided) == (3, 3)
        assert (group.route_class, group.mode) == (fleet_pb2.ROUTE_CLASS_LIGHT, fleet_pb2.PLACEMENT_MODE_COLOCATED)
        assert (group.input_tokens, group.reported, group.reported_cached_tokens) == (480, 1, 32)
        assert group.ttft_p50.ToMilliseconds() == group.ttft_p95.ToMilliseconds() == 250
        total = answer.total
        assert (total.route_class, total.reason, total.decided, total.input_tokens) == (0, "", 3, 480)
        assert (ends(total), total.ttft_p95.ToMilliseconds()) == (ends(group), 250)
        assert (await summed(last=2)).decided == 2
        assert ends((await summed(filter=fleet_pb2.DecisionFilter(session_id="s1"))).groups[0]) == {"FAILED": 1}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await summed(last=10_001)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_policies_are_listed_with_what_may_be_set() -> None:
    async with running() as (_, client):
        answer = await client.fleet.ListPolicies(fleet_pb2.ListPoliciesRequest())
        assert [policy.name for policy in answer.policies] == list(POLICIES)
        assert (dict(answer.reasons), dict(answer.route_classes)) == (REASONS, ROUTE_CLASSES)
        in_force = (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy
        described = next(policy for policy in answer.policies if policy.name == in_force.name)
        defaults = {setting.name: setting.default_value.number_value for setting in described.settings}
        assert defaults == dict(in_force.settings.items())


async def test_a_router_by_itself_tells_its_own_health() -> None:
    async with running(router_id="one") as (server, client):
        await Report(client).join("a")
        gateway = Session(client)
        await gateway.hello()
        await gateway.place("r", session_id="s")
        answer = await replicas_of(client)
        address = f"127.0.0.1:{server.port}"
        assert [
            (replica.router_id, replica.address, replica.HasField("heartbeat_age")) for replica in answer.replicas
        ] == [("one", address, False)]
        (pool,) = answer.pools
        assert (pool.model, pool.owner.router_id, pool.owner.address, pool.instances) == ("m", "one", address, 1)
        assert (pool.policy.name, pool.policy.reason, pool.policy.ready_instances) == (
            "unified",
            "curve_not_learned",
            1,
        )
        (replica,) = answer.replicas
        assert (replica.version, replica.open_requests, replica.held_requests, replica.gateways) == (VERSION, 1, 0, 1)
        assert abs(replica.start_time.ToNanoseconds() / 1e9 - time.time()) < 60
        own = answer.this_replica
        assert own.version == VERSION
        assert (own.router_id, own.store, own.ready, own.degraded) == ("one", "memory", True, False)
        assert (own.gateways, own.agent_streams, own.open_requests, own.sessions, own.decisions) == (1, 1, 1, 1, 1)
        assert not own.HasField("store_answer_age")


async def test_replicas_that_share_a_redis_see_each_other_come_and_go(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, redis):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (first, client):
            await Report(client).join("a")

            async def owned() -> bool:
                return [pool.owner.router_id for pool in (await replicas_of(client)).pools] == ["one"]

            await eventually(owned, "the pool's owner")
            async with running(router_id="two", **shared) as (second, other):

                async def both() -> bool:
                    seen = [
                        [(replica.router_id, replica.address) for replica in (await replicas_of(of)).replicas]
                        for of in (client, other)
                    ]
                    both = [("one", f"127.0.0.1:{first.port}"), ("two", f"127.0.0.1:{second.port}")]
                    return seen == [both, both]

                await eventually(both, "each knows both")
                answer = await replicas_of(client)
                assert all(replica.heartbeat_age.ToMilliseconds() < 30_000 for replica in answer.replicas)
                assert (answer.this_replica.store, answer.this_replica.HasField("store_answer_age")) == ("redis", True)

            async def alone() -> bool:
                return [replica.router_id for replica in (await replicas_of(client)).replicas] == ["one"]

            await eventually(alone, "two has left")
            redis.kill()

            async def degraded() -> bool:
                return (await replicas_of(client)).this_replica.degraded

            await eventually(degraded, "Redis is missed")
            heartbeat_age = (await replicas_of(client)).this_replica.store_answer_age.ToNanoseconds()

            async def more_silent() -> bool:
                return (await replicas_of(client)).this_replica.store_answer_age.ToNanoseconds() > heartbeat_age

            await eventually(more_silent, "the silence lasts")


async def test_a_replica_that_fell_silent_is_lost_until_another_one_takes_its_place(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (server, client):

            def lost(*names: str) -> Callable[[], Awaitable[bool]]:
                async def check() -> bool:
                    lost = [replica.router_id for replica in (await replicas_of(client)).lost_replicas]
                    metrics = generate_latest(server.router.telemetry.registry).decode()
                    return lost == list(names) and f"pointsman_router_lost_replicas {len(names)}.0" in metrics

                return check

            async with running(router_id="two", **shared):
                await eventually(lambda: len(server.router.store.replicas()) == 2, "both are known")
            await heartbeat(url, "three")
            await eventually(lost("three"), "three is missed, and two is not, which took leave")
            async with running(router_id="four", **shared):
                await eventually(lost(), "four has taken its place")
            await heartbeat(url, "three")
            await eventually(lost("three"), "three is missed again")

            async def back() -> bool:
                await heartbeat(url, "three")
                return await lost()()

            await eventually(back, "three is back")


async def test_a_replica_that_returns_under_another_id_at_once_is_not_missed(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        lease_ms = 3_600_000  # longer than anything in this test
        for name in ("one", "two", "three"):
            await heartbeat(url, name, lease_ms)
        async with redis.asyncio.Redis.from_url(url) as store:
            now = (await store.time())[0] * 1e3
            await store.zadd(
                "pointsman:{default}:joined",
                {"one": now - 9 * lease_ms, "two": now - 9 * lease_ms, "three": now - 2 * lease_ms},
            )
            await store.zadd("pointsman:{default}:replicas", {"two": now - 3 * lease_ms, "three": now})
            assert await heartbeat(url, "one", lease_ms) == []  # three has joined after two's last heartbeat
            await store.zadd("pointsman:{default}:replicas", {"three": now - 1.5 * lease_ms})
            assert await heartbeat(url, "one", lease_ms) == [b"three"]


async def heartbeat(url: str, router_id: str, lease_ms: int = 500) -> list[bytes]:
    """Send a heartbeat of a router that does not run; return the routers that are lost then."""
    names = ("replicas", "addresses", "replica_info", "config", "lost", "joined")
    async with redis.asyncio.Redis.from_url(url) as store:
        reply = await store.register_script(redis_scripts.HEARTBEAT)(
            keys=[f"pointsman:{{default}}:{name}" for name in names], args=[router_id, "there:1", lease_ms, "", 0, ""]
        )
    return [name for name, _ in reply[4]]


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return the reason in the ErrorInfo of a failed call."""
    details = details_of(error)
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    assert info.domain == "pointsman"
    return str(info.reason)


async def pages(method: Any, request: Any, entries: str) -> list[list[Any]]:
    """All pages of a list."""
    found = []
    while True:
        answer = await method(request)
        found.append(list(getattr(answer, entries)))
        if not answer.next_page_token:
            return found
        request.page_token = answer.next_page_token


def hello_of(number: int) -> ev.AgentHello:
    name = f"i{number:04}"
    info = InstanceInfo(instance_id=name, incarnation="1", url=f"http://{name}", model=f"m{number % 2}", block_size=16)
    return ev.AgentHello(number + 1_000_000, info, KEY_SCHEME, 1, 0)


async def test_a_thousand_instances_come_in_pages() -> None:
    async with running() as (server, client):
        for number in range(1_001):
            server.router.submit(hello_of(number))
        every = [f"i{number:04}" for number in range(1_001)]
        for size, expected in ((0, [1_000, 1]), (400, [400, 400, 201]), (5_000, [1_000, 1])):
            found = await pages(client.fleet.ListInstances, fleet_pb2.ListInstancesRequest(page_size=size), "instances")
            assert [len(page) for page in found] == expected
            assert [instance.instance.instance_id for page in found for instance in page] == every
        of_one = fleet_pb2.ListInstancesRequest(model="m0", page_size=300)
        found = await pages(client.fleet.ListInstances, of_one, "instances")
        assert [len(page) for page in found] == [300, 201]
        # An instance that leaves between two pages does not shift the others.
        first = await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest(page_size=2))
        server.router.submit(ev.AgentGoodbye(1_000_001, "i0001"))
        then = fleet_pb2.ListInstancesRequest(page_size=2, page_token=first.next_page_token)
        second = await client.fleet.ListInstances(then)
        assert [instance.instance.instance_id for instance in second.instances] == ["i0002", "i0003"]


async def test_ten_thousand_decisions_come_in_pages_while_more_are_made() -> None:
    async with running(policy="round_robin") as (server, client):
        for number in range(2):
            server.router.submit(hello_of(number * 2))

        def decide(number: int) -> None:
            asked = PlacementRequest(f"r{number}", "m0", 16, session_id=f"s{number % 3}")
            server.router.submit(ev.PlaceRequested(asked, "g"))
            # Later requests scan the open ones, so this one is finished.
            server.router.submit(ev.Finished(f"r{number}", "OK"))

        for number in range(10_000):
            decide(number)
        request = fleet_pb2.ListDecisionsRequest(page_size=1_000)
        seen: list[str] = []
        sizes = []
        while True:
            answer = await client.fleet.ListDecisions(request)
            seen += [decision.request_id for decision in answer.decisions]
            sizes.append(len(answer.decisions))
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
            decide(10_000 + len(sizes))
        # Nine more decisions pushed the nine oldest out of the log.
        assert sizes == [1_000] * 9 + [991]
        assert seen == [f"r{number}" for number in range(9_999, 8, -1)]
        filtered = fleet_pb2.ListDecisionsRequest(filter=fleet_pb2.DecisionFilter(session_id="s1"))
        assert len((await client.fleet.ListDecisions(filtered)).decisions) == 50
        # Sessions are listed in pages, the most recently used first.
        listed = await pages(client.fleet.ListSessions, fleet_pb2.ListSessionsRequest(page_size=2), "sessions")
        assert sorted(decision.session_id for page in listed for decision in page) == ["s0", "s1", "s2"]


async def test_sessions_used_in_one_moment_are_listed_once_each() -> None:
    async with running() as (server, client):
        affinity, now = server.router.state.affinity, time.monotonic()
        for number in range(10):
            affinity.assign("m", f"t/s{number}", "a", now + number // 4 - 5)
        for size in (1, 2, 3, 10):
            request = fleet_pb2.ListSessionsRequest(page_size=size, text="t/")
            found = await pages(client.fleet.ListSessions, request, "sessions")
            assert all(len(page) == size for page in found[:-1])
            assert sorted(session.session_id for page in found for session in page) == [f"s{n}" for n in range(10)]


async def test_a_page_that_there_is_not_is_an_invalid_argument() -> None:
    async with running() as (server, client):
        for number in range(3):
            server.router.submit(hello_of(number))
        first = await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest(page_size=1))
        token = first.next_page_token
        wrong: list[tuple[Any, Any, str]] = [
            (client.fleet.ListInstances, fleet_pb2.ListInstancesRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
            (
                client.fleet.ListInstances,
                fleet_pb2.ListInstancesRequest(page_token=token, model="m0"),
                "INVALID_PAGE_TOKEN",
            ),
            (client.fleet.ListDecisions, fleet_pb2.ListDecisionsRequest(page_token=token), "INVALID_PAGE_TOKEN"),
            (client.fleet.ListSessions, fleet_pb2.ListSessionsRequest(page_token=token), "INVALID_PAGE_TOKEN"),
            (client.fleet.ListSessions, fleet_pb2.ListSessionsRequest(page_size=-1), "INVALID_FIELD"),
        ]
        for method, request, reason in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(request)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(error.value) == reason


async def test_errors_tell_their_reason() -> None:
    async with running() as (_, client):
        for call, code, reason in (
            (
                client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="d")),
                "NOT_FOUND",
                "DECISION_NOT_FOUND",
            ),
            (
                client.fleet.GetInstance(fleet_pb2.GetInstanceRequest(instance_id="i")),
                "NOT_FOUND",
                "INSTANCE_NOT_FOUND",
            ),
            (client.fleet.Explain(fleet_pb2.ExplainRequest()), "NOT_FOUND", "MODEL_NOT_FOUND"),
            (client.fleet.WhatIf(fleet_pb2.WhatIfRequest()), "INVALID_ARGUMENT", "INVALID_POLICY"),
            (client.placement.Place(placement_pb2.PlaceRequest()), "INVALID_ARGUMENT", "INVALID_FIELD"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert (error.value.code().name, reason_of(error.value)) == (code, reason)


async def test_a_slow_reader_is_told_how_many_decisions_it_missed() -> None:
    async with running(policy="round_robin") as (server, client):
        server.router.submit(hello_of(0))
        wanted = fleet_pb2.DecisionFilter(session_id="s")
        watch: Any = client.fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest(filter=wanted))
        reader = asyncio.ensure_future(watch.read())

        async def watched() -> bool:
            return server.router.decisions.watched

        await eventually(watched, "the watch has begun")
        for number in range(3_000):  # in one turn of the router's event loop: the watcher cannot read in between
            asked = PlacementRequest(f"r{number}", "m0", 16, session_id="s" if number % 2 else "other")
            server.router.submit(ev.PlaceRequested(asked, "g"))
        first = await reader
        assert (first.dropped, first.decision.request_id) == (500, "r1001")
        second = await watch.read()
        assert (second.dropped, second.decision.request_id) == (0, "r1003")
        watch.cancel()
