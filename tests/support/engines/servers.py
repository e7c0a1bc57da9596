"""Real vLLM servers on CPU, and what tests ask them directly, past all of Pointsman."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import zmq

from tests.support.engines.preloaded import LOADING_ENVIRONMENT, launch
from tests.support.http_request import Reply, ask
from tests.support.processes.process import Process, free_port
from tests.support.repository import REPOSITORY

# `make test-next` runs the same tests on another vLLM.
ENGINE_PYTHON = REPOSITORY / os.environ.get("POINTSMAN_TEST_ENGINE_PYTHON", ".venv-engine/bin/python")


@functools.cache
def vllm_names(word: str) -> bool:
    """Whether the engines' vLLM has a flag or a route of this name: older ones lack some."""
    package = next(ENGINE_PYTHON.parent.parent.glob("lib/python*/site-packages/vllm"))
    return any(
        word in file.read_text() for folder in ("engine", "entrypoints") for file in (package / folder).rglob("*.py")
    )


SERVED_NAME = "tiny"
ADAPTER = "tiny-red"  # a LoRA adapter of it
KV_BYTES_PER_TOKEN = (
    4 * 2 * 2 * 64 * 4
)  # layers x (K, V) x KV heads x head_dim x float32, as tests/support/engines/model.py makes it
START_WITHIN_S = 240.0
# Ways to pass KV on. "fail": the engine says at once that the KV did not come, and Pointsman decides what then.
MOONCAKE: Mapping[str, Any] = {
    "kv_connector": "AnyDeviceMooncakeConnector",
    "kv_connector_module_path": "pointsman_connector.mooncake",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}
LAYERWISE: Mapping[str, Any] = {
    **MOONCAKE,
    "kv_connector": "LayerwiseMooncakeConnector",
    "kv_connector_module_path": "pointsman_connector.layerwise.connector",
}
NIXL: Mapping[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
    "kv_buffer_device": "cpu",
}
# How long an engine keeps KV that nobody fetches.
KV_EXPIRES_S = 60

# A name for 16 tokens and all that precedes them.
Piece = bytes


@dataclass(frozen=True)
class Platform:
    """What engines on one kind of device, with one model, are started with."""

    flags: Mapping[str, object]  # with None: a flag without a value
    env: Mapping[str, str]
    kv_bytes_per_token: int


CPU = Platform(
    # bfloat16 attention uses AMX, which dies by SIGILL in some virtual machines.
    {"--dtype": "float32", "--distributed-executor-backend": "uni", "--enforce-eager": None},
    # Without this a CPU engine does not listen to "uni": its worker is a process of its own, which after each step looks for the
    # next one without pause, for a second, at a whole core's cost.
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    KV_BYTES_PER_TOKEN,
)


@dataclass(frozen=True)
class EngineSpec:
    """What one server is started with.

    Unless `fixed_event_ports`, the engine chooses the ports of its KV events, new ones at every start. With `kv_transfer`
    (MOONCAKE, LAYERWISE, NIXL) it can pass KV on and take it.
    """

    name: str
    block_size: int = 32
    kv_capacity_tokens: int = 32_768
    max_model_len: int = 4_096
    fixed_event_ports: bool = True
    extra_args: Sequence[str] = ()
    kv_transfer: Mapping[str, Any] | None = None
    served: str = SERVED_NAME
    model: Path | None = None  # None: the text model
    env: Mapping[str, str] = field(default_factory=dict)
    core: int | None = None  # None: any
    platform: Platform = CPU


@dataclass
class Engine:
    """A vLLM server: its process and plain questions to it. All times in seconds."""

    spec: EngineSpec
    model: Path
    folder: Path
    port: int = field(default_factory=free_port)
    bootstrap_port: int = field(default_factory=free_port)
    process: Process = field(init=False)
    events: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        # An engine without the route that tells its ports must be given some.
        fixed = spec.fixed_event_ports or not vllm_names("kv_event_sources")
        self.events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # "*" makes the engine bind; with port 0 it binds VLLM_HOST_IP.
            "endpoint": f"tcp://*:{free_port() if fixed else 0}",
            "replay_endpoint": f"tcp://*:{free_port() if fixed else 0}",
        }
        flags = {
            "--model": self.model,
            "--served-model-name": spec.served,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--kv-cache-memory-bytes": spec.kv_capacity_tokens * spec.platform.kv_bytes_per_token,
            "--block-size": spec.block_size,
            "--max-model-len": spec.max_model_len,
            "--kv-events-config": json.dumps(self.events),
            **({"--kv-transfer-config": json.dumps(spec.kv_transfer)} if spec.kv_transfer else {}),
            **spec.platform.flags,
        }
        self.process = Process(
            name=f"engine {spec.name}",
            launch=launch,
            argv=[
                *(() if spec.core is None else ("taskset", "--cpu-list", str(spec.core))),
                str(ENGINE_PYTHON),
                "-m",
                "vllm.entrypoints.openai.api_server",
                *(str(part) for flag in flags.items() for part in flag if part is not None),
                "--enable-prompt-tokens-details",
                *spec.extra_args,
            ],
            env={
                "PYTHONPATH": str(REPOSITORY / "connector"),
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port),
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(KV_EXPIRES_S),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.bootstrap_port),
                **LOADING_ENVIRONMENT,
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_ENABLE_RESPONSES_API_STORE": "1",
                **spec.platform.env,
                **spec.env,
            },
            log=self.folder / f"engine-{spec.name}.log",
        )

    @property
    def instance_id(self) -> str:
        """The id that an agent gives it: HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Base address without a trailing slash."""
        return f"http://{self.instance_id}"

    @property
    def target(self) -> str:
        """Its address with what an agent must be told of it."""
        options = []
        if not vllm_names("kv_event_sources"):
            ends = (("events", "endpoint"), ("replay", "replay_endpoint"))
            options += [f"{option}={self.events[end].replace('*', '127.0.0.1')}" for option, end in ends]
        if self.spec.kv_transfer is not None and self.spec.kv_transfer["kv_connector"] == NIXL["kv_connector"]:
            options.append("kv=nixl")
        elif self.spec.kv_transfer is not None:
            options.append(f"kv=mooncake&bootstrap=http://127.0.0.1:{self.bootstrap_port}")
        return f"{self.url}?{'&'.join(options)}".removesuffix("?")

    def start(self) -> None:
        """Start the server; wait_ready() tells when it answers."""
        self.process.start()

    def wait_ready(self) -> None:
        """Wait until /health answers. Raises ProcessFailure with the log's end."""
        self.process.wait_ready(self.healthy, within_s=START_WITHIN_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's core stands still inside the block, while its HTTP server answers: open streams stay open."""
        with core_paused(self.process):
            yield

    def healthy(self) -> bool:
        """Whether GET /health answers 200 now."""
        try:
            return self.ask("/health").status == 200
        except OSError:
            return False

    def ask(self, path: str, body: Any = None) -> Reply:
        """GET, or POST `body` as JSON. OSError when nobody answers."""
        return ask(self.url + path, body)

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """Token ids by the engine's own tokenizer; `body` has prompt or messages."""
        reply = self.ask("/tokenize", {"model": self.spec.served, **body})
        assert reply.status == 200, reply.text
        tokens: list[int] = reply.json()["tokens"]
        return tokens

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`. KeyError when there is none."""
        found = [
            value
            for pairs, value in self._samples(name)
            if all(f'{key}="{wanted}"' in pairs for key, wanted in labels.items())
        ]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    def running(self) -> int:
        """Requests in the engine, running or waiting. KeyError when it does not tell."""
        found = self._samples("vllm:num_requests_running", "vllm:num_requests_waiting")
        if len(found) < 2:
            raise KeyError("vllm:num_requests")
        return int(sum(value for _, value in found))

    def _samples(self, *names: str) -> list[tuple[str, float]]:
        """Labels and values of the metrics of these names. Asked for by their names, which costs an engine a tenth of its whole
        page; what is found on no such page is looked for there."""
        found: list[tuple[str, float]] = []
        for path in ("/metrics/?" + "&".join(f"name[]={quote(name, safe=':')}" for name in names), "/metrics"):
            text = self.ask(path).text
            found = [
                (pairs, float(value))
                for sample, pairs, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
                if sample in names
            ]
            if found:
                break
        return found

    def cached_keys(self) -> int:
        """How many different 16-token pieces of prompt (each with all that precedes it) the prefix cache holds now."""
        return self._cached_keys("0")

    def kv_event_history(self) -> list[dict[str, Any]]:
        """All KV events from the engine's start on."""
        return _replay(self._replay_endpoint("0").replace("*", "127.0.0.1"))

    def _cached_keys(self, rank: str) -> int:
        return len(held_pieces(self._replay_endpoint(rank)))

    def _replay_endpoint(self, rank: str) -> str:
        if not vllm_names("kv_event_sources"):
            return str(self.events["replay_endpoint"])
        return str(self.ask("/kv_event_sources").json()[rank]["replay_endpoint"])


class Rank(Engine):
    """One data-parallel rank of a server, as the control plane sees it. Address, process and log are the server's."""

    def __init__(self, server: Engine, rank: int) -> None:
        vars(self).update(vars(server))
        self.rank = rank

    @property
    def url(self) -> str:
        """Base address without a trailing slash."""
        return f"http://{super().instance_id}"

    @property
    def instance_id(self) -> str:
        """The id that an agent gives it: HOST:PORT/RANK."""
        return f"{super().instance_id}/{self.rank}"

    def cached_keys(self) -> int:
        """How many different 16-token pieces of prompt the prefix cache of this rank holds now."""
        return self._cached_keys(str(self.rank))

    def tokens(self) -> int:
        """Prompt and generated tokens of this rank so far."""
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return int(sum(self.metric(name, engine=str(self.rank)) for name in names))


@contextmanager
def core_paused(server: Process) -> Iterator[None]:
    """The cores of an engine's HTTP server stand still inside the block."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert children, "the HTTP server has no engine process"
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            os.kill(int(child), signal.SIGCONT)


def held_pieces(replay_endpoint: str) -> set[Piece]:
    """The 16-token pieces of prompt that the prefix cache of an engine holds now.

    Taken from the engine's whole event history, without Pointsman's keys: the tests' oracle for what agents should know.
    Blocks that differ only in their second half share the pieces of their first. AssertionError when the engine has forgotten
    the beginning of its history.
    """
    held: Counter[int] = Counter()
    pieces: dict[int, list[Piece]] = {}
    for event in _replay(replay_endpoint.replace("*", "127.0.0.1")):
        match event["type"]:
            case "BlockStored":
                held.update(event["block_hashes"])
                _cut(event, pieces)
            case "BlockRemoved":
                held.subtract(event["block_hashes"])
            case "AllBlocksCleared":
                held.clear()
            case other:
                raise AssertionError(f"unknown KV event {other}")
    return {piece for block, count in held.items() if count > 0 for piece in pieces[block]}


def pieces_of(tokens: Sequence[int]) -> list[Piece]:
    """The whole pieces of a prompt that is nothing but its tokens."""
    found: list[Piece] = []
    for start in range(0, len(tokens) - 15, 16):
        found.append(_piece(found[-1] if found else b"", None, tokens[start : start + 16]))
    return found


def make_model(folder: Path, *more: Path, maker: str = "model.py") -> Path:
    """Have the engine's Python write a model into `folder`, which is returned; `more` are further arguments of the maker."""
    argv = [ENGINE_PYTHON, Path(__file__).with_name(maker), folder, *more]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return folder


@contextmanager
def running_engines(specs: Sequence[EngineSpec], model: Path, folder: Path) -> Iterator[list[Engine]]:
    """Servers, started side by side, all ready. None is left after the block, nor when one does not start."""
    engines = [Engine(spec, spec.model or model, folder) for spec in specs]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            if engine.process.alive:
                engine.process.kill()


def _cut(event: dict[str, Any], pieces: dict[int, list[Piece]]) -> None:
    """Add the pieces of a BlockStored event's blocks to `pieces`, by block hash."""
    size = event["block_size"]
    parent = event["parent_block_hash"]
    before = pieces[parent][-1] if parent is not None else b""
    for index, block in enumerate(event["block_hashes"]):
        extra = event["extra_keys"][index] if event.get("extra_keys") else None
        pieces[block] = []
        for start in range(index * size, (index + 1) * size, 16):
            before = _piece(before, extra, event["token_ids"][start : start + 16])
            pieces[block].append(before)


def _piece(before: Piece, extra: Any, tokens: Sequence[int]) -> Piece:
    return hashlib.sha256(repr((before, extra, list(tokens))).encode()).digest()


def _as_map(event: Any) -> dict[str, Any]:
    """An event as a map: vLLM up to 0.23 sends arrays."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    stored = (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    )
    return {
        "type": kind,
        **dict(zip(stored if kind == "BlockStored" else ("block_hashes", "medium"), values, strict=False)),
    }


def _replay(endpoint: str) -> list[dict[str, Any]]:
    """All KV events from the engine's start on. The publisher looks at its replay socket ten times a second, and drops what it
    cannot send at once, so what is missing is asked for again."""
    events: list[dict[str, Any]] = []
    expected = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvhwm = 0
        socket.connect(endpoint)
        for _ in range(10):
            complete = True
            socket.send_multipart([b"", expected.to_bytes(8, "big")])
            while socket.poll(6_000):
                *_, sequence, payload = socket.recv_multipart()
                if sequence == b"\xff" * 8:
                    if complete:
                        return events
                    break
                if complete := int.from_bytes(sequence, "big") == expected:
                    expected += 1
                    events += map(_as_map, msgspec.msgpack.decode(payload)[1])
    raise AssertionError(f"{endpoint}: the engine forgot a part of its history, or does not tell it")
