"""Placements over gRPC, from a gateway's message to its answer, with a router in a separate process."""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from bench import stack
from bench.figures import Figure, percentile
from bench.full_cache_fleet import (
    KEYS_PER_INSTANCE,
    OWN_KEYS,
    PROMPT_TOKENS,
    cached_keys,
    info,
    long_prompt,
    prefix_length,
)
from bench.many_agents import ReportedEngine
from bench.stack import ServerProcess
from pointsman.router.v1 import fleet_pb2, placement_pb2, placement_pb2_grpc
from pointsman_common.io.batch_queue import BatchQueue
from pointsman_common.io.channel import open_channel
from pointsman_gateway.core.request.prepare import set_keys
from pointsman_gateway.io.routing.router_client import REPORT_DELAY_S
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report

INSTANCES = 64
# Size of a fleet that one router must handle. Each instance has fewer keys, so that the case fits a small machine. A decision
# reads only the prompt's keys.
MANY_INSTANCES, MANY_KEYS = 1_000, 4_500
ROUNDS = 500
IN_FLIGHT = 64


async def place() -> list[Figure]:
    """place_rpc_*, place_per_s, place_cpu_*, restart_kb_* and resync_s without a shared store, and place_rpc_redis_* with
    Redis."""
    figures: list[Figure] = []
    keys = long_prompt()
    async with stack.router() as (address, served), open_channel(address) as channel:
        started = time.perf_counter()
        fleet = await _fill(channel, keys)
        resync = time.perf_counter() - started
        figures.append(
            Figure("resync_s", resync, "s", 5.0, "64 agents x 62,500 keys into an empty router; baseline is the goal")
        )
        session = await _session(channel, fleet, keys)
        await fleet.report()
        figures += await _latency(session, fleet, "place_rpc", 0.5, 2.0)
        figures.append(await _sent_keys(session, served, array("Q", keys)))
        await fleet.report()
        figures += await _rate(session, fleet, served)
        for engine in fleet.engines:
            engine.report.call.cancel()
    async with stack.router() as (address, served), open_channel(address) as channel:
        fleet = await _fill(channel, keys, MANY_INSTANCES, MANY_KEYS)
        session = await _session(channel, fleet, keys, MANY_KEYS)
        for tokens, goal, prompt in ((1_024, 500.0, None), (PROMPT_TOKENS, 1_000.0, keys)):
            await fleet.report()
            _, cpu_us = await _played(session, fleet, served, 600, tokens, prompt)
            note = (
                f"{tokens:,}-token prompts on {MANY_INSTANCES:,} instances, {IN_FLIGHT} in flight; baseline is the goal"
            )
            figures.append(Figure(f"place_cpu_us_{MANY_INSTANCES}_{tokens // 1000}k", cpu_us, "us", goal, note))
        figures.append(await _restart(session, channel, fleet.engines[0].report))
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, _):
        async with stack.router("--redis-url", url) as (address, _), open_channel(address) as channel:
            fleet = await _fill(channel, keys)
            session = await _session(channel, fleet, keys)
            await fleet.report()
            figures += await _latency(session, fleet, "place_rpc_redis", None, None)
    return figures


async def _latency(
    session: Session, fleet: Fleet, name: str, goal50: float | None, goal99: float | None
) -> list[Figure]:
    times = []
    for number in range(ROUNDS):
        request = placement_pb2.PlacementRequest(
            request_id=f"{name}{number}",
            model="m",
            input_tokens=PROMPT_TOKENS,
            keys=fleet.prompt,
            session_id=f"s{number % 50}",
        )
        message = placement_pb2.SessionRequest(place=request)
        started = time.perf_counter()
        await session.write(message)
        placement = await _placement(session)
        times.append((time.perf_counter() - started) * 1e3)
        fleet.computes(placement, fleet.prompt)
        finished = placement_pb2.Finished(request_id=f"{name}{number}", outcome=placement_pb2.OUTCOME_OK)
        await session.write(placement_pb2.SessionRequest(finished=finished))
    note = "64 instances x 62,500 keys, 130k-token prompt (8,125 keys), over Session; baseline is the goal"
    return [
        Figure(f"{name}_p50_ms", percentile(times, 0.5), "ms", goal50, note),
        Figure(f"{name}_p99_ms", percentile(times, 0.99), "ms", goal99, note),
    ]


async def _sent_keys(session: Session, served: ServerProcess, keys: array[int]) -> Figure:
    """Return what it costs to send a prompt's keys: the router's CPU time for requests that it refuses before it looks at their
    keys, less that without keys. It is all that a protocol could save that sends only the keys that are new in a turn."""
    cpu_us: dict[int, float] = {}
    middle_ms: dict[int, float] = {}
    for count in (0, len(keys)):
        before, times = stack.cpu_s(*served.pids), []
        for number in range(ROUNDS):
            request = placement_pb2.PlacementRequest(
                request_id=f"keys{count}-{number}", model="unknown", input_tokens=PROMPT_TOKENS
            )
            set_keys(request, keys[:count])
            started = time.perf_counter()
            await session.write(placement_pb2.SessionRequest(place=request))
            while not (await session.read()).HasField("refusal"):
                pass
            times.append((time.perf_counter() - started) * 1e3)
        cpu_us[count] = (stack.cpu_s(*served.pids) - before) / ROUNDS * 1e6
        middle_ms[count] = percentile(times, 0.5)
    note = (
        f"the router's CPU to receive {len(keys):,} keys; the answer comes {middle_ms[len(keys)] - middle_ms[0]:.3f} ms later; "
        "baseline: a refused request without keys"
    )
    return Figure("place_keys_us", cpu_us[len(keys)] - cpu_us[0], "us", cpu_us[0], note)


async def _rate(session: Session, fleet: Fleet, served: ServerProcess, count: int = 6_000) -> list[Figure]:
    spent, cpu_us = await _played(session, fleet, served, count, 1_024)
    note = f"different 1k-token prompts, {IN_FLIGHT} in flight, 64 instances; "
    return [
        Figure("place_per_s", count / spent, "1/s", 3_000.0, f"{note}a core each for both ends; baseline is the goal"),
        Figure("place_cpu_us", cpu_us, "us", None, f"{note}the router's CPU for placement, first token and end"),
    ]


async def _restart(session: Session, channel: grpc.aio.Channel, agent: Report) -> Figure:
    """Restart one engine; return the bytes that the router sends to a gateway up to the update about the restart."""
    agent.call.cancel()
    name = info(0).instance_id
    sent_bytes = 0

    async def read() -> None:
        nonlocal sent_bytes
        while True:
            message = await session.read()
            sent_bytes += message.ByteSize()
            for response in message.batch.responses if message.HasField("batch") else (message,):
                for pool in response.fleet_update.pools:
                    if any((i.instance_id, i.incarnation) == (name, "2") for i in pool.instances):
                        return

    again = Report(Client(channel))
    await asyncio.gather(read(), again.join(name, incarnation="2"))
    again.call.cancel()
    note = f"an engine of {MANY_INSTANCES:,} restarts: bytes that each gateway is sent; baseline is the goal"
    return Figure(f"restart_kb_{MANY_INSTANCES}", sent_bytes / 1e3, "kB", 10.0, note)


async def _played(
    session: Session, fleet: Fleet, served: ServerProcess, count: int, tokens: int, prompt: list[int] | None = None
) -> tuple[float, float]:
    """Send `count` requests as a gateway does: IN_FLIGHT at a time, each with its first token and its end, in batches.

    Returns the total time (s), and the router's CPU time per request (us). All requests have the keys `prompt`; without it each
    has its own.
    """
    rng = random.Random(1)
    batch_queue: BatchQueue[placement_pb2.SessionRequest] = BatchQueue()
    numbers = iter(range(count))
    answers: dict[str, asyncio.Future[placement_pb2.Placement]] = {}

    async def requests() -> None:
        for number in numbers:
            name = f"p{tokens}-{number}"
            answer = answers[name] = asyncio.get_running_loop().create_future()
            keys = prompt or [rng.getrandbits(64) for _ in range(tokens // 16)]
            request = placement_pb2.PlacementRequest(request_id=name, model="m", input_tokens=tokens, keys=keys)
            batch_queue.put(placement_pb2.SessionRequest(place=request))
            fleet.computes(await answer, keys)
            first_token = placement_pb2.FirstToken(request_id=name)
            batch_queue.put(placement_pb2.SessionRequest(first_token=first_token), REPORT_DELAY_S)
            finished = placement_pb2.Finished(request_id=name, outcome=placement_pb2.OUTCOME_OK)
            batch_queue.put(placement_pb2.SessionRequest(finished=finished), REPORT_DELAY_S)

    async def write() -> None:
        while messages := await batch_queue.take():
            batch = placement_pb2.SessionRequestBatch(requests=messages)
            await session.write(placement_pb2.SessionRequest(batch=batch))

    async def read() -> None:
        left = count
        while left:
            for placement in await _placements(session):
                answers.pop(placement.request_id).set_result(placement)
                left -= 1

    started, cpu_before = time.perf_counter(), stack.cpu_s(*served.pids)
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(write())
        tasks.create_task(read())
        await asyncio.gather(*(requests() for _ in range(IN_FLIGHT)))
        spent, cpu = time.perf_counter() - started, stack.cpu_s(*served.pids) - cpu_before
        batch_queue.end()
        await writer
    return spent, cpu / count * 1e6


# grpc-stubs types the synchronous calls only.
Session: TypeAlias = Any


async def _session(channel: grpc.aio.Channel, fleet: Fleet, keys: list[int], count: int = KEYS_PER_INSTANCE) -> Session:
    """Open a gateway's stream, and confirm each instance's events by the answer to a prompt that only this instance has."""
    stub: Any = placement_pb2_grpc.PlacementServiceStub(channel)
    session = stub.Session()
    hello = placement_pb2.GatewayHello(gateway_id="bench", secret=secrets.token_bytes(16))
    await session.write(placement_pb2.SessionRequest(hello=hello))
    await fleet.report()
    for name in (info(number).instance_id for number in range(len(fleet.engines))):
        prompt = cached_keys(keys, int(name[1:]), count)[-OWN_KEYS:]
        request = placement_pb2.PlacementRequest(request_id=name, model="m", input_tokens=16 * len(prompt), keys=prompt)
        await session.write(placement_pb2.SessionRequest(place=request))
        placement = await _placement(session)
        assert placement.step.instance.instance_id == name
        first_token = placement_pb2.FirstToken(request_id=name)
        await session.write(placement_pb2.SessionRequest(first_token=first_token))
        finished = placement_pb2.Finished(request_id=name, outcome=placement_pb2.OUTCOME_OK)
        await session.write(placement_pb2.SessionRequest(finished=finished))
    client, events = Client(channel), fleet_pb2.PREFIX_SOURCE_EVENTS
    while any(status.prefix_source != events for status in (await client.instances()).values()):
        await fleet.report()
        await asyncio.sleep(0.05)
    return session


async def _placement(session: Session) -> placement_pb2.Placement:
    [placement] = await _placements(session)
    return placement


async def _placements(session: Session) -> list[placement_pb2.Placement]:
    """Return the placements of the next message that has any. Raises RuntimeError for a refusal."""
    found: list[placement_pb2.Placement] = []
    while not found:
        message = await session.read()
        for response in message.batch.responses if message.HasField("batch") else (message,):
            if response.HasField("refusal"):
                raise RuntimeError(response.refusal.message)
            found += [response.placement] if response.HasField("placement") else []
    return found


async def _fill(
    channel: grpc.aio.Channel, keys: list[int], instances: int = INSTANCES, count: int = KEYS_PER_INSTANCE
) -> Fleet:
    """Report `instances` with `count` keys each, and wait until the router has all of them."""
    client = Client(channel)
    agents = [Report(client) for _ in range(instances)]

    async def report(agent: Report, number: int) -> None:
        await agent.hello(info(number).instance_id)
        assert (await agent.read()).welcome.snapshot
        await agent.snapshot(cached_keys(keys, number, count))

    await asyncio.gather(*(report(agent, number) for number, agent in enumerate(agents)))
    while True:
        known = await client.instances()
        if sum(status.state == fleet_pb2.INSTANCE_STATE_READY for status in known.values()) == instances:
            return Fleet(agents, keys)
        await asyncio.sleep(0.02)


class Fleet:
    """The agents of the instances that hold prefixes of `prompt`, and what their engines have computed since they reported."""

    def __init__(self, agents: list[Report], prompt: list[int]) -> None:
        self.engines, self.prompt = [ReportedEngine(agent) for agent in agents], prompt
        self._held = [prefix_length(prompt, number) for number in range(len(agents))]

    def computes(self, placement: placement_pb2.Placement, keys: list[int]) -> None:
        """Note that a prompt with these keys, `prompt` or one that has none in common with others, is computed."""
        number = int(placement.step.instance.instance_id[1:])
        if keys is self.prompt:
            keys, self._held[number] = keys[self._held[number] :], len(keys)
        self.engines[number].computed.extend(keys)

    async def report(self) -> None:
        """Report the keys of all computed blocks and a load, as agents do all the time: the router stops to trust events that
        tell of no block, and ignores the keys of an instance that has not reported for a while."""
        await asyncio.gather(*(engine.tell() for engine in self.engines))
