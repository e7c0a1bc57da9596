"""A gateway as a process of its own before fake engines, and what its log says."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp


async def gateway_process(environment: dict[str, str], **others: str) -> asyncio.subprocess.Process:
    """A gateway as a process of its own, its log readable from stderr. `environment` are its settings, `others` any variables."""
    variables = {f"POINTSMAN_GATEWAY_{name}": value for name, value in environment.items()}
    code = "import pointsman.gateway.io.main as m; m.run(m.GatewaySettings())"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=os.environ | others | variables, stderr=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def gateway_running(
    environment: dict[str, str], **others: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[bytes]]]:
    """A gateway process, and the lines of its log as they come; told to end after the block, and waited for."""
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


async def told_url(log: list[bytes]) -> str:
    """The address at which the gateway serves, once it says so."""
    while True:
        for line in log:
            if url := json.loads(line).get("url", ""):
                return str(url)
        await asyncio.sleep(0.05)


async def ready(url: str) -> None:
    """Until the gateway calls itself healthy."""
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)
