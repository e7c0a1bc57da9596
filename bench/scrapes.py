"""The longest turn of a gateway's event loop while its /metrics is read: `python -m bench scrapes`.

As a program (`python -m bench.scrapes FOLDER NUMBER`) it is one of several gateway processes, whose metrics have many tenants.
The processes have no router and no engines, so nothing but the page takes time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import uvloop

from bench.figures import Figure
from bench.timed_service import TurnTimer
from pointsman_common.io.logs import configure_logs
from pointsman_gateway.core.request_usage import RequestUsage
from pointsman_gateway.io import main
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman_gateway.io.settings import GatewaySettings

TENANTS, PROCESSES, PAGES, SCRAPERS = 10_000, 4, 3, 8
GOAL_MS = 10.0


async def scrapes() -> list[Figure]:
    """Return scrape_turn_ms of the process that is asked, and scrape_sibling_turn_ms, the longest of the others."""
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as running:
            processes = [await running.enter_async_context(_process(folder, number)) for number in range(PROCESSES)]
            async with aiohttp.ClientSession() as http:
                urls = [await _line(process, "http") for process in processes]
                for process in processes:
                    await _turn(process)
                size = max(await asyncio.gather(*(_read(http, f"{urls[0]}/metrics") for _ in range(SCRAPERS))))
            turns = [await _turn(process) for process in processes]
    note = f"{PROCESSES} processes, {TENANTS:,} tenants, {SCRAPERS} clients that read a page of {size / 1e6:.1f} MB {PAGES} times"
    return [
        Figure("scrape_turn_ms", turns[0], "ms", GOAL_MS, f"CPU of the longest turn, {note}; baseline is the goal"),
        Figure("scrape_sibling_turn_ms", max(turns[1:]), "ms", GOAL_MS, "the same in the processes that tell theirs"),
    ]


@contextlib.asynccontextmanager
async def _process(folder: str, number: int) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.scrapes", folder, str(number)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        await child.wait()


async def _line(child: asyncio.subprocess.Process, begin: str) -> str:
    """Return the next line that begins so; lines of the log are printed."""
    assert child.stdout is not None
    async with asyncio.timeout(60.0):
        while line := (await child.stdout.readline()).decode().strip():
            if line.startswith(begin):
                return line
            print(line)
    raise EOFError("a gateway process has ended")


async def _turn(child: asyncio.subprocess.Process) -> float:
    """Return the longest turn since the last call, in ms."""
    child.send_signal(signal.SIGUSR1)
    return float(json.loads(await _line(child, '{"cpu_ms"'))["cpu_ms"])


async def _read(http: aiohttp.ClientSession, url: str) -> int:
    for _ in range(PAGES):
        async with http.get(url) as answer:
            page = await answer.read()
            assert answer.status == 200
    return len(page)


async def _serve(folder: Path, number: int) -> None:
    settings = GatewaySettings(listen="127.0.0.1:0", gateway_id=f"g-{number}", routers=["127.0.0.1:1"])
    async with main.serving(settings, SiblingProcesses(folder, number, PROCESSES)) as (gateway, url):
        gateway.telemetry.keep_models(["m"])
        usage = RequestUsage(prompt_tokens=1, cached_tokens=1, completion_tokens=1)
        for tenant in range(TENANTS):
            gateway.telemetry.used(f"tenant-{tenant}", "m", usage)
        # As main.serve() does.
        sys.setswitchinterval(main.SWITCH_S)
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        TurnTimer(Path("/dev/stdout")).start()
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    configure_logs("gateway", "error")
    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
