"""A gateway and an operator written from the protos alone: with generated stubs and no code of this project."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pointsman.agent.v1 import agent_pb2, agent_pb2_grpc
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from tests.support.router import running


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with running() as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


async def messages(call: Any) -> AsyncIterator[placement_pb2.SessionResponse]:
    """Yield the messages of a session, with batches unpacked."""
    async for message in call:
        for response in message.batch.responses if message.HasField("batch") else [message]:
            yield response


async def test_a_request_goes_its_whole_way_by_generated_stubs(channel: grpc.aio.Channel) -> None:
    fleet: Any = fleet_pb2_grpc.FleetServiceStub(channel)
    # An agent reports an instance without KV events.
    report: Any = agent_pb2_grpc.AgentServiceStub(channel).Report(None)
    instance = agent_pb2.Instance(
        instance_id="engine:8000",
        incarnation="1",
        url="http://engine:8000",
        model="m",
        block_size=16,
        prefix_mode=agent_pb2.PREFIX_MODE_NONE,
    )
    await report.write(
        agent_pb2.ReportRequest(hello=agent_pb2.Hello(instance=instance, key_scheme="xxh3-64/16/1", agent_id="agent"))
    )
    assert (await report.read()).HasField("welcome")
    await report.write(agent_pb2.ReportRequest(load=agent_pb2.Load(healthy=True)))

    watch = fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest())
    await watch.initial_metadata()
    session: Any = placement_pb2_grpc.PlacementServiceStub(channel).Session(None)
    received = messages(session)
    hello = placement_pb2.GatewayHello(gateway_id="by-hand", secret=os.urandom(16))
    await session.write(placement_pb2.SessionRequest(hello=hello))
    welcome = (await anext(received)).welcome
    assert welcome.key_scheme == "xxh3-64/16/1"
    async for message in received:
        if any(pool.model == "m" and pool.instances for pool in message.fleet.pools):
            break

    request = placement_pb2.PlacementRequest(request_id="r-1", model="m", input_tokens=100)
    await session.write(placement_pb2.SessionRequest(place=request))
    async for message in received:
        if message.HasField("placement"):
            break
        assert not message.HasField("refusal"), message.refusal.message
    placement = message.placement
    assert (placement.request_id, placement.last, placement.step.index) == ("r-1", True, 0)
    assert placement.step.kind == placement_pb2.STEP_KIND_SERVE
    assert placement.step.instance.url == "http://engine:8000"

    made = (await watch.read()).decision
    assert (made.decision_id, made.outcome) == (placement.decision_id, fleet_pb2.DECISION_OUTCOME_OPEN)
    assert (made.route_class, made.mode) == (fleet_pb2.ROUTE_CLASS_LIGHT, fleet_pb2.PLACEMENT_MODE_COLOCATED)

    first_token = placement_pb2.FirstToken(request_id="r-1")
    await session.write(placement_pb2.SessionRequest(first_token=first_token))
    finished = placement_pb2.Finished(
        request_id="r-1",
        outcome=placement_pb2.OUTCOME_OK,
        prompt_tokens=100,
        output_tokens=7,
        cached_tokens=64,
        finish_reason=placement_pb2.FINISH_REASON_LENGTH,
        cached_by_tier=[placement_pb2.CachedTokens(tier=agent_pb2.TIER_HOST, tokens=64)],
        timings=placement_pb2.Timings(placed_ms=1.0, sent_ms=2.0, first_token_ms=30.0, done_ms=40.0),
    )
    await session.write(placement_pb2.SessionRequest(finished=finished))
    ended = await watch.read()
    assert (ended.decision.decision_id, ended.dropped) == (placement.decision_id, 0)
    assert ended.decision.outcome == fleet_pb2.DECISION_OUTCOME_OK
    assert ended.decision.finished.output_tokens == 7
    assert ended.decision.finished == finished

    listed = await fleet.ListInstances(fleet_pb2.ListInstancesRequest())
    assert [instance.num_requests for instance in listed.instances] == [0]
    watch.cancel()
    await session.done_writing()
    async for _ in received:  # until the router has ended it, too
        pass
    report.cancel()
