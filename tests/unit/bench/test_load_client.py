"""The load client of the benchmarks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bench.load_client import LoadRun, go

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def report_of(answers: list[bytes], requests: int) -> dict[str, Any]:
    """What the client reports of a server that sends `answers` on each connection and closes it with the last one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = server.sockets[0].getsockname()
        found = await go(LoadRun(url, requests, False, 1, 50, random.Random(1), False), 1, 1, 0.0)
        await asyncio.sleep(0.0)  # for the connections to be closed
        return found


async def test_a_request_on_a_connection_that_was_closed_as_idle_is_asked_again() -> None:
    """As when the client had been stopped for longer than the server keeps connections."""
    found = await report_of([ANSWER, ANSWER, b""], 6)
    assert (found["answered"], found["failed"], found["repeated"]) == (6, 0, 2)


async def test_an_answer_that_breaks_off_and_one_that_never_comes_are_failures() -> None:
    assert (await report_of([b""], 1))["failures"] == {"": 1}
    found = await report_of([ANSWER, ANSWER[:-9]], 2)
    assert (found["answered"], found["failed"], found["repeated"]) == (1, 1, 0)
