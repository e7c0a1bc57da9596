"""A fleet as its operator runs it, as real processes: Redis, two routers, a gateway of two processes, agents and engines.

Each connection between two of them passes a Link of the test. The fleet also checks what must be true when it is healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import redis

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.io.channel import open_channel
from pointsman_lab.workload.tokenizer import ChatTokenizer
from tests.support.engines.servers import held_pieces, pieces_of
from tests.support.instances import counters
from tests.support.processes.pointsman import flag_words, pointsman_command
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_command
from tests.support.tcp_proxies import Link
from tests.support.trace_replay import CheckedLoad

MODEL = "m"
BLOCK = 16
ENGINES = {"e0": "a0", "e1": "a0", "e2": "a1"}
ROUTERS = ("r0", "r1")
# Timeouts of a start, of waiting for a healthy fleet, and of a call to a router, s.
START_S, HEALTHY_WITHIN_S, ASK_S = 60.0, 45.0, 2.0
# Links: client and server of the connections that pass each.
LINKS = [
    *(("gateway", name) for name in (*ROUTERS, *ENGINES)),
    *(("agents", name) for name in ROUTERS),
    *((name, "redis") for name in ROUTERS),
]


class Fleet:
    """The processes by name ("redis", "r0", "r1", "gateway", "a0", "a1", "e0", "e1", "e2"), and the links by (client, server).

    `linked`: connections pass links. `clocks`: the library made of clock.c, with which each process's wall clock can be set.
    `more`: additional flags of services ("router", "gateway", "emulate").
    """

    def __init__(
        self, folder: Path, *, linked: bool = True, clocks: Path | None = None, **more: dict[str, Any]
    ) -> None:
        self.folder = folder
        self._clocks = clocks
        self.ports = {name: free_port() for name in ("redis", *ROUTERS, "gateway", *ENGINES)}
        self.links = {pair: Link(self.ports[pair[1]]) for pair in LINKS} if linked else {}
        self.parts: dict[str, Process] = {}
        self._more = more
        self.gateway_url = f"http://127.0.0.1:{self.ports['gateway']}"
        self.ledger = folder / "ledger"
        self.replay = CheckedLoad(self.gateway_url, MODEL, ChatTokenizer().words, scale=1 / 8, clients=6)
        self._read: dict[str, int] = {}

    # ---- processes ----

    async def start(self) -> None:
        """Start all processes, and wait until the fleet is healthy."""
        self.ledger.touch()
        for link in self.links.values():
            await link.start()
        flags = ("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")
        # With SIGXFSZ ignored, a limit on the size of files makes Redis' writes fail, as a full disk does.
        argv = ["env", "--ignore-signal=XFSZ", *redis_command(self.ports["redis"], self.folder, *flags)]
        self._part("redis", argv)
        for name in ENGINES:
            shape = {"port": self.ports[name], "model": MODEL, "max_model_len": 32_000, "kv_blocks": 4_000}
            shape |= self._more.get("emulate", {})
            argv = [sys.executable, "-m", "tests.support.processes.ledger_engine", str(self.ledger), *_words(shape)]
            self._part(name, argv)
        for name in ROUTERS:
            self._service(
                name,
                "router",
                listen=f"127.0.0.1:{self.ports[name]}",
                advertise=self.address("gateway", name),
                metrics_listen="",
                redis_url=f"redis://{self.address(name, 'redis')}/0",
            )
        for agent in sorted(set(ENGINES.values())):
            engines = [
                f"http://127.0.0.1:{self.ports[name]}?advertise=http://{self.address('gateway', name)}"
                for name, at in ENGINES.items()
                if at == agent
            ]
            routers = [self.address("agents", name) for name in ROUTERS]
            state = self.folder / f"state-{agent}"
            self._service(
                agent, "agent", engines=engines, routers=routers, state_dir=state, metrics_listen="", save_interval_s=1
            )
        self._service(
            "gateway",
            "gateway",
            listen=f"127.0.0.1:{self.ports['gateway']}",
            routers=[self.address("gateway", name) for name in ROUTERS],
            processes=2,
            gateway_id="gw",
        )
        for part in self.parts.values():
            part.start()
        await self.wait_until_healthy(START_S)

    def _service(self, name: str, service: str, **flags: Any) -> None:
        flags |= {flag: str(value).format(name=name) for flag, value in self._more.get(service, {}).items()}
        self._part(name, pointsman_command(service, *_words(flags)))

    def _part(self, name: str, argv: list[str]) -> None:
        env = {}
        if self._clocks is not None:
            env = {"LD_PRELOAD": str(self._clocks), "TEST_CLOCK": str(self.folder / f"{name}.clock")}
            self.clock(name, 0.0)
        self.parts[name] = Process(name, argv, self.folder / f"{name}.log", env)

    def clock(self, name: str, clock_offset_s: float) -> None:
        """Set the error of a process's wall clock, s."""
        file = self.folder / f"{name}.clock"
        file.touch()
        with file.open("r+b") as there:
            there.write(int(clock_offset_s * 1e9).to_bytes(8, sys.byteorder, signed=True))

    def address(self, one: str, other: str) -> str:
        """Return the address at which one process connects to another."""
        link = self.links.get((one, other))
        return link.address if link is not None else f"127.0.0.1:{self.ports[other]}"

    async def stop(self) -> None:
        """Kill all processes, and stop the links."""
        for part in reversed(self.parts.values()):
            if part.alive:
                await asyncio.to_thread(part.kill)
        for link in self.links.values():
            await link.stop()

    async def repair(self) -> None:
        """Undo faults that an earlier test may have left, and wait until the fleet is healthy."""
        self.ledger.write_bytes(b"")
        for link in self.links.values():
            link.repair()
        for name, part in self.parts.items():
            if self._clocks is not None:
                self.clock(name, 0.0)
            if part.alive:
                os.killpg(part.pid, signal.SIGCONT)
                self.disk(name, full=False)
            else:
                part.start()
        await self.wait_until_healthy(START_S)

    def kill(self, name: str) -> None:
        """Kill a process."""
        self.parts[name].kill()

    async def restart(self, name: str) -> None:
        """Stop a process in order, and start it again."""
        part = self.parts[name]
        assert await asyncio.to_thread(part.stop) == 0, part.tail()
        part.start()

    def disk(self, name: str, *, full: bool) -> None:
        """Set whether the disk of a process is full, by a limit of 0 on the size of the files that it writes."""
        pids = [self.parts[name].pid, *(self.gateway_processes() if name == "gateway" else ())]
        for pid in pids:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def gateway_processes(self) -> list[int]:
        """Return the ids of the gateway's serving processes, without their parent."""
        parent = self.parts["gateway"].pid
        pids = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    # ---- queries ----

    @asynccontextmanager
    async def router(self, name: str) -> AsyncIterator[fleet_pb2_grpc.FleetServiceStub]:
        """Yield a stub of one router, not through a link."""
        async with open_channel(f"127.0.0.1:{self.ports[name]}") as channel:
            yield fleet_pb2_grpc.FleetServiceStub(channel)

    async def replicas(self, name: str) -> fleet_pb2.ListReplicasResponse:
        """Return one router's answer to ListReplicas."""
        async with self.router(name) as stub:
            stub_any: Any = stub
            answer: fleet_pb2.ListReplicasResponse = await stub_any.ListReplicas(
                fleet_pb2.ListReplicasRequest(), timeout=ASK_S
            )
            return answer

    async def instances(self, name: str) -> dict[str, fleet_pb2.InstanceStatus]:
        """Return the instances as one router sees them, by the engines' names."""
        async with self.router(name) as stub:
            stub_any: Any = stub
            answer = await stub_any.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=ASK_S)
        names = {self.address("gateway", engine): engine for engine in ENGINES}
        return {names[instance.instance.instance_id]: instance for instance in answer.instances}

    async def owner(self) -> str:
        """Wait until a router owns the pool, as its owner may be changing; return the router's name."""
        owner = ""

        async def problem() -> str:
            nonlocal owner
            owner = self._owner_of((await self.replicas("r0")).pools[0])
            return "" if owner else "nobody owns the pool"

        await self._until(problem, HEALTHY_WITHIN_S)
        return owner

    async def other(self) -> str:
        """Return the name of the router that does not own the pool."""
        owner = await self.owner()
        return next(name for name in ROUTERS if name != owner)

    def _owner_of(self, pool: fleet_pb2.PoolStatus) -> str:
        return next((name for name in ROUTERS if self.address("gateway", name) == pool.owner.address), "")

    async def incarnations(self, engine: str) -> set[str]:
        """Return the engine's incarnations as the routers know them; "" for a router that knows none."""
        known = [(await self.instances(name)).get(engine) for name in ROUTERS]
        return {instance.instance.incarnation if instance is not None else "" for instance in known}

    async def wait_until_restarted(self, engine: str, before: set[str]) -> None:
        """Wait until both routers know an incarnation of the engine that is not in `before`."""

        async def problem() -> str:
            now = await self.incarnations(engine)
            return "" if len(now) == 1 and not now & {"", *before} else f"{engine} is {now}"

        await self._until(problem, HEALTHY_WITHIN_S)

    async def wait_until_replaced(self, pid: int) -> None:
        """Wait until the gateway has replaced its process `pid`."""

        async def problem() -> str:
            return "" if pid not in (pids := self.gateway_processes()) and len(pids) == 2 else f"gateway: {pids}"

        await self._until(problem, HEALTHY_WITHIN_S)

    async def metrics(self, url: str) -> dict[str, float]:
        """Return the samples of a page of metrics, by name and labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    # ---- checks ----

    async def wait_until_healthy(self, within_s: float = HEALTHY_WITHIN_S) -> None:
        """Wait until every process runs and knows the others. Load may be running."""
        await self._until(self._health_problem, within_s)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is open anywhere. No load may be running."""
        await self._until(self._health_problem, HEALTHY_WITHIN_S)
        await self._until(self._still_open, HEALTHY_WITHIN_S)

    async def wait_until_at_rest(self) -> None:
        """Wait until nothing is open, and both routers know what the engines have cached."""
        await self.wait_until_idle()
        await self._until(self._cache_problem, HEALTHY_WITHIN_S)

    async def _until(self, problem: Callable[[], Awaitable[str]], within_s: float) -> None:
        """Call `problem` until it returns an empty string. Raises AssertionError after `within_s`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + within_s
        while True:
            try:
                found = await problem()
            except (grpc.aio.AioRpcError, aiohttp.ClientError, OSError, redis.RedisError) as error:
                found = repr(error)
            if not found:
                return
            assert loop.time() < ends, f"after {within_s:g} s: {found}\n{self.tails()}"
            await asyncio.sleep(0.1)

    async def _health_problem(self) -> str:
        for part in self.parts.values():
            assert part.alive, f"{part.name} ended\n{part.tail()}"
        owners = set()
        for name in ROUTERS:
            listed = await self.replicas(name)
            if listed.this_replica.degraded or not listed.this_replica.ready or len(listed.replicas) != len(ROUTERS):
                return f"{name}: {listed.this_replica}, {len(listed.replicas)} replicas"
            owners.add(self._owner_of(listed.pools[0]) if listed.pools else "")
            known = await self.instances(name)
            states = {engine: status.state for engine, status in known.items()}
            if states != dict.fromkeys(ENGINES, fleet_pb2.INSTANCE_STATE_READY):
                return f"{name}: {states}"
        if len(owners) > 1 or "" in owners:
            return f"owners {owners}"
        page = await self.metrics(self.gateway_url)
        there = (page.get("pointsman_gateway_processes"), page.get("pointsman_gateway_router_connected"))
        exact = page.get(f'pointsman_gateway_tokenizer_exact{{model="{MODEL}"}}')
        return "" if (there, exact) == ((2, 1), 1) else f"gateway: {there}, {exact}"

    async def _still_open(self) -> str:
        page = await self.metrics(self.gateway_url)
        if page["pointsman_gateway_open_requests"]:
            return f"gateway: {page['pointsman_gateway_open_requests']:.0f} open"
        for name in ROUTERS:
            replica = (await self.replicas(name)).this_replica
            if replica.open_requests or replica.held_requests:
                return f"{name}: {replica.open_requests} open, {replica.held_requests} held"
            for engine, instance in (await self.instances(name)).items():
                if any(busy := counters(instance).values()):
                    return f"{name}: {engine} {list(busy)}"
        for engine in ENGINES:
            page = await self.metrics(f"http://127.0.0.1:{self.ports[engine]}")
            if any(
                value for sample, value in page.items() if re.match(r"vllm:num_requests_(running|waiting)\{", sample)
            ):
                return f"{engine}: requests"
        with redis.Redis(port=self.ports["redis"], decode_responses=True) as client:
            kept: Any = client.hgetall(f"pointsman:{{default:{MODEL}}}:open")
        return f"redis keeps {kept}" if kept else ""

    async def _cache_problem(self) -> str:
        """Return a difference between what routers know of the engines' caches and the truth, or an empty string.

        Compares the number of keys at each router. At the owner, which alone can answer it, also compares the cached tokens of
        sessions' prompts per engine.
        """
        truth = {}
        for engine in ENGINES:
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{self.ports[engine]}/kv_event_sources") as answer,
            ):
                endpoint = (await answer.json())["0"]["replay_endpoint"]
            truth[engine] = await asyncio.to_thread(held_pieces, endpoint)
        for name in ROUTERS:
            for engine, status in (await self.instances(name)).items():
                cache = (
                    status.keys,
                    status.provisional_keys,
                    status.events_contradicted,
                    status.prediction_audit_failures,
                )
                # A standby has placed nothing whose answer could confirm the events.
                known = status.prefix_source in (fleet_pb2.PREFIX_SOURCE_EVENTS, fleet_pb2.PREFIX_SOURCE_APPROXIMATE)
                if not known or cache != (len(truth[engine]), 0, False, 0):
                    return f"{name}: {engine} has {len(truth[engine])} keys, not {cache} by {status.prefix_source}"
        owner = await self.owner()
        for prompt in list(self.replay.prompts.values())[-20:]:
            assumed = await self._cached(owner, prompt)
            for engine, held in truth.items():
                pieces = pieces_of(prompt)
                found = next((at for at, piece in enumerate(pieces) if piece not in held), len(pieces))
                cached = min(found * 16, (len(prompt) - 1) // BLOCK * BLOCK)
                if assumed[engine] != cached:
                    return f"{engine} has {cached} tokens of a prompt, not {assumed[engine]}"
        return ""

    async def _cached(self, router: str, prompt: list[int]) -> dict[str, int]:
        asked = placement_pb2.PlacementRequest(
            request_id="q", model=MODEL, input_tokens=len(prompt), keys=prompt_keys(prompt, MODEL)
        )
        async with self.router(router) as stub:
            stub_any: Any = stub
            answer = await stub_any.Explain(fleet_pb2.ExplainRequest(request=asked), timeout=ASK_S)
        names = {self.address("gateway", engine): engine for engine in ENGINES}
        return {names[candidate.instance_id]: candidate.cached_tokens for candidate in answer.decision.candidates}

    # ---- after the load ----

    def repeated_answers(self) -> list[str]:
        """Return ids of requests whose answers engines have made in full more than once since the last call."""
        ends = Counter(self.ledger.read_text().splitlines())
        self.ledger.write_bytes(b"")
        asked = {request.request_id for request in self.replay.asked}
        made = {line.removesuffix(" whole"): count for line, count in ends.items() if line.endswith(" whole")}
        assert made.keys() <= asked, "an engine answered an unknown request"
        assert {request.request_id for request in self.replay.asked if request.outcome == "whole"} <= made.keys(), (
            "not generated"
        )
        return [request_id for request_id, count in made.items() if count > 1]

    def tails(self) -> str:
        """Return the last lines of all logs."""
        return "\n".join(part.tail(15) for part in self.parts.values())

    def new_tracebacks(self) -> list[str]:
        """Return tracebacks in the logs since the last call: errors that were not handled."""
        found = []
        for name, part in self.parts.items():
            with contextlib.suppress(FileNotFoundError):
                text = part.log.read_text(errors="replace")
                new = text[self._read.get(name, 0) :]
                self._read[name] = len(text)
                found += [
                    f"{name}: {traceback}" for traceback in re.findall(r"Traceback \(most recent[^\0]{0,2000}", new)
                ]
        return found


def _words(flags: dict[str, Any]) -> list[str]:
    return flag_words({"log_level": "warning", **flags})
