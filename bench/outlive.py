"""Streams while their engines are killed one after another, or emptied by operators: how many break, whether their text is right,
the gap that clients see, and the time until an engine is empty."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench import stack
from bench.figures import Figure, percentile
from pointsman.router.v1 import fleet_pb2
from tests.support.processes.fleet import ENGINES, MODEL, Fleet
from tests.support.waiting import eventually

STREAMS, OPEN_AT_ONCE, TOKENS = 1_000, 200, 150
MOVED, LONG_TOKENS = 90, 1_500
# Time between a kill and the next one, s. The killed engine is started again in between.
BETWEEN_S, AWAY_S = 6.0, 1.0


@dataclass
class _Stream:
    """One stream. Times in s."""

    instance: str = ""  # id of the answering instance; empty before the answer's headers and after its end
    text: str = ""  # received so far
    last_at: float = 0.0  # when a chunk came last
    killed_at: float = 0.0  # when its engine was killed; 0: it was not
    gaps: list[float] = field(default_factory=list)  # from its last chunk before the kill to the first one after
    broken: str = ""  # error or status; empty: it did not break


async def outlive() -> list[Figure]:
    """outlive_*: streams that broke or have another text than undisturbed ones, the gaps of those whose engine was killed, and
    the time in which operators empty an engine."""
    stack.allow_files(4 * OPEN_AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), linked=False, emulate={"speedup": 0.5, "kv_blocks": 40_000})
        try:
            await fleet.start()
            streams, kills = await _under_kills(fleet)
            wrong = await _wrong_texts(fleet, streams)
            emptied_s, moved = await _emptied(fleet)
        finally:
            await fleet.stop()
    gaps = [gap for stream in streams for gap in stream.gaps]
    hit = sum(bool(stream.killed_at) for stream in streams)
    note = f"{STREAMS} streams of {TOKENS} tokens, {OPEN_AT_ONCE} at a time; {kills} kills of engines hit {hit} streams"
    broken = [stream.broken for stream in streams if stream.broken]
    return [
        Figure("outlive_broken", len(broken), "", 0, f"{note}{'; first: ' + broken[0] if broken else ''}"),
        Figure("outlive_wrong_text", wrong, "", 0, "compared with the same prompts, undisturbed"),
        Figure("outlive_gap_p50_s", percentile(gaps, 0.5), "s", None, "from the last byte before to the first after"),
        Figure("outlive_gap_p99_s", percentile(gaps, 0.99), "s", None, "the same"),
        Figure(
            "outlive_moved_broken",
            sum(bool(stream.broken) for stream in moved),
            "",
            0,
            "streams of which some were moved",
        ),
        Figure(
            "outlive_emptied_s",
            emptied_s,
            "s",
            None,
            f"drain --move of one of three engines under {len(moved)} streams of {LONG_TOKENS} tokens",
        ),
    ]


async def _emptied(fleet: Fleet) -> tuple[float, list[_Stream]]:
    """Return the time until an engine has no requests after the order to empty it, s, and the streams."""
    streams = [_Stream() for _ in range(MOVED)]
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        fleet.router(await fleet.owner()) as router,
        asyncio.TaskGroup() as load,
    ):
        stub: Any = router
        for number, stream in enumerate(streams):
            load.create_task(_ask(fleet, http, stream, number, LONG_TOKENS))
        await eventually(lambda: all(stream.last_at for stream in streams), "all streams have begun")
        name = fleet.address("gateway", "e0")
        began = time.perf_counter()
        await stub.Drain(fleet_pb2.DrainRequest(instance_id=name, move=True))
        asked = fleet_pb2.GetInstanceRequest(instance_id=name)

        async def empty() -> bool:
            return not (await stub.GetInstance(asked)).instance.num_requests

        await eventually(empty, "the engine is empty")
        emptied_s = time.perf_counter() - began
        await stub.Drain(fleet_pb2.DrainRequest(instance_id=name, resume=True))
    return emptied_s, streams


async def _under_kills(fleet: Fleet) -> tuple[list[_Stream], int]:
    streams = [_Stream() for _ in range(STREAMS)]
    numbers = iter(range(STREAMS))
    kills = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        load = [asyncio.create_task(_client(fleet, http, streams, numbers)) for _ in range(OPEN_AT_ONCE)]
        try:
            for name in itertools.cycle(ENGINES):
                done, _ = await asyncio.wait(load, timeout=BETWEEN_S)
                if len(done) == len(load):
                    break
                fleet.kill(name)
                kills += 1
                now = time.perf_counter()
                for stream in streams:
                    if stream.instance == f"127.0.0.1:{fleet.ports[name]}" and stream.last_at:
                        stream.killed_at = now
                await asyncio.sleep(AWAY_S)
                fleet.parts[name].start()
            await asyncio.gather(*load)
        finally:
            for task in load:
                task.cancel()
    return streams, kills


async def _client(fleet: Fleet, http: aiohttp.ClientSession, streams: list[_Stream], numbers: Iterator[int]) -> None:
    for number in numbers:
        await _ask(fleet, http, streams[number], number)


async def _ask(fleet: Fleet, http: aiohttp.ClientSession, stream: _Stream, number: int, tokens: int = TOKENS) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Task {number}. " + "Look at the points. " * 20}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.post(f"{fleet.gateway_url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            stream.broken = f"status {answer.status}"
            return
        stream.instance = answer.headers["X-Pointsman-Instance"]
        ended = False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if stream.killed_at > stream.last_at > 0:
                stream.gaps.append(now - stream.last_at)
            stream.last_at = now
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                stream.broken = chunk["error"]["message"]
                break
            for choice in chunk["choices"]:
                stream.text += choice["delta"].get("content") or ""
        # What follows is not measured: the engine may be killed again.
        stream.instance, stream.last_at = "", 0.0
        if not ended and not stream.broken:
            stream.broken = "no end"


async def _wrong_texts(fleet: Fleet, streams: list[_Stream]) -> int:
    """Return how many of the streams that were hit have another text than their prompts get now."""
    hit = [number for number, stream in enumerate(streams) if stream.gaps and not stream.broken]
    again = {number: _Stream() for number in hit}
    gate = asyncio.Semaphore(OPEN_AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(number: int) -> None:
            async with gate:
                await _ask(fleet, http, again[number], number)

        await fleet.wait_until_healthy()
        await asyncio.gather(*map(ask, hit))
    return sum(again[number].text != streams[number].text for number in hit)
