"""Offloads between two real engines, spoken to directly: what a gateway does, without one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.engines.servers import SERVED_NAME, Engine

# No request may take longer than a sender's death is noticed in, by far.
CLIENT = aiohttp.ClientTimeout(total=300)
OUTPUT = 8

Prompt = str | list[int]


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    # An engine closes a connection that was idle for 5 s: a request sent at that moment would be lost.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=CLIENT, connector=connector) as http:
        yield http


class Refused(Exception):
    """An engine answered with an error."""


async def post(http: aiohttp.ClientSession, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    asked = {"model": SERVED_NAME, "temperature": 0, "ignore_eos": True} | body
    async with http.post(engine.url + "/v1/completions", json=asked) as response:
        answer: dict[str, Any] = await response.json()
    if response.status != 200:
        raise Refused(f"{engine.spec.name}: {response.status} {answer}")
    return answer


async def engine_id(http: aiohttp.ClientSession, engine: Engine) -> str:
    async with http.get(f"http://127.0.0.1:{engine.bootstrap_port}/query") as response:
        return str((await response.json())["0"]["engine_id"])


@dataclass
class Offload:
    """A prompt that `p` computes and `d` answers with `output` tokens. `lead_s`: how much earlier d is asked; negative: later."""

    http: aiohttp.ClientSession
    p: Engine
    d: Engine
    prompt: Prompt
    lead_s: float = 0.02
    output: int = OUTPUT
    transfer_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def prefill(self) -> dict[str, Any]:
        params = {"do_remote_decode": True, "transfer_id": self.transfer_id}
        return await post(self.http, self.p, {"prompt": self.prompt, "max_tokens": 1, "kv_transfer_params": params})

    async def decode(self) -> str:
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": await engine_id(self.http, self.p),
            "remote_bootstrap_addr": f"http://127.0.0.1:{self.p.bootstrap_port}",
            "transfer_id": self.transfer_id,
        }
        answer = await post(
            self.http, self.d, {"prompt": self.prompt, "max_tokens": self.output, "kv_transfer_params": params}
        )
        return str(answer["choices"][0]["text"])

    async def answer(self) -> str:
        """Both, in the wanted order."""
        if self.lead_s < 0:
            await self.prefill()
            return await self.decode()
        text = asyncio.create_task(self.decode())
        await asyncio.sleep(self.lead_s)
        await self.prefill()
        return await text


async def alone(http: aiohttp.ClientSession, engine: Engine, prompt: Prompt) -> str:
    """The answer of an engine that computes all of it itself, past its cache."""
    answer = await post(http, engine, {"prompt": prompt, "max_tokens": OUTPUT, "cache_salt": uuid.uuid4().hex})
    return str(answer["choices"][0]["text"])
