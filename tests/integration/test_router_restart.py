"""A router that restarts under load: what it recovers, when it reports that it serves, and what is placed before that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.io.channel import open_channel
from pointsman_gateway.io.routing.router_client import RouterClient
from tests.support.instances import counters
from tests.support.processes.pointsman import pointsman_process
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_server
from tests.support.processes.replicas import RouterProcess
from tests.support.router import Client, Report, Session, gateway_hello, running
from tests.support.waiting import eventually

AGENT, PLACEMENT, FLEET = (
    "pointsman.agent.v1.AgentService",
    "pointsman.router.v1.PlacementService",
    "pointsman.router.v1.FleetService",
)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NOT_PLACING = {"": NOT_SERVING, PLACEMENT: NOT_SERVING, AGENT: SERVING, FLEET: SERVING}
PLACING = dict.fromkeys(NOT_PLACING, SERVING)
ENGINES, BLOCK, CACHED = 3, 16, 12 * 16
LONG_S = 120.0  # longer than any stall of a busy machine: waits end by their condition, not by this limit
MODEL = "pointsman-emulated"


async def health(address: str) -> dict[str, int]:
    """The health status that the router at `address` reports of itself (""), and of each of its services."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in NOT_PLACING}


async def until_health(address: str, wanted: dict[str, int]) -> None:
    async def says() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await health(address) == wanted
        return False

    await eventually(says, f"health {wanted}", LONG_S)


async def test_a_router_serves_when_its_instances_and_those_that_gateways_remember_are_in_step() -> None:
    async with running(startup_wait_s=LONG_S) as (server, client):
        address = f"127.0.0.1:{server.port}"
        assert await health(address) == NOT_PLACING
        session = Session(client)
        hello = gateway_hello("g", known_instance_ids=["a", "b"])
        await session.send(hello=hello)
        assert (await session.fleet()).starting
        await Report(client).join("a")
        b = Report(client)
        await b.hello("b")
        await b.read()

        async def both() -> bool:
            known = await client.instances()
            return len(known) == 2 and known["a"].state == fleet_pb2.INSTANCE_STATE_READY

        await eventually(both, "both known, a in step")
        assert await health(address) == NOT_PLACING
        await session.send(place=placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=10))
        assert (await session.read("refusal")).refusal.not_serving
        await b.snapshot([])
        await until_health(address, PLACING)
        assert (await session.place("r", 10)).request_id == "r"


async def test_without_any_instance_the_warm_up_ends_by_its_deadline() -> None:
    async with running(startup_wait_s=0.2) as (server, _):
        await until_health(f"127.0.0.1:{server.port}", PLACING)


async def test_health_by_http_has_a_status_that_probes_read() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with aiohttp.ClientSession() as http:

        async def answered(status: int) -> bool:
            async with http.get(f"http://{listen}/health") as answer:
                return (answer.status, (await answer.json())["ready"]) == (status, status == 200)

        async with running(startup_wait_s=LONG_S, metrics_listen=listen):
            assert await answered(503)
            async with http.get(f"http://{listen}/livez") as alive:
                assert alive.status == 200
        async with running(startup_wait_s=0.2, metrics_listen=listen):
            await eventually(lambda: answered(200), "ready", LONG_S)


class Sessions:
    """Agentic load through a gateway's router client: each session's prompt grows turn by turn, and its engine computes it."""

    def __init__(self, router: str) -> None:
        self.client = RouterClient([router], "g", tuple, LONG_S, lambda fleet: None, lambda connected: None)
        self.turns: list[tuple[str, placement_pb2.Placement, int]] = []  # (session, answer, prompt tokens)
        self.open: list[str] = []
        self._http = aiohttp.ClientSession()

    async def close(self) -> None:
        await self.client.close()
        await self._http.close()

    async def ask(self, name: str, session: str, prompt: list[int]) -> placement_pb2.Placement:
        """Place one prompt; the request is left open."""
        request = placement_pb2.PlacementRequest(
            request_id=name, model=MODEL, session_id=session, input_tokens=len(prompt), keys=prompt_keys(prompt, MODEL)
        )
        step = await self.client.first_step(request, LONG_S)
        assert isinstance(step, placement_pb2.Placement), step
        self.turns.append((session, step, len(prompt)))
        return step

    async def turn(self, name: str, session: str, prompt: list[int]) -> placement_pb2.Placement:
        """Place one prompt, run it on the chosen engine, and finish it."""
        step = await self.ask(name, session, prompt)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        async with self._http.post(f"{step.step.instance.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        self.client.first_token(name)
        self.end(name)
        return step

    def end(self, name: str) -> None:
        self.client.finished(placement_pb2.Finished(request_id=name, outcome=placement_pb2.OUTCOME_OK))


class Fleet:
    """Emulated engines, their agent and one router, each a process, and the load."""

    def __init__(self, router: RouterProcess, agent: Process) -> None:
        self.router, self.agent = router, agent
        self.load = Sessions(router.address)

    async def instances(self) -> dict[str, fleet_pb2.InstanceStatus]:
        async with open_channel(self.router.address) as channel:
            return await Client(channel).instances()

    async def until(self, holds: Callable[[dict[str, fleet_pb2.InstanceStatus]], bool], what: str) -> None:
        async def check() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return holds(await self.instances())
            return False

        await eventually(check, what, LONG_S)


@contextmanager
def processes(folder: Path, redis_url: str) -> Iterator[tuple[RouterProcess, Process]]:
    ports = [free_port() for _ in range(ENGINES)]
    flags = ["--speedup", "50", "--model", MODEL]
    engines = [pointsman_process(f"e{port}", folder, "emulate", "--port", str(port), *flags) for port in ports]
    router = RouterProcess("one", redis_url, folder, **{"startup-wait-s": LONG_S, "gateway-lease-s": LONG_S})
    flags = ["--metrics-listen", "", "--state-dir", str(folder), "--routers", router.address]
    agent = pointsman_process(
        "agent",
        folder,
        "agent",
        *flags,
        *(part for port in ports for part in ("--engines", f"http://127.0.0.1:{port}")),
    )
    with ExitStack() as stack:
        for process in (*engines, agent, router.process):
            process.start()
            stack.callback(process.kill)
        yield router, agent


@asynccontextmanager
async def fleet(folder: Path, redis_url: str) -> AsyncIterator[Fleet]:
    with processes(folder, redis_url) as (router, agent):
        async with AsyncExitStack() as stack:
            up = Fleet(router, agent)
            stack.push_async_callback(up.load.close)
            await up.load.client.start()
            ready = fleet_pb2.INSTANCE_STATE_READY
            await up.until(
                lambda known: len(known) == ENGINES and all(instance.state == ready for instance in known.values()),
                "all ready",
            )
            yield up


def prompt_of(session: int, turn: int) -> list[int]:
    """The session's prompt of its first or second turn. The first turn caches three quarters of the second one's prompt."""
    return [(200 * session + at) % 2_000 for at in range(CACHED + (turn - 1) * 4 * BLOCK + 1)]


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_a_restart_under_load_forgets_nothing_and_guesses_nothing(tmp_path: Path, shared: bool) -> None:
    with redis_server(tmp_path) if shared else contextlib.nullcontext(("", None)) as (url, _):
        async with fleet(tmp_path, url) as up:
            load = up.load
            owners = {}
            for session in range(1, 7):
                owners[session] = (
                    await load.turn(f"first-{session}", f"s{session}", prompt_of(session, 1))
                ).step.instance
            # The store keeps the owners of sessions that have come back.
            for session in range(4, 7):
                await load.turn(f"again-{session}", f"s{session}", prompt_of(session, 1))
            for session in range(1, 4):
                await load.ask(f"open-{session}", f"s{session}", prompt_of(session, 2))
                load.client.first_token(f"open-{session}")
            # First tokens are reported in batches, a few milliseconds late.
            await up.until(
                lambda known: (
                    [sum(pair) for pair in zip(*streams(known).values(), strict=True)] == [3, 3 * len(prompt_of(1, 2))]
                ),
                "three streams",
            )
            # Engines have computed each session's first turn, and nothing of the open streams.
            await up.until(
                lambda known: sum(instance.keys for instance in known.values()) == 6 * CACHED // BLOCK,
                "all keys reported",
            )
            before = await up.instances()

            os.kill(up.agent.pid, signal.SIGSTOP)
            try:
                up.router.process.kill()
                # Requests while no router runs.
                waiting = [
                    asyncio.ensure_future(load.turn(f"second-{at}", f"s{at}", prompt_of(at, 2))) for at in range(4, 7)
                ]
                up.router.process.start()
                await until_health(up.router.address, NOT_PLACING)
                async with open_channel(up.router.address) as channel:
                    early = placement_pb2.PlacementRequest(request_id="early", model=MODEL, input_tokens=10)
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await Client(channel).placement.Place(placement_pb2.PlaceRequest(request=early))
                    assert error.value.code() is grpc.StatusCode.UNAVAILABLE

                async def back() -> bool:
                    return load.client.connected

                await eventually(back, "the gateway is back", LONG_S)
                assert not any(task.done() for task in waiting)
                assert await health(up.router.address) == NOT_PLACING
            finally:
                os.kill(up.agent.pid, signal.SIGCONT)
            await until_health(up.router.address, PLACING)

            placed = await asyncio.gather(*waiting)
            for at, answer in zip(range(4, 7), placed, strict=True):
                assert answer.cached_tokens == CACHED, "placed with what its engine has cached"
                assert answer.step.instance.instance_id == owners[at].instance_id
            known = await up.instances()
            assert {name: (instance.instance.incarnation, instance.state) for name, instance in known.items()} == {
                name: (instance.instance.incarnation, instance.state) for name, instance in before.items()
            }
            # Ends are reported in batches, a few milliseconds late.
            await up.until(lambda known: streams(known) == streams(before), "the open streams, and no others")
            for session in range(1, 4):
                load.end(f"open-{session}")
            await up.until(lambda known: all(idle(instance) for instance in known.values()), "every counter is 0")
            if shared:
                # A new owner places before it has read the sessions' owners, so wait for them.
                await up.until(lambda known: sum(instance.sessions for instance in known.values()) == 6, "six sessions")
                for session in range(1, 4):
                    answer = await load.turn(f"third-{session}", f"s{session}", prompt_of(session, 2))
                    assert answer.step.instance.instance_id == owners[session].instance_id
                    assert await reason(up, f"third-{session}") == "session_affinity"


async def reason(up: Fleet, request_id: str) -> str:
    async with open_channel(up.router.address) as channel:
        asked = fleet_pb2.GetDecisionRequest(decision_id=request_id)
        return (await Client(channel).fleet.GetDecision(asked)).decision.reason


def streams(known: dict[str, fleet_pb2.InstanceStatus]) -> dict[str, tuple[int, int]]:
    return {name: (instance.num_requests, instance.ongoing_decode_tokens) for name, instance in known.items()}


def idle(instance: Any) -> bool:
    return not any(counters(instance).values())
