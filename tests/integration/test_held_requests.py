"""Held requests over real sockets: answered when another ends, refused in time, dropped with their stream; 429 at a gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from msgspec import structs

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, hold, slice_of
from pointsman_router.io.convert import gateway_messages
from pointsman_router.io.main import RouterServer
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, stack, until_ready
from tests.support.processes.pointsman import pointsman_process
from tests.support.processes.process import free_port
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually


@asynccontextmanager
async def one_busy_instance(**settings: Any) -> AsyncIterator[tuple[RouterServer, Client, Session]]:
    """An instance that takes one request, which a gateway has placed on it: `x`."""
    async with running(max_requests_per_instance=1, **settings) as (server, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await session.place("x")
        yield server, client, session


def asked(request_id: str, **changes: Any) -> placement_pb2.PlacementRequest:
    return placement_pb2.PlacementRequest(request_id=request_id, model="m", input_tokens=50, **changes)


async def held(client: Client, count: int) -> None:
    async def waits() -> bool:
        answer = await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())
        return answer.held_requests == count

    await eventually(waits, f"{count} held")


async def test_a_held_request_is_answered_on_its_own_stream_when_another_ends() -> None:
    async with one_busy_instance() as (_, client, session):
        other = Session(client, "h")
        await other.hello()
        await other.send(place=asked("r", session_id="s"))
        await held(client, 1)
        assert (await client.instances())["a"].num_requests == 1
        await session.finish("x")
        placement = (await other.read("placement")).placement
        assert (placement.request_id, placement.step.instance.instance_id) == ("r", "a")
        decision = (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r"))).decision
        assert decision.held.ToNanoseconds() > 0
        await held(client, 0)
        await other.finish("r")


async def test_without_a_queue_and_after_its_time_a_request_is_refused_with_a_time_to_come_back() -> None:
    for changes in ({"queue_size": 0}, {"queue_timeout_s": 0.3}):
        async with one_busy_instance(**changes) as (_, _client, session):
            await session.send(place=asked("r"))
            refusal = (await session.read("refusal")).refusal
            assert (refusal.request_id, refusal.code, refusal.retry_after.seconds) == ("r", 8, 1)


async def test_a_hold_dies_with_its_stream_and_keeps_its_age_when_it_is_asked_for_again() -> None:
    async with one_busy_instance(gateway_lease_s=5.0) as (_, client, session):
        broken = Session(client, "h")
        await broken.hello()
        await broken.send(place=asked("r"))
        await held(client, 1)
        broken.call.cancel()
        await held(client, 0)
        again = Session(client, "h")
        await again.hello()
        request = asked("r")
        request.age.FromSeconds(7)
        await again.send(place=request)
        await held(client, 1)
        await session.finish("x")
        await again.read("placement")
        decision = (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r"))).decision
        assert decision.held.seconds >= 7


async def test_a_newer_stream_of_a_gateway_outlives_the_older() -> None:
    async with one_busy_instance(gateway_lease_s=0.1) as (_, client, session):
        newer = Session(client, session.gateway_id)
        await newer.hello(
            placement_pb2.OpenStream(request=asked("x"), instance_id="a", phase=placement_pb2.PHASE_DECODE)
        )
        assert await session.call.read() is not None
        while await session.call.read() is not END_OF_STREAM:
            pass
        await newer.send(place=asked("r"))
        await held(client, 1)
        # Longer than lease and tick: the older stream's end removed nothing of the newer one.
        await asyncio.sleep(0.7)
        assert (await client.instances())["a"].num_requests == 1
        await newer.finish("x")
        assert (await newer.read("placement")).placement.request_id == "r"


async def test_the_unary_form_waits_within_its_deadline() -> None:
    async with one_busy_instance() as (_, client, session):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.placement.Place(placement_pb2.PlaceRequest(request=asked("late")), timeout=2.0)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error.value)
        retry = error_details_pb2.RetryInfo()
        assert details[1].Unpack(retry)
        assert retry.retry_delay.seconds == 1

        left = client.placement.Place(placement_pb2.PlaceRequest(request=asked("left")), timeout=30.0)
        await held(client, 1)
        left.cancel()
        await held(client, 0)

        ended = asyncio.ensure_future(_place(client, "ended"))
        await held(client, 1)
        await _finish(client, "ended")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ended
        assert error.value.code() is grpc.StatusCode.ABORTED

        waits = asyncio.ensure_future(_place(client, "r"))
        await held(client, 1)
        await session.finish("x")
        assert (await waits).placement.step.instance.instance_id == "a"
        await _finish(client, "r")
        assert (await client.instances())["a"].num_requests == 0


async def _place(client: Client, request_id: str) -> placement_pb2.PlaceResponse:
    return await client.placement.Place(placement_pb2.PlaceRequest(request=asked(request_id)), timeout=30.0)


async def _finish(client: Client, request_id: str) -> None:
    finished = placement_pb2.Finished(request_id=request_id, outcome=placement_pb2.OUTCOME_OK)
    await client.placement.Finish(placement_pb2.FinishRequest(finished=finished))


async def test_a_drain_tells_what_is_left_and_moves_the_session_with_its_reason() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await session.place("r1", session_id="s")
        await Report(client).join("b")

        async def both() -> bool:
            return len(await client.instances()) == 2

        await eventually(both, "both known")
        drained = await client.fleet.Drain(fleet_pb2.DrainRequest(instance_id="a"))
        assert (drained.instance.state, drained.instance.num_requests) == (fleet_pb2.INSTANCE_STATE_DRAINING, 1)
        placement = await session.place("r2", session_id="s")
        assert placement.step.instance.instance_id == "b"
        decision = (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r2"))).decision
        assert list(decision.notes) == ["owner_draining"]
        assert {candidate.instance_id: candidate.excluded for candidate in decision.candidates} == {
            "a": "draining",
            "b": "",
        }


async def test_a_gateway_asks_again_with_the_age_of_a_hold_that_broke(tmp_path: Path) -> None:
    async with stack(tmp_path, router_grace_s=30.0) as up:
        up.router.placer = lambda _: None
        async with aiohttp.ClientSession() as http:
            answer = asyncio.ensure_future(
                http.post(f"{up.url}/v1/completions", json={"model": MODEL, "prompt": "each train"})
            )
            await up.router.until(lambda: len(up.router.places) == 1)
            await up.router.stop()
            up.router.placer = up.router.first
            await up.router.start(int(up.router.address.rpartition(":")[2]))
            assert (await answer).status == 200
    first, again = up.router.places
    assert again.request_id == first.request_id
    assert not first.HasField("age")
    assert again.age.ToNanoseconds() > 0
    assert again.age.ToNanoseconds() + again.deadline.ToNanoseconds() <= first.deadline.ToNanoseconds() + 1_000


async def test_a_gateway_waits_for_room_and_passes_the_refusal_on_as_429(tmp_path: Path) -> None:
    engine = FakeEngine(load_tokenizer(make_tokenizer(tmp_path / "model")), hold=asyncio.Event())
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": MODEL, "prompt": "each train", "stream": True}
    async with engine.serve(), running(max_requests_per_instance=1, queue_size=1) as (server, client):
        report = Report(client)
        await report.join("a", model=MODEL, url=engine.url, prefix_mode=agent_pb2.PREFIX_MODE_NONE)
        flags = {"listen": f"127.0.0.1:{port}", "routers": f"127.0.0.1:{server.port}"}
        gateway = pointsman_process("gateway", tmp_path, "gateway", flags=flags)
        gateway.start()
        try:
            async with aiohttp.ClientSession() as http:

                async def ready() -> bool:
                    try:
                        async with http.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                            return bool((await answer.json())["data"])
                    except aiohttp.ClientError:
                        return False

                await eventually(ready, "the gateway lists the model", within_s=60.0)
                first = await http.post(url, json=body)
                assert first.status == 200
                second = asyncio.ensure_future(http.post(url, json=body))
                await held(client, 1)
                async with http.post(url, json=body) as third:
                    assert (third.status, third.headers["Retry-After"]) == (429, "1")
                    assert (await third.json())["error"]["code"] == "saturated"
                second.cancel()
                await held(client, 0)
                fourth = asyncio.ensure_future(http.post(url, json=body))
                await held(client, 1)
                engine.hold = None
                first.close()
                answer = await fourth
                assert (answer.status, (await answer.read()).endswith(b"[DONE]\n\n")) == (200, True)

                async def idle() -> bool:
                    return (await client.instances())["a"].num_requests == 0

                await eventually(idle, "nothing open")
        finally:
            gateway.stop()


@dataclass(frozen=True)
class HoldsTheRest(Policy):
    """Places a slice of one block, then holds the rest."""

    name: ClassVar[str] = "holds_the_rest"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        best = min(view.eligible(), key=lambda candidate: candidate.instance_id)
        return hold("later", queue_penalty_s=1.0) if best.cached_tokens else slice_of(best, 16, "slice")


@pytest.mark.parametrize("deadline_known", [True, False])
async def test_a_hold_between_two_steps_that_outlasts_its_gateway_gives_one_answer_at_one_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_known: bool
) -> None:
    """With `deadline_known`, the router knows how long the gateway waits: both give up at once; without, the gateway is older."""
    if not deadline_known:
        step_done = gateway_messages.step_done

        def older(wire: placement_pb2.StepDone) -> ev.StepDone:
            return structs.replace(step_done(wire), deadline_s=None)

        monkeypatch.setattr(gateway_messages, "step_done", older)
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "model"))
    engine = FakeEngine(tokenizer)
    prompts = [f"{number} each train takes the track that its points are set for " * 8 for number in range(4)]
    async with engine.serve(), running(queue_timeout_s=8.0, policy="unified") as (server, client):
        router = server.router
        router.submit(ev.PolicySet(HoldsTheRest()))
        where: dict[str, Any] = {
            "model": MODEL,
            "served_names": [MODEL],
            "url": engine.url,
            "model_root": str(tmp_path / "model"),
        }
        await Report(client).join("a", max_model_len=4096, **where)
        prices: list[int] = []
        submit = router.submit

        def noted(event: ev.Event) -> list[ev.Effect]:
            effects = submit(event)
            prices.append(router.state.reservations.counters("a").num_requests)
            return effects

        monkeypatch.setattr(router, "submit", noted)
        settings = GatewaySettings(
            listen="127.0.0.1:0", routers=[f"127.0.0.1:{server.port}"], placement_timeout_s=0.8, drain_timeout_s=0.5
        )
        async with serving(settings) as (gateway, url), aiohttp.ClientSession() as http:
            await until_ready(gateway)
            for prompt in prompts:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 3}
                async with http.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"]
                await eventually(lambda: len(router.state.reservations) == 0, "nothing is open")
                router.state.check_invariants()
            # Wait until the router holds nothing, so that a late answer would have arrived.
            await eventually(lambda: not router.state.held_requests.queue.count(MODEL), "nothing is held")
            ends = [logged for logged in router.decisions.newest(lambda _: True) if logged.finished is not None]
        parts = [asked["max_tokens"] for path, asked, _ in engine.requests if path.endswith("/completions")]
        assert parts == [1, 3] * 4, "one slice and one answer for each request"
        assert len({logged.decision.request.request_id for logged in ends}) == 4
        assert {logged.finished.outcome for logged in ends if logged.finished} == {"OK"}
        assert max(prices) == 1
