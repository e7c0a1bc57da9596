"""Writes docs/guidellm.md: what GuideLLM, an outside load client, measures of engines with and without the gateway.

`python -m bench.guidellm [REQUESTS]` (needs `make env-guidellm` and Debian's nginx; by default 240 requests of each run).
Exits with status 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench import stack
from bench.judged_fleet import emulated_engines, gateway
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from tests.support.repository import REPOSITORY

PAGE = Path("docs/guidellm.md")
PROGRAM = REPOSITORY / ".venv-guidellm/bin/guidellm"
MODEL = "m"
ENGINES = 4
KV_BLOCKS = 4_000  # of each engine, of 16 tokens: less than the conversations that are open at once have
SPEED = 0.25  # of the modelled engines, so that they and not this machine's cores take the time
STREAMS = 24
DATA = {"prompt_tokens": 400, "output_tokens": 30, "turns": 6, "prefix_tokens": 1_000, "prefix_count": 6}
# Without it all conversations of an engine come to send their turns at one moment.
SPREAD = {"prompt_tokens_stdev": 200, "prompt_tokens_min": 50, "output_tokens_stdev": 20, "output_tokens_min": 4}
WITHIN_S = 600.0
# Name, what is sent to, and how many engines.
WAYS = (
    ("one engine", "engine", 1),
    ("one engine, gateway", "gateway", 1),
    (f"{ENGINES} engines, nginx's round robin", "nginx", ENGINES),
    (f"{ENGINES} engines, gateway", "gateway", ENGINES),
)
INTRO = """# GuideLLM with and without the gateway

Written by `python -m bench.guidellm`; not by hand.

GuideLLM {version} sends conversations of {turns} turns, {streams} at once, over chat completions: {prefix_count} system
prompts of {prefix_tokens} tokens, {prompt_tokens} new tokens a turn on average, answers of {output_tokens} tokens on
average. Lengths are drawn, since conversations of equal length come into step at any one engine, with or without a gateway.
GuideLLM tells no session; the gateway knows one by its prompt. The engines are **emulated**, at a quarter of the
modelled speed, with {kv:,} tokens of KV cache each, and share two cores with sender and gateway, so only rows with the same
number of engines compare. No GPU was used.

| | requests | failed | requests/s | TTFT, ms: mean | median | p95 | between tokens, ms: median | whole answer, s: median | p95 |
|---|---|---|---|---|---|---|---|---|---|
"""


@asynccontextmanager
async def target(kind: str, count: int, folder: Path) -> AsyncIterator[str]:
    """Run `count` emulated engines and what is before them; yield the URL."""
    async with AsyncExitStack() as running:
        engines = await running.enter_async_context(
            emulated_engines(
                count,
                *("--model", MODEL, "--speedup", str(SPEED)),
                *("--kv-blocks", str(KV_BLOCKS), "--max-model-len", str(KV_BLOCKS * 16)),
            )
        )
        if kind == "engine":
            [url] = engines
        elif kind == "nginx":
            servers = [stack.ServerProcess(int(url.rpartition(":")[2]), ()) for url in engines]
            url = f"http://127.0.0.1:{(await running.enter_async_context(stack.nginx(servers))).port}"
        else:
            url, _ = await running.enter_async_context(gateway(engines, folder))
        yield url


async def measured(url: str, requests: int, folder: Path) -> dict[str, Any]:
    """Run GuideLLM; return the metrics of its report. Raises RuntimeError if it fails."""
    tokenizer, report = folder / "tokenizer", folder / "report.json"
    if not tokenizer.exists():
        shutil.copytree(TOKENIZER_DIR, tokenizer)
        (tokenizer / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # it loads no tokenizer without one
    flags: dict[str, dict[str, object]] = {
        "--backend": {"kind": "openai_http", "target": url, "model": MODEL, "request_format": "/v1/chat/completions"},
        "--profile": {"kind": "concurrent", "streams": STREAMS},
        "--constraint": {"kind": "max_requests", "count": requests},
        "--tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "--data": {"kind": "synthetic_text", **DATA, **SPREAD},
        "--seed": {"kind": "static", "value": 1},
        "--output": {"kind": "json", "path": report},
    }
    words = [part for flag, fields in flags.items() for part in (flag, _fields(fields))]
    child = await asyncio.create_subprocess_exec(
        str(PROGRAM), "run", *words, "--disable-console", env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    async with asyncio.timeout(WITHIN_S):
        if await child.wait():
            raise RuntimeError("GuideLLM failed")
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def _fields(fields: Mapping[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


def row(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the table's row of a run."""
    total = metrics["request_totals"]
    ttft, between, whole, pace = (
        metrics[key]["successful"]
        for key in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "requests_per_second")
    )
    cells = [
        name,
        total["successful"],
        total["errored"] + total["incomplete"],
        f"{pace['mean']:.1f}",
        f"{ttft['mean']:.0f}",
        f"{ttft['median']:.0f}",
        f"{ttft['percentiles']['p95']:.0f}",
        f"{between['median']:.1f}",
        f"{whole['median']:.2f}",
        f"{whole['percentiles']['p95']:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


async def judged(requests: int) -> list[tuple[str, dict[str, Any]]]:
    """Return each way's name and metrics."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, kind, count in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            async with target(kind, count, Path(folder)) as url:
                found.append((name, await measured(url, requests, Path(folder))))
        print(row(*found[-1]), end="", file=sys.stderr)
    return found


def page(found: Sequence[tuple[str, Mapping[str, Any]]], version: str) -> str:
    """Return the page's text."""
    intro = INTRO.format(version=version, streams=STREAMS, kv=KV_BLOCKS * 16, **DATA)
    return intro + "".join(row(*each) for each in found)


def main(requests: int = 240) -> int:
    """Run, write the page, and return the process's exit status."""
    found = asyncio.run(judged(requests))
    [metadata] = PROGRAM.parent.parent.glob("lib/python*/site-packages/guidellm-*.dist-info")
    PAGE.write_text(page(found, metadata.name.removeprefix("guidellm-").removesuffix(".dist-info")))
    print(PAGE.read_text())
    return int(any(metrics["request_totals"]["errored"] for _, metrics in found))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
