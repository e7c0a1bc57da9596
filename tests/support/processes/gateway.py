"""Runs a gateway as a separate process in front of fake engines, and reads its log."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp


async def gateway_process(environment: dict[str, str], **others: str) -> asyncio.subprocess.Process:
    """Start a gateway process whose log is read from stderr. `environment`: its settings. `others`: other variables."""
    variables = {f"POINTSMAN_GATEWAY_{name}": value for name, value in environment.items()}
    code = "import pointsman_gateway.io.main as m; m.run(m.GatewaySettings())"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=os.environ | others | variables, stderr=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def gateway_running(
    environment: dict[str, str], **others: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[bytes]]]:
    """Run a gateway process inside the block; yield it and a list that receives the lines of its log."""
    process = await gateway_process(environment, **others)
    log: list[bytes] = []

    async def read() -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            log.append(line)

    reading = asyncio.create_task(read())
    try:
        yield process, log
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading


async def logged_url(log: list[bytes]) -> str:
    """Wait until the gateway logs the address at which it serves; return the address."""
    while True:
        for line in log:
            if url := json.loads(line).get("url", ""):
                return str(url)
        await asyncio.sleep(0.05)


async def ready(url: str) -> None:
    """Wait until the gateway reports itself healthy."""
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)
