"""What a gateway keeps in memory: for open streams, for a client that does not read, for bodies that are arriving."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.gateway_fakes import MODEL, Stack, stack, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "set the points"}], "stream": True}


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        yield running


def kept_by_the_gateway() -> int:
    """Bytes that its code allocated and something still holds."""
    files = ("app.py", "http/connection.py", "conduct.py")
    ours = [tracemalloc.Filter(True, f"*/services/gateway/{file}", all_frames=True) for file in files]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


async def test_an_open_stream_does_not_keep_its_prompt(up: Stack) -> None:
    up.engines[0].hold = asyncio.Event()
    body = CHAT | {"padding": "x" * 1_000_000}
    tracemalloc.start(25)
    try:
        async with aiohttp.ClientSession() as http:
            answers = [await http.post(f"{up.url}/v1/chat/completions", json=body) for _ in range(3)]
            for answer in answers:
                assert (await answer.content.readline()).startswith(b"data: ")
            assert kept_by_the_gateway() < 500_000
            up.engines[0].hold.set()
            for answer in answers:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    finally:
        tracemalloc.stop()
    assert [len(body["padding"]) for _, body, _ in up.engines[0].requests] == [1_000_000] * 3
    await until(lambda: len(up.router.finished) == 3)
