"""The engines of the scoreboard: emulated ones, or real vLLM servers on CPU; and what they count themselves."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.rivals.engines import Fleet, address_of
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer
from tests.support.engines.model import vocabulary
from tests.support.engines.servers import ENGINE_PYTHON, SERVED_NAME, EngineSpec, make_model, running_engines
from tests.support.processes.pointsman import flag_words, pointsman_process
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

START_S = 120.0
EMULATED_MODEL = "pointsman-emulated"
# The fleet of docs/findings.md, half as large: contexts up to 200,000 tokens, KV cache for 500,000.
EMULATED = {"kv_blocks": 31_250, "max_model_len": 200_000, "max_num_batched_tokens": 8_192}
# Real engines on CPU: KV cache for 24,000 tokens, some seven sessions.
VLLM_KV_TOKENS, VLLM_CONTEXT, VLLM_BLOCK = 24_576, 4_096, 32


@contextlib.contextmanager
def emulated_fleet(folder: Path, engines: int, speedup: float) -> Iterator[Fleet]:
    """Run emulated engines with empty caches; none is left after the block."""
    ports = [free_port() for _ in range(engines)]
    flags = EMULATED | {"speedup": speedup, "log_level": "warning"}
    parts = [
        pointsman_process(f"engine-{port}", folder, "emulate", *flag_words(flags | {"port": port}), cwd=REPOSITORY)
        for port in ports
    ]
    try:
        for part in parts:
            part.start()
        for part in parts:
            part.wait_ready(lambda log=part.log: "emulated engine" in log.read_text(), within_s=START_S)  # type: ignore[misc]
        yield Fleet(
            [address_of(f"http://127.0.0.1:{port}") for port in ports], EMULATED_MODEL, TOKENIZER_DIR, ChatTokenizer().words,
            16, EMULATED["kv_blocks"], EMULATED["max_model_len"], [part.pid for part in parts],
        )  # fmt: skip
    finally:
        for part in parts:
            if part.alive:
                part.kill()


@contextlib.contextmanager
def vllm_fleet(folder: Path, engines: int) -> Iterator[Fleet]:
    """Run real vLLM servers on CPU with a small random model; none is left after the block. Raises FileNotFoundError without
    .venv-engine."""
    if not ENGINE_PYTHON.exists():
        raise FileNotFoundError(f"{ENGINE_PYTHON}: make env-engine")
    model = make_model(folder / "model")
    # vllm-router has each prompt rendered, which is a part of vLLM's scale-out API. Its development API resets caches.
    specs = [
        EngineSpec(
            f"vllm-{number}", block_size=VLLM_BLOCK, kv_capacity_tokens=VLLM_KV_TOKENS, max_model_len=VLLM_CONTEXT,
            extra_args=("--enable-scale-out",), env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for number in range(engines)
    ]  # fmt: skip
    with running_engines(specs, model, folder) as running:
        yield Fleet(
            [address_of(engine.url) for engine in running], SERVED_NAME, model, [f" {word}" for word in vocabulary()],
            VLLM_BLOCK, VLLM_KV_TOKENS // VLLM_BLOCK, VLLM_CONTEXT, [engine.process.pid for engine in running],
        )  # fmt: skip


def reset_caches(fleet: Fleet) -> None:
    """Empty the engines' prefix caches. Raises OSError if an engine refuses."""
    for engine in fleet.engines:
        request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=30).close()
