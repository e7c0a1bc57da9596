"""Clients that read large non-streamed answers slowly, over real sockets: a client that reads steadily gets the whole answer, any
other one is disconnected, and the memory held for all of them is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.support.certificates import Authority
from tests.support.fakes.gateway_peers import FakeEngine, Stack, stack
from tests.support.gateway_requests import CHAT
from tests.support.processes.gateway import gateway_running, logged_url


class Bulky(FakeEngine):
    """Answers a request with `bulk` with that many bytes more; other requests as usual."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "bulk" not in body:
            return await super().generate(request)
        self.requests.append((request.path, body, dict(request.headers)))
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        return web.json_response({"choices": [], "usage": usage, "pad": "x" * body["bulk"]})


@asynccontextmanager
async def gateway(folder: Path, *, tls: bool = False, **settings: object) -> AsyncIterator[tuple[str, Stack]]:
    """A gateway process, which runs on uvloop as in production, and the fakes behind it."""
    async with stack(folder, engines=1, engine=Bulky) as up:
        given = {name.upper(): str(value) for name, value in settings.items()}
        given |= {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}
        if tls:
            signed = Authority(folder / "authority").sign("gateway")
            given |= {"TLS_CERT": str(signed.cert), "TLS_KEY": str(signed.key)}
        async with gateway_running(given) as (_, log):
            url = await logged_url(log)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as http:
                while True:
                    async with http.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.05)
            yield url, up
            assert not [line for line in log if b"Traceback" in line or b'"error"' in line]


async def asked(url: str, bulk: int, *fields: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with a small receive buffer and request a large answer on it."""
    body = json.dumps(CHAT | {"bulk": bulk})
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: h", "Content-Type: application/json", *fields]
    head.append(f"Content-Length: {len(body)}")
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", int(url.rpartition(":")[2])))
    context = ssl._create_unverified_context() if url.startswith("https") else None
    reader, writer = await asyncio.open_connection(
        sock=own, ssl=context, server_hostname="localhost" if context else None, limit=16 << 10
    )
    writer.write(("\r\n".join(head) + "\r\n\r\n" + body).encode())
    return reader, writer


async def read_slowly(reader: asyncio.StreamReader, pause_s: float, piece: int) -> int:
    """Bytes that came until the connection ended."""
    got = 0
    try:
        while taken := await reader.read(piece):
            got += len(taken)
            if got // piece != (got - len(taken)) // piece:
                await asyncio.sleep(pause_s)
    except (ConnectionError, ssl.SSLError):
        pass
    return got


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_who_reads_slowly_but_steadily_gets_all(tmp_path: Path, tls: bool) -> None:
    """Bytes that TLS has encrypted count as unsent. When they did not, they were cut off 2 s after the answer was made."""
    async with gateway(tmp_path, tls=tls) as (url, _):
        reader, writer = await asked(url, 24 << 20, "Connection: close")
        assert await read_slowly(reader, 0.04, 200_000) > 24 << 20
        writer.transport.abort()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_who_takes_only_a_little_now_and_then_is_given_up(tmp_path: Path, tls: bool) -> None:
    async with gateway(tmp_path, tls=tls, idle_timeout_s=1.0, min_read_bytes_per_s=4_000_000) as (url, _):
        reader, writer = await asked(url, 24 << 20)
        assert await read_slowly(reader, 0.25, 250_000) < 16 << 20
        writer.transport.abort()


async def test_whole_answers_have_a_budget_together(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_buffered_answer_bytes=12 << 20) as (url, up):
        reader, writer = await asked(url, 8 << 20, "Connection: close")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with aiohttp.ClientSession() as http:
            path = f"{url}/v1/chat/completions"
            async with http.post(path, json=CHAT | {"bulk": 8 << 20}) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                assert (await refused.json())["error"]["code"] == "no_room"
            async with http.post(path, json=CHAT) as small:
                assert small.status == 200
            async with http.post(path, json=CHAT | {"stream": True}) as streamed:
                assert (await streamed.read()).endswith(b"[DONE]\n\n")
            assert await read_slowly(reader, 0.0, 1 << 20) > 8 << 20
            async with http.post(path, json=CHAT | {"bulk": 8 << 20}) as again:
                assert len(await again.read()) > 8 << 20
        await up.router.until(lambda: len(up.router.finished) == 5)
        assert not up.router.reserved
        writer.transport.abort()


async def test_one_clients_whole_answers_leave_room_for_those_of_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red:k1\nblue:k2\n")
    async with gateway(tmp_path, max_buffered_answer_bytes=20 << 20, api_keys_file=keys) as (url, _):
        reader, writer = await asked(url, 8 << 20, "Authorization: Bearer k1")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with aiohttp.ClientSession() as http:
            for key, status in (("k1", 503), ("k2", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(
                    f"{url}/v1/chat/completions", json=CHAT | {"bulk": 8 << 20}, headers=headers
                ) as answer:
                    assert answer.status == status, key
                    await answer.read()
        writer.transport.abort()
