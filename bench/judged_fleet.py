"""What the judges from outside are pointed at: an engine, and a gateway in front of engines, emulated or real."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.stack import process, wait_until_ready
from tests.support.engines.preloaded import preloaded
from tests.support.engines.servers import ENGINE_PYTHON, SERVED_NAME, EngineSpec, make_model, running_engines
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

# `make env-judges`
JUDGES = REPOSITORY / ".venv-judges/bin"
# An event that the gateway logs, or a traceback of whatever else: a fault of its own.
_FAULT = re.compile(r"^Traceback|\[error|\"level\": ?\"error\"|a fault in", re.MULTILINE)


@dataclass(frozen=True)
class Judged:
    """An engine's and a gateway's base URL without a trailing slash, the model that both serve, and the gateway's log."""

    engine: str
    gateway: str
    model: str
    log: Path

    def faults(self) -> list[str]:
        """Return the lines of the gateway's log that tell an error or an unhandled exception."""
        return [line for line in self.log.read_text().splitlines() if _FAULT.search(line)]


@asynccontextmanager
async def gateway(engines: Sequence[str], folder: Path, *flags: str) -> AsyncIterator[tuple[str, Path]]:
    """Run `pointsman up` in front of the engines at these URLs; yield the gateway's URL and the log's file."""
    port, log = free_port(), folder / "up.log"
    words = ["--listen", f"127.0.0.1:{port}", "--console", "", "--state-dir", str(folder)]
    for flag in ("--router-listen", "--router-metrics", "--agent-metrics"):
        words += [flag, f"127.0.0.1:{free_port()}"]
    for url in engines:
        words += ["--engine", url]
    with log.open("wb") as file, process(pointsman_command("up", *words, *flags), stdout=file, stderr=file):
        await wait_until_ready(port)
        yield f"http://127.0.0.1:{port}", log


@asynccontextmanager
async def emulated_engines(count: int, *flags: str) -> AsyncIterator[list[str]]:
    """Run emulated engines; yield their URLs. `flags` are those of `pointsman emulate`."""
    async with AsyncExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        for port in ports:
            command = pointsman_command("emulate", "--port", str(port), "--log-level", "error", *flags)
            stack.enter_context(process(command, stdout=subprocess.DEVNULL))
        for port in ports:
            await wait_until_ready(port)
        yield [f"http://127.0.0.1:{port}" for port in ports]


@asynccontextmanager
async def emulated(count: int, *flags: str) -> AsyncIterator[Judged]:
    """Run `count` fast emulated engines behind a gateway, and one more beside it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fast = ("--speedup", "100", "--model", "m", *flags)
        beside, *behind = await stack.enter_async_context(emulated_engines(count + 1, *fast))
        url, log = await stack.enter_async_context(gateway(behind, folder))
        yield Judged(beside, url, "m", log)


@asynccontextmanager
async def real(*flags: str, max_model_len: int = 4_096, maker: str = "model.py") -> AsyncIterator[Judged]:
    """Run a vLLM CPU engine with a small random model (`make env-engine`), and a gateway in front of it. `flags` are vLLM's,
    `maker` is what makes the model (tests/support/engines)."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    # A random model ends a forced call only if no blanks are allowed.
    limits = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        await asyncio.to_thread(stack.enter_context, preloaded(ENGINE_PYTHON, folder))
        model = await asyncio.to_thread(make_model, folder / "model", maker=maker)
        spec = EngineSpec(
            "judged", max_model_len=max_model_len, fixed_event_ports=False, extra_args=(*tools, *limits, *flags)
        )
        [engine] = await asyncio.to_thread(stack.enter_context, running_engines((spec,), model, folder))
        url, log = await stack.enter_async_context(gateway([engine.target], folder))
        yield Judged(engine.url, url, SERVED_NAME, log)
