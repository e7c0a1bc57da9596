"""The agent's HTTP client: the forms of an answer's body, and answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pointsman_agent.io.http_get import get


@asynccontextmanager
async def answering(*answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve one answer, in these parts; yield a URL and the requests that were received. The connection stays open until the
    client closes it, unless the last part is empty."""
    requests: list[bytes] = []
    ended: list[None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"".join(answer[:1]))
        for part in answer[1:]:
            await writer.drain()
            writer.write(part)
        if answer[-1]:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.append(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}", requests
        while len(ended) < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


BODIES = {
    "a length": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", b"llo"],
    "chunks": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r", b"\nllo\r\n0\r\n\r\n"],
    "an end": [b"HTTP/1.0 200\r\n\r\nhe", b"llo", b""],
    "an interim answer": [b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:5\r\n\r\nhello"],
}


@pytest.mark.parametrize("parts", BODIES.values(), ids=BODIES)
async def test_a_body_is_read_whole(parts: list[bytes]) -> None:
    async with answering(*parts) as (url, requests), get(f"{url}/a?b=c", 20.0, {"X-Key": "k"}) as answer:
        assert (answer.status, await answer.body()) == (200, b"hello")
    [request] = requests
    lines = request.decode().split("\r\n")
    assert lines[0] == "GET /a?b=c HTTP/1.1"
    assert {f"Host: {url.removeprefix('http://')}", "Connection: close", "X-Key: k"} <= set(lines)


WRONG = {
    "no HTTP": [b"SSH-2.0-OpenSSH_9.2\r\n\r\n"],
    "no status": [b"HTTP/1.1 ok\r\n\r\n"],
    "a cut head": [b"HTTP/1.1 200 OK\r\n", b""],
    "a cut body": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", b""],
    "a cut chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", b""],
    "a chunk of no length": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n"],
    "an endless head": [b"HTTP/1.1 200 OK\r\n" + b"x" * 200_000],
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
async def test_an_answer_that_is_not_whole_raises(parts: list[bytes]) -> None:
    async with answering(*parts) as (url, _):
        with pytest.raises(ValueError, match=r"answer is not|invalid literal|negative|less than zero"):
            async with get(url, 20.0, {}) as answer:
                await answer.body()


async def test_a_body_that_does_not_come_raises_and_the_head_counts_at_once() -> None:
    async with answering(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n") as (url, _):
        async with get(url, 20.0, {}) as answer:
            assert answer.status == 204
        with pytest.raises(TimeoutError):
            async with get(url, 0.05, {}) as answer:
                await answer.body()
