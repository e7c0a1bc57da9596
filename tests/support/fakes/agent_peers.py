"""A fake engine (HTTP and ZMQ) and a fake router (gRPC) for the agent's integration tests, on free ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman.agent.v1 import agent_pb2_grpc
from pointsman_agent.core.kv_events import END_OF_REPLAY, Event
from pointsman_agent.io.main import serve
from pointsman_agent.io.settings import AgentSettings
from pointsman_common.core.addresses import Address, in_brackets
from pointsman_common.core.block_keys import digest_of
from pointsman_common.io.channel import SERVER_OPTIONS


class FakeEngine:
    """The part of vLLM's interface that the agent uses. `mute` batches are only in the replay buffer."""

    def __init__(
        self, context: zmq.asyncio.Context, *, process_start: float | None = 1000.0, host: str = "127.0.0.1"
    ) -> None:
        self.context = context
        self.host = host
        self.process_start = process_start
        self.block_size = 32
        self.adapters: list[str] = []
        self.running = 0
        self.generation_tokens = 100
        self.ranks = [0]
        self.model = "tiny"
        self.replay_port = True
        self.answers_replays = True
        self.announced: dict[str, str] = {}
        """Labels of the connector package's pointsman_kv_transfer_info; empty without the package."""
        self.tokenizer: dict[str, str] = {}
        """Labels of pointsman_tokenizer_info; empty without the package."""
        self.engine: dict[str, str] = {}
        """Labels of pointsman_engine_info; empty without the package."""
        self.identity: dict[str, str] = {}
        """Labels of pointsman_engine_identity_info; empty without the package."""
        self.engine_ids: list[str] = []
        """What a bootstrap server at this engine's own port answers, by rank; empty: there is none."""
        self.metrics_broken = False
        self.more_metrics = ""
        """Further lines of the metrics page."""
        self.max_model_len: object = 4_096
        self.events_address: object = ""
        """The endpoint that /kv_event_sources names; empty: that of the events."""
        self.tells_sources = True
        """Whether it has GET /kv_event_sources."""
        self.awake = True
        self.operations: dict[str, int] = {}
        """Completed sleep operations, by name."""
        self.paused: bool | None = None
        """The answer of /is_paused; None: the engine has no such route."""
        self.pause_answers = asyncio.Event()
        self.pause_answers.set()
        self.buffer: list[tuple[int, bytes]] = []
        self.replays = 0
        self.scrapes = 0
        self.port = 0
        self._seq = 0
        self._runner: web.AppRunner | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{Address(self.host, self.port)}"

    async def start(self) -> None:
        """Start a new incarnation. After stop() the HTTP port stays the same; the ZMQ ports are new and the cache is empty."""
        self._seq, self.buffer = 0, []
        self._pub = self.context.socket(zmq.PUB)
        self._pub.linger, self._pub.ipv6 = 0, ":" in self.host
        self.events_port = self._pub.bind_to_random_port(f"tcp://{in_brackets(self.host)}")
        self._router = self.context.socket(zmq.ROUTER)
        self._router.linger, self._router.ipv6 = 0, ":" in self.host
        self._router.sndhwm = 0
        self._router_port = self._router.bind_to_random_port(f"tcp://{in_brackets(self.host)}")
        self._serving = asyncio.create_task(self._serve_replays())
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.get("/is_paused", self._is_paused),
                web.get("/version", self._version),
                web.get("/query", self._query),
                web.get("/kv_event_sources", self._sources),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is None:
            return
        await self._runner.cleanup()
        self._runner = None
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._pub.close()
        self._router.close()

    async def publish(self, *events: Event, mute: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        seq, self._seq = self._seq, self._seq + 1
        if not mute:
            await self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        self.buffer.append((seq, payload))

    def rewind(self) -> None:
        """Restart the publisher's sequence numbers without a restart of the process."""
        self._seq, self.buffer = 0, []

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays += 1
            if not self.answers_replays:
                continue
            for seq, payload in self.buffer:
                if seq >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        if self.metrics_broken:
            raise web.HTTPServiceUnavailable
        lines = [] if self.process_start is None else [f"process_start_time_seconds {self.process_start}"]
        for series, facts in (
            ("kv_transfer", self.announced),
            ("tokenizer", self.tokenizer),
            ("engine", self.engine),
            ("engine_identity", self.identity),
        ):
            if facts:
                labels = ",".join(f'{name}="{value}"' for name, value in facts.items())
                lines.append(f"pointsman_{series}_info{{{labels}}} 1.0")
        for rank in self.ranks:
            lines += [
                f'vllm:num_requests_running{{engine="{rank}",model_name="tiny"}} {self.running + rank}',
                f'vllm:generation_tokens_total{{engine="{rank}",model_name="tiny"}} {self.generation_tokens}',
                f'vllm:cache_config_info{{block_size="{self.block_size}",enable_prefix_caching="True",engine="{rank}",'
                f'num_gpu_blocks="100"}} 1.0',
                f'vllm:engine_sleep_state{{engine="{rank}",model_name="tiny",sleep_state="awake"}} {float(self.awake)}',
                f'vllm:engine_sleep_state{{engine="{rank}",model_name="tiny",sleep_state="weights_offloaded"}} '
                f"{float(not self.awake)}",
            ]
        for operation, count in self.operations.items():
            name = "vllm:sleep_mode_operation_duration_seconds_count"
            lines.append(f'{name}{{operation="{operation}"}} {count}')
        return web.Response(text="\n".join([*lines, self.more_metrics]) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        own = {"id": self.model, "root": "/models/tiny", "parent": None, "max_model_len": self.max_model_len}
        adapters = [{"id": name, "root": "/adapters", "parent": "tiny"} for name in self.adapters]
        return web.json_response({"object": "list", "data": [own, *adapters]})

    async def _is_paused(self, request: web.Request) -> web.Response:
        if self.paused is None:
            raise web.HTTPNotFound
        paused = self.paused
        await self.pause_answers.wait()
        return web.json_response({"is_paused": paused})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _query(self, request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers, "the engine's API key is not for the bootstrap server"
        if not self.engine_ids:
            raise web.HTTPServiceUnavailable
        return web.json_response(
            {str(rank): {"engine_id": engine_id} for rank, engine_id in enumerate(self.engine_ids)}
        )

    async def _sources(self, request: web.Request) -> web.Response:
        if not self.tells_sources:
            raise web.HTTPNotFound
        # Only rank 0 has sockets here. That suffices to test where the agent looks for the other ranks' events.
        source: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_address or f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self._router_port}" if self.replay_port else None,
            "buffer_steps": 10_000,
            "topic": "",
        }
        return web.json_response({str(rank): source for rank in self.ranks})


@dataclass
class Stream:
    """One Report call as the router received it."""

    hello: pb.Hello
    metadata: dict[str, str]
    kinds: list[str] = field(default_factory=list)
    loads: list[pb.Load] = field(default_factory=list)
    goodbye: str | None = None
    ended: bool = False
    answers: asyncio.Queue[pb.ReportResponse] = field(default_factory=asyncio.Queue)


class FakeRouter(agent_pb2_grpc.AgentServiceServicer):
    """Applies reports by instance id, and records gaps between deltas and false consistency checks in `problems`.

    `options`: gRPC server options in addition to those of a real router.
    """

    def __init__(self, *options: tuple[str, int]) -> None:
        self._options = options
        self.streams: list[Stream] = []
        self.pairs: dict[str, set[tuple[int, int]]] = {}
        self.seqs: dict[str, tuple[str, int]] = {}
        self.consistency_checks = 0
        self.problems: list[str] = []
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.deaf = False
        """Send the welcome, and then read nothing."""
        self.welcoming: asyncio.Event | None = None
        """If not None: the router sends no welcome until it is set."""
        self.kept_open: asyncio.Event | None = None
        """If not None: the router does not end its side of a stream until it is set."""
        self.absent_calls = 0
        """Number of calls of ReportAbsentEngines, which are refused as a router without the method does."""
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start serving; after stop() on the same port."""
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, *self._options])
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def keys(self, instance_id: str) -> set[int] | None:
        """Return the keys known of an instance; None before its snapshot is complete."""
        pairs = self.pairs.get(instance_id)
        return None if pairs is None else {key for _, key in pairs}

    async def Report(self, requests: Any, context: Any) -> AsyncIterator[pb.ReportResponse]:
        first = await anext(requests)
        stream = Stream(first.hello, dict(context.invocation_metadata()))
        self.streams.append(stream)
        if self.refuse is not None:
            await context.abort(*self.refuse)
        name, incarnation = first.hello.instance.instance_id, first.hello.instance.incarnation
        known, seq = self.seqs.get(name, ("", 0))
        resume = known == incarnation and first.hello.oldest_seq <= seq + 1 <= first.hello.latest_seq + 1
        if not resume:
            self.pairs.pop(name, None)
        stream.answers.put_nowait(
            pb.ReportResponse(welcome=pb.Welcome(snapshot=not resume, resume_from_seq=seq + 1, router_id="fake"))
        )
        if self.deaf:
            yield stream.answers.get_nowait()
            await asyncio.Event().wait()
        reading = asyncio.create_task(self._read(requests, stream, name, incarnation))
        try:
            if self.welcoming is not None:
                await self.welcoming.wait()
            while not reading.done():
                answer = asyncio.create_task(stream.answers.get())
                try:
                    await asyncio.wait([answer, reading], return_when=asyncio.FIRST_COMPLETED)
                    if answer.done():
                        yield answer.result()
                finally:
                    answer.cancel()
            await reading
            if self.kept_open is not None:
                await self.kept_open.wait()
        finally:
            reading.cancel()
            stream.ended = True

    async def ReportAbsentEngines(self, request: Any, context: Any) -> pb.ReportAbsentEnginesResponse:
        self.absent_calls += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        raise AssertionError

    async def _read(self, requests: Any, stream: Stream, name: str, incarnation: str) -> None:
        partial: set[tuple[int, int]] = set()
        async for message in requests:
            kind = message.WhichOneof("kind")
            stream.kinds.append(kind)
            if kind == "load":
                stream.loads.append(message.load)
            elif kind == "snapshot_begin":
                partial = set()
                self.pairs.pop(name, None)
            elif kind == "snapshot_chunk":
                partial |= {(message.snapshot_chunk.tier, key) for key in message.snapshot_chunk.keys}
            elif kind == "snapshot_end":
                self.pairs[name] = partial
                self._check(name, message.snapshot_end)
                self.seqs[name] = (incarnation, message.snapshot_end.seq)
            elif kind == "delta":
                first_seq = message.delta.first_seq or message.delta.seq
                if first_seq != self.seqs[name][1] + 1:
                    self.problems.append(f"delta {first_seq} after {self.seqs[name][1]}")
                self.seqs[name] = (incarnation, message.delta.seq)
                if message.delta.cleared:
                    self.pairs[name].clear()
                for change in (message.delta, *message.delta.other_tiers):
                    self.pairs[name] -= {(change.tier, key) for key in change.removed}
                    self.pairs[name] |= {(change.tier, key) for key in change.added}
            elif kind == "consistency_check":
                self._check(name, message.consistency_check)
                self.consistency_checks += 1
            elif kind == "goodbye":
                stream.goodbye = message.goodbye.reason
                self.pairs.pop(name, None)
                self.seqs.pop(name, None)

    def _check(self, name: str, claim: pb.SnapshotEnd | pb.ConsistencyCheck) -> None:
        digest = 0
        for tier, key in self.pairs[name]:
            digest ^= digest_of(tier, [key])
        if (claim.key_count, claim.digest) != (len(self.pairs[name]), digest):
            self.problems.append(f"{claim} does not match {len(self.pairs[name])} keys, digest {digest}")


class RunningAgent:
    """An agent in this process, run by the agent's own `serve`."""

    def __init__(self, engines: list[str], routers: list[str], state_dir: Path, **settings: Any) -> None:
        quick: dict[str, Any] = {"scrape_interval_s": 0.05, "consistency_check_interval_s": 0.1, "metrics_listen": ""}
        self.settings = AgentSettings(engines=engines, routers=routers, state_dir=state_dir, **quick | settings)
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(serve(self.settings, self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await self.task


@asynccontextmanager
async def running(
    engine: str, routers: list[str], state_dir: Path, *, save_interval_s: float = 0.1, **settings: Any
) -> AsyncIterator[RunningAgent]:
    """Run an agent of one engine inside the block; stop the agent in order at the end."""
    agent = RunningAgent([engine], routers, state_dir, save_interval_s=save_interval_s, **settings)
    try:
        yield agent
    finally:
        await agent.stop()
