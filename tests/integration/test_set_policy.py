"""Policies changed and compared over real gRPC, while requests run."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format, struct_pb2
from google.rpc import error_details_pb2
from redis import Redis

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core.placement_types import Decision
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from pointsman_router.io.main import RouterServer
from pointsman_router.io.operator_config import OperatorConfig
from pointsman_router.io.router import ReplicaInfo
from pointsman_router.io.rpc import paged_lists
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.waiting import eventually

KV = agent_pb2.KvTransfer(protocol=agent_pb2.KV_PROTOCOL_NIXL)
KEYS = prompt_keys(list(range(160)), "m")


def policy(name: str, **settings: Any) -> fleet_pb2.Policy:
    struct = struct_pb2.Struct()
    struct.update(settings)
    return fleet_pb2.Policy(name=name, settings=struct)


def settings_of(policy_message: fleet_pb2.Policy) -> dict[str, Any]:
    return json_format.MessageToDict(policy_message.settings)


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[RouterServer, Client, Session]]:
    """Three instances, of which b has most of a prompt cached, and a gateway. The router has the lab's policies, too."""
    async with running(policies=POLICIES) as (server, client):
        for name, keys in (("a", []), ("b", KEYS[:8]), ("c", [])):
            await Report(client).join(name, keys, kv_transfer=KV)
        session = Session(client)
        await session.hello()
        yield server, client, session


async def decision(client: Client, request_id: str) -> fleet_pb2.Decision:
    return (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id=request_id))).decision


async def set_policy(client: Client, wanted: fleet_pb2.Policy) -> fleet_pb2.Policy:
    return (await client.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=wanted))).policy


async def test_every_registered_policy_can_be_set_and_decides_under_its_name() -> None:
    async with fleet() as (server, client, session):
        for name in POLICIES:
            answer = await set_policy(client, policy(name))
            assert settings_of(answer) == dict(make_policy(name).ref().settings), "all settings, at their defaults"
            placed = await session.place(f"r-{name}", 160, keys=KEYS, session_id="s")
            made = await decision(client, f"r-{name}")
            assert made.decision_id == placed.decision_id
            assert (made.policy.name, settings_of(made.policy)) == (name, settings_of(answer))
            assert made.reason
            assert len(made.candidates) == 3
            asked = fleet_pb2.ExplainRequest(
                request=placement_pb2.PlacementRequest(request_id="x", model="m", input_tokens=160, keys=KEYS)
            )
            would = (await client.fleet.Explain(asked)).decision
            scores = {
                candidate.instance_id: candidate.score for candidate in would.candidates if candidate.HasField("score")
            }
            chosen = would.steps[-1].instance.instance_id
            if would.HasField("margin"):
                assert would.runner_up != chosen
                assert would.margin == pytest.approx(scores[would.runner_up] - scores[chosen])
            await session.finish(f"r-{name}")

            async def free() -> bool:
                return not any(instance.num_requests for instance in (await client.instances()).values())

            await eventually(free, "released")
        server.router.state.check_invariants()


async def test_numbers_words_and_switches_are_set_and_what_is_known_stays() -> None:
    async with fleet() as (server, client, session):
        placed = await session.place("open", 160, keys=KEYS, session_id="s")
        assert placed.step.instance.instance_id == "b"
        wanted = policy("migrate", min_load_gap=3, picker="cache_rich", rotate_affinity=True)
        answer = await set_policy(client, wanted)
        assert settings_of(answer) == dict(make_policy("migrate", settings_of(wanted)).ref().settings)
        assert (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy == answer
        known = (await client.instances())["b"]
        assert (known.num_requests, known.pending_prefill_tokens, known.sessions, known.keys) == (1, 32, 1, 8)
        await session.send(first_token=placement_pb2.FirstToken(request_id="open"))
        await session.place("next", 160, keys=KEYS, session_id="s")
        made = await decision(client, "next")
        assert (made.policy, made.session_owner) == (answer, "b")
        assert next(candidate for candidate in made.candidates if candidate.instance_id == "b").num_requests == 1
        assert (await decision(client, "open")).policy.name == DEFAULT_POLICY, (
            "a decision keeps the policy that made it"
        )
        for name in ("open", "next"):
            await session.finish(name)

        async def free() -> bool:
            return not any(instance.num_requests for instance in (await client.instances()).values())

        await eventually(free, "released")
        server.router.state.check_invariants()


@pytest.mark.parametrize(
    ("wanted", "field", "said"),
    [
        (fleet_pb2.Policy(), "policy.name", "no policy ''"),
        (policy("unifid"), "policy.name", "unified"),
        (policy("dynamo_kv"), "policy.name", "the lab, which is not installed: pointsman[lab]"),
        (policy("unified", decode_wait=1), "policy.settings.decode_wait", "no such setting"),
        (policy("unified", decode_weight=-1), "policy.settings.decode_weight", "outside"),
        (policy("unified", decode_weight=float("nan")), "policy.settings.decode_weight", "outside"),
        (policy("unified", decode_weight="1"), "policy.settings.decode_weight", "must be a number"),
        (policy("unified", decode_weight=True), "policy.settings.decode_weight", "must be a number"),
        (policy("unified", decode_weight=None), "policy.settings.decode_weight", "must be a number"),
        (policy("unified", decode_weight=[1]), "policy.settings.decode_weight", "must be a number"),
        (policy("elastic", decider="cheap"), "policy.settings.decider", "cost or heuristic"),
        (policy("elastic", decider=1), "policy.settings.decider", "cost or heuristic"),
        (policy("migrate", rotate_affinity=1), "policy.settings.rotate_affinity", "true or false"),
        (policy("migrate", rotate_affinity="true"), "policy.settings.rotate_affinity", "true or false"),
    ],
)
async def test_what_cannot_be_set_names_the_field_and_changes_nothing(
    wanted: fleet_pb2.Policy, field: str, said: str
) -> None:
    async with running() as (_, client):
        before = (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy
        for call in (
            client.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=wanted)),
            client.fleet.WhatIf(fleet_pb2.WhatIfRequest(policy=wanted)),
            client.fleet.Explain(fleet_pb2.ExplainRequest(policy=wanted)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            bad = error_details_pb2.BadRequest()
            assert details_of(error.value)[1].Unpack(bad)
            assert [violation.field for violation in bad.field_violations] == [field]
            assert said in bad.field_violations[0].description
        assert (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy == before


async def test_what_if_counts_other_plans_and_sums_them_up() -> None:
    async with fleet() as (_, client, session):
        await session.place("heavy", 40_000, session_id="h")
        await session.place("warm", 160, keys=KEYS, session_id="w")
        again = fleet_pb2.WhatIfRequest(last=10, policy=policy("adaptive_offload"))
        answer = await client.fleet.WhatIf(again)
        was = (await decision(client, "heavy")).steps[-1].instance.instance_id
        [change] = [
            change for change in answer.changes if change.decision_id == (await decision(client, "heavy")).decision_id
        ]
        assert (change.from_instance_id, change.to_instance_id) == (was, was), "the answer comes from the same instance"
        assert (change.from_mode, change.to_mode) == (
            fleet_pb2.PLACEMENT_MODE_COLOCATED,
            fleet_pb2.PLACEMENT_MODE_OFFLOAD,
        )
        assert change.to_prefill_instance_id not in ("", was)
        assert answer.decided == 2 == sum(group.decided for group in answer.groups)
        assert answer.changed == len(answer.changes) == sum(group.changed for group in answer.groups)
        assert answer.cached_tokens_change == sum(group.cached_tokens_change for group in answer.groups)
        heavy = next(group for group in answer.groups if group.route_class == fleet_pb2.ROUTE_CLASS_HEAVY)
        assert (heavy.decided, heavy.changed, heavy.reason) == (1, 1, change.reason)
        same = await client.fleet.WhatIf(fleet_pb2.WhatIfRequest(last=10, policy=policy("unified")))
        assert (same.decided, same.changed, len(same.changes)) == (2, 0, 0)


async def test_what_if_gives_others_their_turn_and_is_asked_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_lists, "TURN_S", 0.0)
    async with fleet() as (server, client, session):
        for number in range(20):
            await session.place(f"r{number}", 160, keys=KEYS)
        state, turns, asked = server.router.state, 0, []
        what_if = state.what_if

        def noted(recorded: Decision, other: Policy) -> Decision:
            asked.append((other.name, turns))
            return what_if(recorded, other)

        monkeypatch.setattr(state, "what_if", noted)

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        names = ("round_robin", "unified")
        await asyncio.gather(
            *(client.fleet.WhatIf(fleet_pb2.WhatIfRequest(last=20, policy=policy(name))) for name in names)
        )
        counting.cancel()
        assert [len(list(group)) for _, group in itertools.groupby(name for name, _ in asked)] == [20, 20]
        assert len({turn for _, turn in asked}) == 40, "the event loop runs other tasks between any two decisions"


async def test_decisions_are_listed_and_watched_by_every_filter() -> None:
    async with fleet() as (_, client, session):
        placed = await session.place("one", 40_000, session_id="s")
        await session.place("two", 160, keys=KEYS, session_id="t")
        one, two = await decision(client, "one"), await decision(client, "two")
        assert (one.route_class, two.route_class) == (fleet_pb2.ROUTE_CLASS_HEAVY, fleet_pb2.ROUTE_CLASS_LIGHT)
        age = fleet_pb2.DecisionFilter()
        age.since.FromSeconds(600)
        old = fleet_pb2.DecisionFilter()
        old.until.FromSeconds(600)
        filters = {
            "session": (fleet_pb2.DecisionFilter(session_id="s"), ["one"]),
            "instance": (fleet_pb2.DecisionFilter(instance_id=placed.step.instance.instance_id), ["one"]),
            "class": (fleet_pb2.DecisionFilter(route_class=fleet_pb2.ROUTE_CLASS_LIGHT), ["two"]),
            "reason": (fleet_pb2.DecisionFilter(reason=two.reason), ["two", "one"]),
            "no such reason": (fleet_pb2.DecisionFilter(reason="migrate"), []),
            "request": (fleet_pb2.DecisionFilter(request_id="two"), ["two"]),
            "since": (age, ["two", "one"]),
            "until": (old, []),
            "both": (fleet_pb2.DecisionFilter(session_id="s", route_class=fleet_pb2.ROUTE_CLASS_LIGHT), []),
        }
        assert one.reason == two.reason
        for name, (wanted, found) in filters.items():
            listed = await client.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(filter=wanted))
            assert [made.request_id for made in listed.decisions] == found, name
        newest = await client.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(page_size=1))
        assert [made.request_id for made in newest.decisions] == ["two"]


async def test_a_watch_tells_only_what_its_filter_asks_for() -> None:
    async with fleet() as (server, client, session):
        wanted = fleet_pb2.DecisionFilter(session_id="s")
        watch: Any = client.fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest(filter=wanted))
        reader = asyncio.ensure_future(watch.read())

        async def watched() -> bool:
            return bool(server.router.decisions._watchers)

        await eventually(watched, "the watch has begun")
        await session.place("other", 160, session_id="t")
        await session.place("mine", 160, session_id="s")
        assert (await reader).decision.request_id == "mine"
        watch.cancel()


async def refused_as(call: Any) -> tuple[str, str]:
    """Return the code and the reason of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    info = error_details_pb2.ErrorInfo()
    assert details_of(error.value)[0].Unpack(info)
    return error.value.code().name, info.reason


async def test_a_policy_replaces_the_one_that_was_seen() -> None:
    async with fleet() as (_, client, _):

        async def etag() -> str:
            return (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy_etag

        def change(name: str, etag: str, **settings: Any) -> Any:
            request = fleet_pb2.SetPolicyRequest(policy=policy(name, **settings), etag=etag)
            return client.fleet.SetPolicy(request)

        at_first = await etag()
        answer = await change("lmetric", at_first)
        assert answer.etag == await etag() != at_first
        assert await refused_as(change("sticky", at_first)) == ("ABORTED", "POLICY_CHANGED")
        assert await refused_as(change("sticky", "nonsense")) == ("ABORTED", "POLICY_CHANGED")
        assert await etag() == answer.etag
        # The etag depends on the settings, too, and equal policies have equal etags.
        heuristic = await change("elastic", answer.etag, decider="heuristic")
        cost = await change("elastic", heuristic.etag, decider="cost")
        assert cost.etag != heuristic.etag
        assert (await change("elastic", "", decider="heuristic")).etag == heuristic.etag
        assert await refused_as(change("nonsense", heuristic.etag)) == ("INVALID_ARGUMENT", "INVALID_POLICY")


async def test_of_two_replicas_changes_on_one_policy_one_is_taken(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            etag = (await one.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy_etag
            calls = [
                each.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=policy(name), etag=etag))
                for each, name in ((one, "lmetric"), (two, "sticky"))
            ]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
            assert [error.code() for error in refused] == [grpc.StatusCode.ABORTED]


async def test_replicas_share_a_policy_and_keep_it_over_restarts(tmp_path: Path) -> None:
    async def in_force(client: Client) -> str:
        return (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy.name

    def places_by(client: Client, name: str) -> Any:
        async def check() -> bool:
            return await in_force(client) == name

        return check

    with redis_server(tmp_path) as (url, redis):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            assert [await in_force(one), await in_force(two)] == [DEFAULT_POLICY, DEFAULT_POLICY]
            request = fleet_pb2.SetPolicyRequest(policy=policy("elastic", decider="heuristic"))
            assert not (await one.fleet.SetPolicy(request)).this_replica_only
            await eventually(places_by(two, "elastic"), "two follows")
            assert (await two.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy.settings[
                "decider"
            ] == "heuristic"
            # A router that starts later uses this policy, too, whatever its own settings say.
            async with running(router_id="three", policy="sticky", **shared) as (_, three):
                await eventually(places_by(three, "elastic"), "three follows")

                async def reported() -> bool:
                    listed = (await one.fleet.ListReplicas(fleet_pb2.ListReplicasRequest())).replicas
                    return {each.router_id: each.policy.name for each in listed} == dict.fromkeys(
                        ("one", "two", "three"), "elastic"
                    )

                await eventually(reported, "each tells what it places by")
            redis.kill()
            alone = await two.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=policy("lmetric")))
            assert (alone.this_replica_only, alone.policy.name, await in_force(one)) == (True, "lmetric", "elastic")
            # Redis returns empty: the policy that was set last becomes the fleet's.
            with redis_server(tmp_path, port=int(url.rpartition(":")[2].partition("/")[0])):
                await eventually(places_by(one, "lmetric"), "one follows when Redis is back")
                assert await in_force(two) == "lmetric"


async def test_a_policy_that_a_replica_does_not_know_changes_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        with Redis.from_url(url) as client:
            client.hset(
                "pointsman:{default}:config", mapping={"version": 3, "config": '{"policy":["of the future",{}]}'}
            )
        async with running(router_id="one", redis_url=url, owner_lease_s=0.5) as (server, one):

            async def seen() -> bool:
                return server.router.store.answered_at is not None

            await eventually(seen, "Redis has answered")
            assert (await one.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy.name == DEFAULT_POLICY
            assert ReplicaInfo.read("what another version tells") == ReplicaInfo.read("") == ReplicaInfo()

            async def refusal() -> str:
                (listed,) = (await one.fleet.ListReplicas(fleet_pb2.ListReplicasRequest())).replicas
                return str(listed.policy_problem)

            async def problem() -> bool:
                return (await refusal()).startswith("no policy 'of the future'; there are ")

            await eventually(problem, "it tells that it does not place by the fleet's policy")
            # A policy that is set now gets a higher version.
            await one.fleet.SetPolicy(fleet_pb2.SetPolicyRequest(policy=policy("sticky")))

            async def solved() -> bool:
                return not await refusal()

            await eventually(solved, "it places by the fleet's policy")
            with Redis.from_url(url, decode_responses=True) as client:
                assert client.hget("pointsman:{default}:config", "version") == "4"


async def test_a_drain_is_an_order_to_all_replicas_until_the_engine_restarts(tmp_path: Path) -> None:
    async def states(client: Client) -> dict[str, int]:
        return {name: instance.state for name, instance in (await client.instances()).items()}

    def has_states(client: Client, **wanted: int) -> Any:
        async def check() -> bool:
            return await states(client) == wanted

        return check

    async def drain(client: Client, name: str, resume: bool = False) -> fleet_pb2.DrainResponse:
        request = fleet_pb2.DrainRequest(instance_id=name, resume=resume)
        answer: fleet_pb2.DrainResponse = await client.fleet.Drain(request)
        return answer

    ready, draining = fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_DRAINING
    with redis_server(tmp_path) as (url, redis):
        shared: dict[str, Any] = {"redis_url": url, "owner_lease_s": 0.5}
        async with running(router_id="one", **shared) as (_, one), running(router_id="two", **shared) as (_, two):
            for client in (one, two):
                for name in ("a", "b"):
                    await Report(client).join(name)
                await eventually(has_states(client, a=ready, b=ready), "both instances")
            # Two instances are drained at once, one at each replica: neither order undoes the other.
            answers = await asyncio.gather(drain(one, "a"), drain(two, "b"))
            assert [(answer.instance.state, answer.this_replica_only) for answer in answers] == [(draining, False)] * 2
            for client in (one, two):
                await eventually(has_states(client, a=draining, b=draining), "both drain at both")
            assert (await drain(two, "b", resume=True)).instance.state == ready
            await eventually(has_states(one, a=draining, b=ready), "one follows")
            # A replica that starts later learns of the drain from its first heartbeat, before the instance's agent connects.
            async with running(router_id="three", **shared) as (_, three):
                await Report(three).join("a")
                await eventually(has_states(three, a=draining), "three follows")
                # The engine restarts: the drain of its earlier incarnation ends at each replica.
                for client in (one, two, three):
                    await Report(client).join("a", incarnation="2")
                await eventually(has_states(three, a=ready), "a new life")
                assert (await states(one))["a"] == (await states(two))["a"] == ready
            redis.kill()
            alone = await drain(two, "b")
            assert (alone.this_replica_only, alone.instance.state) == (True, draining)
            assert (await states(one))["b"] == ready
            with redis_server(tmp_path, port=int(url.rpartition(":")[2].partition("/")[0])):
                await eventually(has_states(one, a=ready, b=draining), "one follows when Redis is back")
                with Redis.from_url(url, decode_responses=True) as client:
                    kept = client.hget("pointsman:{default}:config", "config")
                assert kept is not None
                assert OperatorConfig.read(kept).drained == {"a": "1", "b": "1"}, "a's is of its old incarnation"


async def test_the_command_sets_the_policy_and_says_what_is_wrong() -> None:
    async with running() as (server, client):
        flags = ("--router", f"127.0.0.1:{server.port}")
        status, said = await _pointsman("set-policy", "elastic", "--set", "decider=heuristic", *flags)
        assert status == 0, said
        assert "elastic" in said
        assert "decider=heuristic" in said
        in_force = (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy
        assert (in_force.name, settings_of(in_force)["decider"]) == ("elastic", "heuristic")
        status, said = await _pointsman("set-policy", "elastic", "--set", "decider=cheap", *flags)
        assert status == 1
        assert "policy.settings.decider: must be cost or heuristic" in said


async def _pointsman(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *pointsman_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()
