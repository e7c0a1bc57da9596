"""A fleet with ill engines: a pool of one engine, which is ill, and a pool of three, of which one is; with sessions on both.

Router, gateway and two agents are processes, and so are the four emulated engines. One agent has the two engines that fall ill,
which it and the gateway reach through a tampering proxy; the other agent has the two well ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from bench.ill_engine import POISON
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_cli.instance_commands import state_words, suspension
from pointsman_common.io.channel import open_channel
from pointsman_lab.workload.tokenizer import ChatTokenizer
from tests.support.http_request import ask, serves
from tests.support.processes.process import Process, free_port
from tests.support.repository import REPOSITORY
from tests.support.tampering_proxy import Fault, TamperingProxy
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
# Model names of the two pools, with the number of engines and of clients of each.
ALONE, THREES = "alone", "threes"
ENGINES = {ALONE: 1, THREES: 3}
CLIENTS = {ALONE: 4, THREES: 6}
TURNS, TURN_WORDS, FIRST_WORDS, ANSWER_TOKENS = 6, 60, 150, 24
# Pause between two turns, and the patience of every other client, s.
PAUSE_S, PATIENCE_S = 0.3, (30.0, 5.0)
POLL_S = 0.2
START_S, SETTLE_S = 180.0, 60.0
# States in which an instance gets requests whenever the policy chooses it.
IN = (fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_SYNCING)


@dataclass(frozen=True)
class Services:
    """The command of agent, router, gateway and doctor: of this tree, or of another one."""

    python: str = sys.executable
    module: str = "pointsman_cli.main"

    def command(self, *words: str) -> list[str]:
        """Return the command line of `pointsman WORDS...`."""
        return [self.python, "-m", self.module, *words]

    def examinations(self, router: str, gateway: str, *agents: str) -> list[str]:
        """Return a command line that prints the findings of `pointsman doctor` for each line that it reads, as JSON: level, check
        and finding of each."""
        lines = (
            "import json, sys",
            f"from {self.module.rpartition('.')[0]}.doctor import examine",
            "for line in sys.stdin:",
            "    found = examine(sys.argv[1], sys.argv[2], None, sys.argv[3:])",
            "    print(json.dumps([(finding.level, finding.check, finding.found) for finding in found]), flush=True)",
        )
        return [self.python, "-c", "\n".join(lines), router, gateway, *agents]


@dataclass(frozen=True)
class Sent:
    """A request of a client, and how it ended. Times are of time.monotonic(), s."""

    pool: str  # model name of its pool, ALONE or THREES
    at: float  # just before it was sent
    ended: float  # when the whole answer was read, or the client gave up
    outcome: str  # "ok"; "failed"; "refused": by the gateway, which had no instance for it
    why: str = ""  # error, or status and code of the answer; empty if ok
    instance: str = ""  # id of the answering instance, as the gateway's header names it; empty: no such header

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.outcome == "ok"


@dataclass(frozen=True)
class Listed:
    """What the router said of the ill engine of a pool at a time; None: nothing."""

    at: float
    status: fleet_pb2.InstanceStatus | None

    @property
    def out(self) -> bool:
        """Whether the engine gets no requests but on trial."""
        return self.status is None or self.status.circuit_open or self.status.state not in IN

    @property
    def words(self) -> str:
        """What console and `pointsman instances` show."""
        if self.status is None:
            return "not listed"
        status, unknown = self.status, ", ".join(self.status.load.unknown)
        reason = status.life.reason or "requests failed in a row" * status.circuit_open
        parts = [
            state_words(status),
            f"{'out: ' * status.circuit_open}{reason}",
            suspension(status),
            status.load.problem,
            f"no number for {unknown}" if unknown else "",
            f"approximate: {status.prefix_reason}" if status.prefix_reason else "",
            *status.differences,
        ]
        return "; ".join(filter(None, dict.fromkeys(parts)))


@dataclass
class Engine:
    """An emulated engine's process. `environment`: its settings, which a restart may change."""

    model: str
    process: Process
    port: int

    @property
    def url(self) -> str:
        """Its own base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, case: str = "right", **settings: object) -> None:
        """Start it with these settings beside those of the fleet."""
        fixed: dict[str, object] = {"port": self.port, "model": self.model, "speedup": 2, "log_level": "error"}
        env = {f"POINTSMAN_EMULATE_{name.upper()}": str(value) for name, value in (fixed | settings).items()}
        self.process.argv, self.process.env = [sys.executable, "-m", "bench.ill_engine", case], env
        self.process.start()

    async def ready(self) -> None:
        """Wait until it answers."""
        await eventually(lambda: asyncio.to_thread(serves, self.url), f"engine {self.url}", START_S)

    async def restart(self, case: str = "right", **settings: object) -> None:
        """Kill it, and start it with these settings."""
        if self.process.alive:
            self.process.kill()
        self.start(case, **settings)
        await self.ready()


class IllFleet:
    """The fleet. `ill`: the engines that fall ill, of both pools; `well`: the others; `proxies`: those of `ill`."""

    def __init__(self, folder: Path, services: Services) -> None:
        """`folder` gets the processes' logs."""
        self.folder = folder
        self.services = services
        self.ill = [self._engine(model, "ill") for model in ENGINES]
        self.well = [self._engine(model, f"well{number}") for model in ENGINES for number in range(1, ENGINES[model])]
        self.proxies = [TamperingProxy(engine.url) for engine in self.ill]
        self.router, self.gateway = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.agents_at = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.parts: dict[str, Process] = {}
        self.sent: list[Sent] = []
        self.listed: dict[str, list[Listed]] = {model: [] for model in ENGINES}
        self.listing: list[fleet_pb2.InstanceStatus] = []
        self._words = ChatTokenizer().words
        self._draw = random.Random(1)
        self._stop = asyncio.Event()
        self._doctor: asyncio.subprocess.Process | None = None

    def _engine(self, model: str, name: str) -> Engine:
        port = free_port()
        log = self.folder / f"engine-{model}-{name}.log"
        return Engine(model, Process(f"engine-{model}-{name}", [], log, cwd=REPOSITORY), port)

    @property
    def ids(self) -> dict[str, str]:
        """The instance id of the ill engine of each pool."""
        return {engine.model: f"127.0.0.1:{proxy.port}" for engine, proxy in zip(self.ill, self.proxies, strict=True)}

    def set(self, fault: Fault, *paths: str) -> None:
        """Let both proxies tamper with these paths (none: all)."""
        for proxy in self.proxies:
            proxy.set(fault, *paths)

    def heal(self) -> None:
        """End all faults of the proxies."""
        for proxy in self.proxies:
            proxy.heal()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts inside the block."""
        try:
            for engine in (*self.ill, *self.well):
                engine.start()
            for proxy in self.proxies:
                await proxy.listen()
            for engine in (*self.ill, *self.well):
                await engine.ready()
            await self._start_services()
            polling = asyncio.create_task(self._poll())
            # Started once: on a busy machine its start takes as long as an illness.
            agents = [f"http://{at}" for at in self.agents_at]
            self._doctor = await asyncio.create_subprocess_exec(
                *self.services.examinations(self.router, f"http://{self.gateway}", *agents),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                await self.settled(START_S)
                yield
            finally:
                self._doctor.kill()
                await self._doctor.wait()
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
        finally:
            for part in (*self.parts.values(), *(engine.process for engine in (*self.ill, *self.well))):
                if part.alive:
                    part.kill()
            for proxy in self.proxies:
                await proxy.close()

    async def _start_services(self) -> None:
        quiet = ("--log-level", "warning")
        ill = [word for proxy in self.proxies for word in ("--engines", proxy.url)]
        well = [word for engine in self.well for word in ("--engines", engine.url)]
        words: dict[str, tuple[str, ...]] = {
            "router": ("router", "--listen", self.router, "--metrics-listen", "", *quiet)
        }
        words["gateway"] = ("gateway", "--listen", self.gateway, "--routers", self.router, *quiet)
        for name, engines, at in zip(("agent", "agent of the well"), (ill, well), self.agents_at, strict=True):
            state = str(self.folder / name.replace(" ", "-"))
            flags = ("--routers", self.router, "--metrics-listen", at, "--state-dir", state)
            words[name] = ("agent", *engines, *flags, *quiet)
        for name, line in words.items():
            log = self.folder / f"{name.replace(' ', '-')}.log"
            self.parts[name] = Process(name, self.services.command(*line), log, cwd=REPOSITORY)
            self.parts[name].start()

    async def restart_services(self) -> None:
        """Start router, gateway and agents anew."""
        for part in self.parts.values():
            if part.alive:
                part.kill()
        await self._start_services()

    async def settled(self, within_s: float = SETTLE_S) -> None:
        """Wait until all instances are ready, none is out, and the gateway knows all. Raises AssertionError if that is late."""

        def well() -> bool:
            states = [(status.state, status.circuit_open, status.load.problem) for status in self.listing]
            return states == [(fleet_pb2.INSTANCE_STATE_READY, False, "")] * sum(ENGINES.values())

        await eventually(well, "a well fleet", within_s)

        async def exact() -> bool:
            try:
                health = (await asyncio.to_thread(ask, f"http://{self.gateway}/health", timeout_s=5)).json()
            except (OSError, ValueError):
                return False
            known = sum(model["instances"] for model in health.get("models", {}).values())
            return bool(health.get("status") == "ok" and known == sum(ENGINES.values()))

        await eventually(exact, "a ready gateway", within_s)

    # ---- what the router says ----

    async def _poll(self) -> None:
        async with open_channel(self.router) as channel:
            stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=2)
                    self.listing = list(answer.instances)
                    known = {status.instance.instance_id: status for status in answer.instances}
                    for model, name in self.ids.items():
                        self.listed[model].append(Listed(time.monotonic(), known.get(name)))
                await asyncio.sleep(POLL_S)

    async def doctor(self) -> tuple[dict[str, list[str]], int]:
        """Return what `pointsman doctor` warns of, by pool, and its exit status. What concerns no pool is in both."""
        assert self._doctor is not None
        assert self._doctor.stdin is not None
        assert self._doctor.stdout is not None
        self._doctor.stdin.write(b"\n")
        findings = json.loads(await self._doctor.stdout.readline())
        pools = {name: model for model, name in self.ids.items()} | {model: model for model in ENGINES}
        pools |= {f"127.0.0.1:{engine.port}": engine.model for engine in self.well}
        found: dict[str, list[str]] = {model: [] for model in ENGINES}
        for level, check, finding in findings:
            text = f"{check}: {finding}"
            for model in ENGINES:
                others = [word for word, pool in pools.items() if pool != model]
                if level != "ok" and not any(other in text for other in others):
                    found[model].append(f"{level} {self.plain(text)}")
        return found, int(any(level == "fail" for level, *_ in findings))

    def plain(self, text: str) -> str:
        """Return a text without this run's addresses and model names."""
        for name in self.ids.values():
            text = text.replace(f"http://{name}", "ENGINE").replace(name, "ENGINE")
        for at, name in zip(self.agents_at, ("AGENT", "AGENT2"), strict=True):
            text = text.replace(f"http://{at}", name)
        for engine in self.well:
            text = text.replace(f"127.0.0.1:{engine.port}", "OTHER")
        return (
            re.sub(rf"\b({'|'.join(ENGINES)})\b", "MODEL", text)
            .replace(str(self.folder), "")
            .replace(str(REPOSITORY), "")
        )

    # ---- clients ----

    @contextlib.asynccontextmanager
    async def sessions(self) -> AsyncIterator[None]:
        """Let clients talk in sessions inside the block; all their requests have ended at its end."""
        self._stop.clear()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = [
                asyncio.create_task(self._client(http, model, number))
                for model, count in CLIENTS.items()
                for number in range(count)
            ]
            try:
                yield
            finally:
                self._stop.set()
                await asyncio.gather(*clients)

    async def _client(self, http: aiohttp.ClientSession, model: str, number: int) -> None:
        messages: list[dict[str, str]] = []
        turn, session = TURNS, ""
        await asyncio.sleep(number * PAUSE_S / len(CLIENTS))
        while not self._stop.is_set():
            if turn == TURNS:
                turn, messages, session = 0, [], f"{model}-{self._draw.randrange(10**9)}"
            words = "".join(self._draw.choices(self._words, k=TURN_WORDS if turn else FIRST_WORDS))
            asked = [*messages, {"role": "user", "content": words}]
            stream = (turn + number // 2) % 2 == 0
            sent, text = await self.ask(http, model, asked, session, PATIENCE_S[number % 2], stream=stream)
            self.sent.append(sent)
            if sent.ok:
                messages = [*asked, {"role": "assistant", "content": text}]
            turn += 1
            await asyncio.sleep(PAUSE_S)

    async def ask(
        self,
        http: aiohttp.ClientSession,
        model: str,
        messages: Sequence[dict[str, str]],
        session: str,
        patience_s: float,
        *,
        stream: bool,
    ) -> tuple[Sent, str]:
        """Send a chat, and return how it ended, and its text."""
        body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": stream}
        begun, instance, text, outcome, why = time.monotonic(), "", "", "failed", ""
        try:
            async with (
                asyncio.timeout(patience_s),
                http.post(f"http://{self.gateway}{CHAT}", json=body, headers={"X-Session-ID": session}) as answer,
            ):
                instance = answer.headers.get("X-Pointsman-Instance", "")
                received = await answer.read()
            if answer.status == 200:
                text = _streamed_text(received) if stream else json.loads(received)["choices"][0]["message"]["content"]
                outcome, why = ("ok", "") if len(text.split()) >= ANSWER_TOKENS else ("failed", "answer cut short")
            else:
                outcome, why = _refusal(answer.status, received)
        except TimeoutError:
            why = f"no whole answer within {patience_s:.0f} s"
        except aiohttp.ClientError as error:
            why = type(error).__name__
        except (ValueError, LookupError, TypeError, AttributeError):
            why = "no answer in its form"
        return Sent(model, begun, time.monotonic(), outcome, why, instance), text

    async def poison(self, model: str) -> None:
        """Send a prompt that kills engines."""
        async with aiohttp.ClientSession() as http:
            prompt = [{"role": "user", "content": f"{POISON} {self._draw.random()}"}]
            await self.ask(http, model, prompt, "", 20.0, stream=False)

    def requests_at(self, model: str) -> int:
        """Return how many chats have reached the ill engine of a pool, or its proxy."""
        return self.proxies[list(ENGINES).index(model)].requests[CHAT]


def _refusal(status: int, received: bytes) -> tuple[str, str]:
    """Return outcome and reason of an answer that is not 200. The gateway's own codes are words, engines' are numbers."""
    try:
        error = json.loads(received)["error"]
        code = error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        return "failed", f"{status}"
    if status in (429, 503) and isinstance(code, str) and not code.isdigit():
        return "refused", f"{status} {code}"
    return "failed", f"{status} {code}"


def _streamed_text(received: bytes) -> str:
    """Return the text of a stream that ends as it must. Raises ValueError or LookupError for another one."""
    events = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError("no end")
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@contextlib.contextmanager
def stopped(processes: Sequence[Process]) -> Iterator[None]:
    """Let processes stand still inside the block: the kernel accepts connections for them, and nothing answers."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


@dataclass
class Outcome:
    """What a way of being ill did to a pool. Times in s; None: not seen."""

    way: str  # name of the Way, as in WAYS
    pool: str  # model name of the pool, ALONE or THREES
    ill_s: float  # from the illness's begin to its end, what it takes to begin and to end included
    requests: int = 0  # of the pool's clients, from before the illness until the engine is back or given up on
    failed: int = 0  # of these, without a whole answer, except refused ones
    refused: int = 0  # of these, refused by the gateway, which had no instance
    reasons: dict[str, int] = field(default_factory=dict)  # Sent.why -> number of failed and refused requests
    out_s: float | None = None  # from the illness's begin until the router listed the engine as out
    back_s: float | None = None  # from the illness's end until it was listed as in and had answered a request
    share: float = 0.0  # of the requests of the illness's second half, those that reached the ill engine
    said: str = ""  # Listed.words near the illness's end; before them those of its first time out, if it is in again
    doctor: list[str] = field(default_factory=list)  # warnings and failures then; those of the well fleet left out
    doctor_status: int = 0  # exit status of `pointsman doctor` then, for the whole fleet
    late: bool = False  # whether the fleet had to be started anew afterwards

    def count(self, sent: Sequence[Sent]) -> None:
        """Count the requests of this pool."""
        mine = [request for request in sent if request.pool == self.pool]
        outcomes = Counter(request.outcome for request in mine)
        self.requests, self.failed, self.refused = len(mine), outcomes["failed"], outcomes["refused"]
        self.reasons = dict(Counter(request.why for request in mine if not request.ok))
