"""Over real gRPC: progress while deltas arrive, a failed audit and its resync, learning without KV events, what operators see."""

from __future__ import annotations

from functools import partial

import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_router.core.instances.engine_life import LifeSettings
from pointsman_router.io import router
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import eventually

PROMPT = list(range(160))
KEYS = prompt_keys(PROMPT, "m")
OTHER_KEYS = prompt_keys(list(range(1_000, 1_160)), "m")


async def until(client: Client, what: str, **wanted: object) -> fleet_pb2.InstanceStatus:
    """Wait until the fields of instance `a` have these values."""

    async def check() -> fleet_pb2.InstanceStatus | None:
        instance = (await client.instances()).get("a")
        return (
            instance
            if instance is not None and all(getattr(instance, name) == value for name, value in wanted.items())
            else None
        )

    status = await eventually(check, what)
    assert isinstance(status, fleet_pb2.InstanceStatus)
    return status


async def delta(report: Report, seq: int, added: list[int]) -> None:
    await report.send(delta=agent_pb2.Delta(seq=seq, tier=agent_pb2.TIER_DEVICE, added=added))


async def answered(
    session: Session, name: str, cached: int | None = None, keys: list[int] = KEYS
) -> placement_pb2.Placement:
    """One request from its placement to its end."""
    placement = await session.place(name, 160, keys=keys)
    await session.send(first_token=placement_pb2.FirstToken(request_id=name))
    await session.finish(name, **({} if cached is None else {"cached_tokens": cached}))
    return placement


async def test_pending_prefill_falls_while_deltas_arrive() -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.join("a")
        session = Session(client)
        await session.hello()
        await session.place("r", 160, keys=KEYS)
        assert (await until(client, "placed", num_requests=1)).pending_prefill_tokens == 160
        for seq, left in ((1, 112), (2, 64), (3, 16)):
            await delta(report, seq, KEYS[3 * seq - 3 : 3 * seq])
            await until(client, f"{left} tokens left", pending_prefill_tokens=left, num_requests=1)
        await session.send(first_token=placement_pb2.FirstToken(request_id="r"))
        await until(client, "decoding", pending_prefill_tokens=0, ongoing_decode_tokens=160)


async def test_the_next_turn_finds_what_was_just_computed_before_events_tell() -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.join("a", OTHER_KEYS)
        session = Session(client)
        await session.hello()
        await answered(session, "first", keys=OTHER_KEYS)
        await report.load()
        await until(client, "trusted", prefix_source=fleet_pb2.PREFIX_SOURCE_EVENTS)
        await answered(session, "r")
        placement = await session.place("next", 170, keys=KEYS)
        assert placement.cached_tokens == 160
        answer = await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="next"))
        [candidate] = answer.decision.candidates
        assert (candidate.provisional_tokens, candidate.exact) == (160, True)
        assert candidate.prefix_source == fleet_pb2.PREFIX_SOURCE_EVENTS
        await until(client, "no provisional keys are left", provisional_keys=0)


async def test_events_that_answers_contradict_are_trusted_again_after_answers_that_agree() -> None:
    async with running() as (server, client):
        report = Report(client)
        await report.join("a", KEYS)
        session = Session(client)
        await session.hello()
        await until(client, "ready", state=fleet_pb2.INSTANCE_STATE_READY, keys=10)
        for number in range(5):
            assert (await answered(session, f"r{number}", cached=0)).cached_tokens == 144
        await until(client, "ended", num_requests=0)
        await report.load()
        status = await until(client, "audit failed", prediction_audit_failures=1)
        message = await report.read()
        assert message.resync.reason.startswith("prediction audit failed: 5 of the last 5 answers")
        assert (status.keys, status.state) == (0, fleet_pb2.INSTANCE_STATE_SYNCING)
        assert ("fewer cached tokens" in status.prefix_reason, status.events_contradicted) == (True, True)
        assert status.prefix_source == fleet_pb2.PREFIX_SOURCE_APPROXIMATE
        await report.snapshot(KEYS)
        await until(client, "copied", keys=10, prefix_source=fleet_pb2.PREFIX_SOURCE_APPROXIMATE)
        for number in range(16):
            await answered(session, f"s{number}", cached=144)
            await report.load()
        status = await until(client, "trusted", prefix_source=fleet_pb2.PREFIX_SOURCE_EVENTS)
        assert (status.prefix_reason, status.events_contradicted) == ("", False)
        sample = server.router.telemetry.registry.get_sample_value
        assert sample("pointsman_router_prediction_audit_failures_total", {"instance": "a"}) == 1


async def test_without_events_credit_is_learned_from_a_placement_and_lost_by_a_lower_report() -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.hello(prefix_mode=agent_pb2.PREFIX_MODE_NONE, prefix_reason="no KV events")
        assert (await report.read()).welcome.snapshot
        await report.snapshot([])
        status = await until(client, "ready", state=fleet_pb2.INSTANCE_STATE_READY)
        assert (status.prefix_source, status.prefix_reason) == (fleet_pb2.PREFIX_SOURCE_APPROXIMATE, "no KV events")
        session = Session(client)
        await session.hello()
        assert (await answered(session, "r0", cached=0)).cached_tokens == 0
        await until(client, "learned", approximate_keys=10, num_requests=0)
        assert (await answered(session, "r1", cached=32)).cached_tokens == 144
        await until(client, "corrected", approximate_keys=2, num_requests=0)
        assert (await session.place("r2", 160, keys=KEYS)).cached_tokens == 32
        answer = await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r2"))
        [candidate] = answer.decision.candidates
        assert not candidate.exact
        assert candidate.prefix_source == fleet_pb2.PREFIX_SOURCE_APPROXIMATE


async def test_a_silent_agents_keys_and_figures_are_not_used() -> None:
    async with running(stale_report_s=0.05, stale_keys_s=0.3) as (_, client):
        report = Report(client)
        await report.join("a", KEYS)
        await until(client, "silent", prefix_source=fleet_pb2.PREFIX_SOURCE_NONE, keys=10)
        session = Session(client)
        await session.hello()
        assert (await session.place("r", 160, keys=KEYS)).cached_tokens == 0
        answer = await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r"))
        assert answer.decision.candidates[0].stale
        await report.send(load=agent_pb2.Load(healthy=True))

        async def heard() -> bool:
            return (await client.instances())["a"].prefix_source == fleet_pb2.PREFIX_SOURCE_APPROXIMATE

        await eventually(heard, "heard again")


async def test_an_index_without_room_says_so() -> None:
    async with running(max_keys=8) as (_, client):
        await Report(client).join("a", KEYS)
        status = await until(client, "given up", prefix_reason="the router's index is full")
        assert status.state == fleet_pb2.INSTANCE_STATE_READY
        assert (status.keys, status.prefix_source) == (0, fleet_pb2.PREFIX_SOURCE_APPROXIMATE)


async def test_an_instance_that_fails_for_one_gateway_is_left_alone_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "LifeSettings", partial(LifeSettings, first_open_s=60, max_open_s=60))
    async with running(circuit_failures=2) as (server, client):
        reports = [Report(client), Report(client)]
        for name, report in zip("ab", reports, strict=True):
            await report.join(name)
        one, other = Session(client, "one"), Session(client, "other")
        await one.hello()
        await other.hello()
        for number in range(2):
            placement = await one.place(f"f{number}", exclude=["b"])
            assert placement.step.instance.instance_id == "a"
            await one.finish(f"f{number}", outcome=placement_pb2.OUTCOME_FAILED, error="status 500", http_status=500)

        async def excluded() -> bool:
            fleet = await other.fleet()
            return [ref.instance_id for pool in fleet.pools.values() for ref in pool.instances] == ["b"]

        await eventually(excluded, "the other gateway is told")
        assert (await client.instances())["a"].circuit_open
        for number in range(3):
            assert (await other.place(f"r{number}")).step.instance.instance_id == "b"
        decision = server.router.decisions.get("r0")
        assert decision is not None
        assert {seen.instance_id: seen.excluded for seen in decision.decision.view.candidates} == {
            "a": "circuit_open",
            "b": "",
        }
