"""Processes for the benchmarks: mock engines, router, gateway, other routers and load client; their CPU time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from bench.rivals.contenders import DYNAMO, contenders
from bench.rivals.engines import EngineAddress, Fleet
from bench.rivals.environments import environment
from bench.rivals.running import running_router
from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from pointsman_common.io.channel import open_channel
from tests.support.http_request import serves
from tests.support.processes.envoy import EnvoySettings, command, configuration, is_ready
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import free_port
from tests.support.router import Client, Report
from tests.support.waiting import eventually, until

MODEL = "m"  # also the model of Report's instances
DYNAMO_BLOCK_SIZE, DYNAMO_CONTEXT = 16, 131_072
# Tokens of KV that a mock engine is said to hold: enough for the prompts of all benchmarks.
KV_TOKENS = 4_000_000
READY_WITHIN_S = 60.0


def cpu_s(*pids: int) -> float:
    """Return the CPU time of the processes' live threads in s, at the scheduler's resolution (/proc/PID/task/*/schedstat)."""
    return (
        sum(int(file.read_text().split()[0]) for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        / 1e9
    )


def _children(pid: int) -> tuple[int, ...]:
    return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    file.parent.chmod(0o755)  # nginx's worker runs as another user
    return str(file)


def rss_mb(pid: int) -> float:
    """Return a process's resident memory in MB (10^6 bytes)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass
class ServerProcess:
    """A server that listens on `port`. `pids`: the processes whose CPU time and memory are measured."""

    port: int
    pids: tuple[int, ...]


@contextlib.contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process inside the block; end it afterwards."""
    child = subprocess.Popen(command, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def wait_until_ready(port: int, path: str = "/health") -> None:
    """Wait until `path` is answered with 200. Raises AssertionError after READY_WITHIN_S."""
    url = f"http://127.0.0.1:{port}"
    await asyncio.to_thread(until, lambda: serves(url, path), within_s=READY_WITHIN_S, what=f"{url}{path}")


@contextlib.asynccontextmanager
async def engine(interval_ms: float, model: str = "", *flags: str) -> AsyncIterator[ServerProcess]:
    """Run a mock engine."""
    port = free_port()
    program = [sys.executable, "-m", "bench.mock_engine", "--port", str(port), "--interval-ms", str(interval_ms)]
    with process([*program, "--model", model, *flags], stdout=subprocess.DEVNULL) as child:
        await wait_until_ready(port, "/v1/models")
        yield ServerProcess(port, (child.pid,))


async def load(port: int, may_fail: bool = False, /, **flags: object) -> dict[str, Any]:
    """Run the load client to its end; return its results. Raises RuntimeError if a request failed, unless `may_fail`."""
    given = [part for name, value in flags.items() for part in (f"--{name}", *([] if value is True else [str(value)]))]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load_client", "--port", str(port), *given, stdout=subprocess.PIPE
    )
    out, _ = await child.communicate()
    counts: dict[str, Any] = json.loads(out)
    if counts["failed"] and not may_fail:
        raise RuntimeError(f"{counts['failed']} requests failed: {counts['failures']}")
    return counts


def allow_files(count: int) -> None:
    """Raise the limit of open files to `count` for this process and its children. Raises RuntimeError if that is not
    permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    if hard < count:
        raise RuntimeError(f"{count} open files are needed, {hard} are allowed (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@contextlib.asynccontextmanager
async def open_streams(port: int, streams: int, prompt: int = 1000, group: int = 100) -> AsyncIterator[None]:
    """Keep `streams` streams open inside the block, after all have begun. Prompts have about `prompt` bytes; `group` open at
    once."""
    flags = ["--connections", str(streams), "--requests", str(streams), "--chunks", "1000000", "--hold"]
    flags += ["--prompt", str(prompt), "--seed", str(streams), "--group", str(group)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load_client", "--port", str(port), *flags, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(5 * READY_WITHIN_S):
            line = await child.stdout.readline()
        if line.strip() != b"held":
            raise RuntimeError("the streams did not begin")
        yield
    finally:
        child.kill()
        await child.wait()


async def _keep_reporting(reports: list[Report]) -> None:
    while True:
        for report in reports:
            await report.send(load=agent_pb2.Load(healthy=True))
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def router(*flags: str) -> AsyncIterator[tuple[str, ServerProcess]]:
    """Run a router; yield its address and process when it answers."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = pointsman_command("router", "--listen", address, "--metrics-listen", "", "--log-level", "error", *flags)
    with process(command) as child:
        async with open_channel(address) as channel:
            await _answers(channel)
        yield address, ServerProcess(port, (child.pid,))


async def _answers(channel: grpc.aio.Channel) -> None:
    """Wait until a router answers. Raises TimeoutError after READY_WITHIN_S."""
    # grpc-stubs types the synchronous calls only.
    stub: Any = placement_pb2_grpc.PlacementServiceStub(channel)
    none = placement_pb2.Finished(request_id="none", outcome=placement_pb2.OUTCOME_CANCELLED)
    nothing = placement_pb2.FinishRequest(finished=none)
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Finish(nothing, timeout=1)
                return
            await asyncio.sleep(0.05)


async def longest_turn(pid: int, turns_file: Path) -> dict[str, float]:
    """Return the longest turn of a timed service's event loop since the last call: `cpu_ms`, `clock_ms`; and its `rss_mb`."""
    lines = partial(_lines, turns_file)
    before = len(lines())
    os.kill(pid, signal.SIGUSR1)
    await eventually(lambda: len(lines()) > before, "the service tells its turns", READY_WITHIN_S)
    turn: dict[str, float] = json.loads(lines()[-1])
    return turn


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@contextlib.asynccontextmanager
async def pointsman(
    engines: list[ServerProcess], model: str, *flags: str, max_model_len: int = 0, turns_file: Path | None = None
) -> AsyncIterator[tuple[ServerProcess, ServerProcess]]:
    """Run a router and a gateway with exact tokens before `engines`; yield gateway and router.

    `max_model_len` is reported for the engines (0: not reported). `turns_file`: for longest_turn() of the gateway.
    """
    async with (
        router() as (router_at, placing),
        _reported(engines, router_at, model, max_model_len),
        gateway(router_at, *flags, turns_file=turns_file) as served,
    ):
        yield served, placing


@contextlib.asynccontextmanager
async def gateway(router_at: str, *flags: str, turns_file: Path | None = None) -> AsyncIterator[ServerProcess]:
    """Run a gateway of a router that knows engines. `turns_file`: for longest_turn()."""
    port = free_port()
    words = ["gateway", "--listen", f"127.0.0.1:{port}", "--routers", router_at, *flags]
    command = pointsman_command(*words)
    if turns_file is not None:
        command = [sys.executable, "-m", "bench.timed_service", str(turns_file), *words]
    with process([*command, "--log-level", "error"]) as child:
        await wait_until_ready(port)
        yield ServerProcess(port, (child.pid,))


@contextlib.asynccontextmanager
async def one_process(engines: list[ServerProcess], model: str) -> AsyncIterator[ServerProcess]:
    """Run a router and a gateway in one process before `engines`; yield it."""
    port, router_at = free_port(), f"127.0.0.1:{free_port()}"
    environment = {
        "POINTSMAN_GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "POINTSMAN_ROUTER_LISTEN": router_at,
        "POINTSMAN_ROUTER_METRICS_LISTEN": "",
    }
    with process(pointsman_command("serve", "--log-level", "error"), env=os.environ | environment) as child:
        async with _reported(engines, router_at, model, 0):
            await wait_until_ready(port)
            yield ServerProcess(port, (child.pid,))


@contextlib.asynccontextmanager
async def _reported(
    engines: list[ServerProcess], router_at: str, model: str, max_model_len: int
) -> AsyncIterator[None]:
    """Report `engines` to the router inside the block, as their agents would."""
    async with open_channel(router_at) as channel:
        await _answers(channel)
        client = Client(channel)
        reports = [Report(client) for _ in engines]
        for engine, report in zip(engines, reports, strict=True):
            url = f"http://127.0.0.1:{engine.port}"
            limits: dict[str, Any] = {"max_model_len": max_model_len, "kv_capacity_tokens": KV_TOKENS}
            await report.join(f"i{engine.port}", url=url, model_root=model, **limits)
        reporting = asyncio.create_task(_keep_reporting(reports))
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            for report in reports:
                report.call.cancel()


_NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder}; client_max_body_size 32m; client_body_buffer_size 1m;
  upstream engines {{ {servers} keepalive 2048; }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextlib.asynccontextmanager
async def nginx(engines: list[ServerProcess]) -> AsyncIterator[ServerProcess]:
    """Run nginx with one worker, unbuffered. Raises FileNotFoundError if Debian's nginx is not installed."""
    executable = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if executable is None:
        raise FileNotFoundError("the benchmark needs nginx: apt-get install nginx")
    port = free_port()
    servers = "".join(f"server 127.0.0.1:{engine.port};" for engine in engines)
    with tempfile.TemporaryDirectory() as folder:
        config = _written(Path(folder) / "nginx.conf", _NGINX.format(folder=folder, servers=servers, port=port))
        with process([executable, "-c", config, "-e", f"{folder}/error.log"]) as child:
            await wait_until_ready(port, "/v1/models")
            yield ServerProcess(port, _children(child.pid))


@contextlib.asynccontextmanager
async def envoy(engines: list[ServerProcess], *pickers: int) -> AsyncIterator[ServerProcess]:
    """Run an Envoy with one worker, which asks the pickers at these ports. `make env-envoy` installs it."""
    port, admin = free_port(), free_port()
    settings = EnvoySettings([f"127.0.0.1:{engine.port}" for engine in engines], pickers)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(_written(Path(folder) / "envoy.json", json.dumps(configuration(settings, port, admin))))
        with process(command(config), stderr=subprocess.DEVNULL) as child:
            ready = partial(is_ready, settings, f"http://127.0.0.1:{admin}")
            await asyncio.to_thread(until, ready, within_s=READY_WITHIN_S, what="Envoy and its pickers")
            yield ServerProcess(port, (child.pid,))


@contextlib.asynccontextmanager
async def vllm_router(engines: list[ServerProcess], policy: str = "round_robin") -> AsyncIterator[ServerProcess]:
    """Run the Rust vllm-router, installed on first use. Raises NotRunnable if it cannot be installed."""
    executable = await asyncio.to_thread(environment, "vllm-router") / "vllm-router"
    async with _rust_router([str(executable)], engines, policy, "error") as running:
        yield running


@contextlib.asynccontextmanager
async def smg(engines: list[ServerProcess], policy: str) -> AsyncIterator[ServerProcess]:
    """Run SMG, which routes by a prompt's text, installed on first use. Raises NotRunnable if it cannot be installed."""
    executable = await asyncio.to_thread(environment, "smg") / "smg"
    command = [str(executable), "launch", "--disable-tokenizer-autoload"]
    async with _rust_router(command, engines, policy, "error") as running:
        yield running


@contextlib.asynccontextmanager
async def dynamo(engines: list[ServerProcess], model: str) -> AsyncIterator[ServerProcess]:
    """Run Dynamo's front end with its KV router, and an adapter for each engine; yield the front end. It is installed on first
    use. Raises NotRunnable if it cannot be."""
    addresses = [
        EngineAddress(f"http://127.0.0.1:{engine.port}", *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))
        for engine in engines
    ]
    fleet = Fleet(addresses, MODEL, Path(model), (), DYNAMO_BLOCK_SIZE, 0, DYNAMO_CONTEXT, ())
    [contender] = [contender for contender in contenders() if contender.name.startswith(DYNAMO)]
    with tempfile.TemporaryDirectory() as folder:
        running = running_router(contender, fleet, Path(folder))
        router = await asyncio.to_thread(running.__enter__)
        try:
            pids = [pid for name, found in router.processes().items() if name == "front end" for pid in found]
            yield ServerProcess(int(router.url.rpartition(":")[2]), tuple(pids))
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


@contextlib.asynccontextmanager
async def sglang_router(engines: list[ServerProcess], policy: str) -> AsyncIterator[ServerProcess]:
    """Run sglang-router, installed on first use. Raises NotRunnable if it cannot be installed."""
    python = await asyncio.to_thread(environment, "sglang-router") / "python"
    async with _rust_router([str(python), "-m", "sglang_router.launch_router"], engines, policy, "error") as running:
        yield running


@contextlib.asynccontextmanager
async def _rust_router(
    command: list[str], engines: list[ServerProcess], policy: str, log_level: str
) -> AsyncIterator[ServerProcess]:
    port = free_port()
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", log_level]
    metrics = ["--prometheus-port", str(free_port())]
    with process([*command, "--worker-urls", *urls, *flags, *metrics], stdout=subprocess.DEVNULL) as child:
        await wait_until_ready(port, "/v1/models")
        yield ServerProcess(port, (child.pid,))
