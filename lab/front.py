"""What a request pays beside its engine's own time: client, gateway, router and the engine's front end.

Measured with requests of their own, chats as a replay sends them, one at a time: from the sending to the first token, less the
time that the engine, by its own /metrics, took for the prefill.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import aiohttp

from lab.chats import ChatMaker
from lab.engine_client import METRICS_WITHIN_S, EngineClient, EngineError, Metrics
from lab.fit import fit_line
from lab.player import Pace, Player
from lab.text import ChatTokenizer
from lab.traces import TraceRequest

_COUNT, _SECONDS = "vllm:request_prefill_time_seconds_count", "vllm:request_prefill_time_seconds_sum"


async def measure_front(
    pace: Pace,
    engines: Sequence[str],
    tokenizer: ChatTokenizer,
    lengths: Sequence[int],
    repeats: int,
    pause_s: float,
) -> tuple[float, float]:
    """Seconds per request and per prompt token, from `repeats` cold prompts of each length (tokens; the chat template adds a
    few), each after `pause_s`, sent to `pace.url`, behind which nobody else asks the `engines`. Raises EngineError."""
    # The lengths take turns, so that a stall that lasts does not fall on all of one length.
    probes = [_probe(length) for _ in range(repeats) for length in lengths]
    chats = ChatMaker(probes, tokenizer.words)
    points = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [EngineClient(url, http) for url in engines]
        await clients[0].connect()
        player = Player(pace, http, clients[0].model, chats, None)
        for probe in probes:
            before = await _metrics(clients)
            await asyncio.sleep(pause_s)
            await player.play([[probe]])
            record = player.records[-1]
            if not record.ok or record.ttft_s is None or record.prompt_tokens is None:
                raise EngineError(f"{pace.url} does not answer a chat: {record.status} {record.error}")
            engine_s = await _prefill_s(clients, before)
            points.append((float(record.prompt_tokens), record.ttft_s - engine_s))
    return fit_line(points)


def _probe(length: int) -> TraceRequest:
    """A prompt that nobody has sent before, of one block."""
    name = uuid.uuid4()
    return TraceRequest(
        timestamp_ms=0.0,
        session_id=f"front-{name}",
        turn=1,
        input_length=length,
        output_length=1,
        hash_ids=(name.int,),
        block_size=length,
    )


async def _metrics(clients: Sequence[EngineClient]) -> list[Metrics]:
    return await asyncio.gather(*(client.metrics() for client in clients))


async def _prefill_s(clients: Sequence[EngineClient], before: Sequence[Metrics]) -> float:
    """What the prefills since then took, once there is one."""
    deadline = time.monotonic() + METRICS_WITHIN_S
    while time.monotonic() < deadline:
        pairs = list(zip(await _metrics(clients), before, strict=True))
        if sum(after.since(then, _COUNT) for after, then in pairs):
            return sum(after.since(then, _SECONDS) for after, then in pairs)
        await asyncio.sleep(0.02)
    raise EngineError(
        "no engine's /metrics counts a request that was answered: are all named that stand behind the gateway?"
    )
