"""Measures the request overhead: the time of client, gateway, router and the engine's front end.

It sends probe requests, chats as a replay sends them, one at a time. The overhead is the time from sending to the first token,
less the engine's prefill time from its /metrics. /metrics also give the mean decode step of one sequence while its tokens are
streamed. The step is longer if the processes that stream the tokens share the engine's machine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from pointsman_lab.engine.cost_fit import DecodeTime, fit_line
from pointsman_lab.live.engine_client import METRICS_WITHIN_S, EngineClient, EngineError, Metrics
from pointsman_lab.live.profile_command import DECODED
from pointsman_lab.live.trace_sender import ReplayTarget, TraceSender
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.traces import TraceRequest

_COUNT, _PREFILL_S = "vllm:request_prefill_time_seconds_count", "vllm:request_prefill_time_seconds_sum"
_DECODE_S = "vllm:request_decode_time_seconds_sum"


@dataclass(frozen=True)
class RequestOverhead:
    """Seconds per request and per prompt token up to the first token, and the decode steps whose tokens were streamed this
    way."""

    request_s: float
    prompt_token_s: float
    decodes: Sequence[DecodeTime]


async def measure_overhead(
    target: ReplayTarget,
    engines: Sequence[str],
    tokenizer: ChatTokenizer,
    lengths: Sequence[int],
    repeats: int,
    pause_s: float,
) -> RequestOverhead:
    """Measure with `repeats` cold prompts of each length, sent to `target.url` one at a time, each after a pause of `pause_s`.

    `lengths` are in tokens; the chat template adds a few. The `engines` behind the URL must have no other clients. Raises
    EngineError.
    """
    # The lengths alternate, so that a long stall does not affect all probes of one length.
    probes = [_probe(length) for _ in range(repeats) for length in lengths]
    chats = ChatMaker(probes, tokenizer.words)
    points, decodes = [], []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [EngineClient(url, http) for url in engines]
        await clients[0].connect()
        sender = TraceSender(target, http, clients[0].model, chats, None)
        for probe in probes:
            before = await _metrics(clients)
            await asyncio.sleep(pause_s)
            await sender.send([[probe]])
            record = sender.records[-1]
            if not record.ok or record.ttft_s is None or record.prompt_tokens is None:
                raise EngineError(f"{target.url} does not answer a chat: {record.status} {record.error}")
            prefill_s, decode_s = await _times(clients, before)
            points.append((float(record.prompt_tokens), record.ttft_s - prefill_s))
            steps = DECODED - 1
            decodes.append(DecodeTime(1, record.prompt_tokens + steps / 2, decode_s / steps))
    return RequestOverhead(*fit_line(points), decodes)


def _probe(length: int) -> TraceRequest:
    """Return a request with a new prompt of one block."""
    name = uuid.uuid4()
    return TraceRequest(
        timestamp_ms=0.0,
        session_id=f"front-{name}",
        turn=1,
        input_length=length,
        output_length=DECODED,
        hash_ids=(name.int,),
        block_size=length,
    )


async def _metrics(clients: Sequence[EngineClient]) -> list[Metrics]:
    return await asyncio.gather(*(client.metrics() for client in clients))


async def _times(clients: Sequence[EngineClient], before: Sequence[Metrics]) -> tuple[float, float]:
    """Wait until a request more than `before` is counted; return its seconds of prefill and of decode. Raises EngineError."""
    deadline = time.monotonic() + METRICS_WITHIN_S
    while time.monotonic() < deadline:
        pairs = list(zip(await _metrics(clients), before, strict=True))
        if sum(after.since(then, _COUNT) for after, then in pairs):
            prefill_s, decode_s = (
                sum(after.since(then, name) for after, then in pairs) for name in (_PREFILL_S, _DECODE_S)
            )
            return prefill_s, decode_s
        await asyncio.sleep(0.02)
    raise EngineError(
        "no engine's /metrics counts an answered request: --engines must name every engine behind the gateway"
    )
