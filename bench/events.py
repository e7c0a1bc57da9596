"""Hit rates while the engines' KV events are missing, late, wrong or in an older form, beside the same requests without events.

Three emulated engines, whose publishers tamper with their events, behind a whole control plane. Many questions are asked about
each of a few documents, none of them in a session, so that placement depends on what is known of the caches. Each cache holds a
part of the documents.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
import zmq

from bench.figures import Figure
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.io.channel import open_channel
from pointsman_lab.emulator import emulated_engine
from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings
from pointsman_lab.emulator.kv_event_publisher import (
    BlockRemoved,
    BlockStored,
    KVEventPublisher,
    WireEvent,
)
from pointsman_lab.live.local_fleet import ChildProcesses, begin_plane, wait_for_plane
from pointsman_lab.workload.tokenizer import ChatTokenizer

# Of the questions' texts and order, and of what the publishers drop or remove.
SEED = 1
ENGINES = 3
DOCUMENTS, QUESTIONS = 36, 8
DOCUMENT_WORDS, QUESTION_WORDS = 600, 20
PAUSE_S = 0.05
RETRIES = 30
# The documents have 36 times some 1,200 tokens; each engine's cache holds ten of them.
KV_BLOCKS = 800
LATE_S = 5.0
# What is sent as each event's type, with the fields in the order of vLLM 0.22's classes.
_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class _Publisher(KVEventPublisher):
    """A publisher that tampers with its events as its `case` says. Its batches are numbered without gaps, live and in replays."""

    def __init__(self, case: str, host: str, port: int, replay_port: int) -> None:
        super().__init__(host, port, replay_port)
        self._case = case
        self._random = random.Random(SEED)
        self._stored: list[int] = []

    def source(self) -> dict[str, Any]:
        answer = super().source()
        if self._case == "none":
            answer["enable_kv_cache_events"] = False
        if self._case == "unreachable":
            # Port 1 is not in use.
            answer |= {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:1"}
        return answer

    def publish(self, ts: float, events: list[WireEvent]) -> None:
        match self._case:
            case "late":
                asyncio.get_running_loop().call_later(LATE_S, self._publish_late, ts, events)
            case "arrays":
                self._send(msgspec.msgpack.encode([ts, [_as_array(event) for event in events], 0]))
            case "undecodable":
                self._send(msgspec.msgpack.encode([ts, [["BlockStored", "hash", 7]], 0]))
            case "wrong tokens":
                for event in events:
                    if isinstance(event, BlockStored):
                        event.token_ids = [token + 1 for token in event.token_ids]
                super().publish(ts, events)
            case "half dropped":
                if self._random.random() < 0.5:
                    super().publish(ts, events)
            case "removals dropped":
                kept: list[WireEvent] = [event for event in events if not isinstance(event, BlockRemoved)]
                super().publish(ts, kept)
            case "removed that exist":
                # A quarter of the blocks that were stored before.
                wrong = [BlockRemoved([name], "GPU", 0) for name in self._stored if self._random.random() < 0.25]
                super().publish(ts, [*events, *wrong])
                self._stored = [
                    name for event in events if isinstance(event, BlockStored) for name in event.block_hashes
                ]
            case _:
                super().publish(ts, events)

    def _publish_late(self, ts: float, events: list[WireEvent]) -> None:
        if not self._pub.closed:
            super().publish(ts, events)

    def _send(self, payload: bytes) -> None:
        self._pub.send_multipart((b"", self._next_seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._buffer.append((self._next_seq, payload))
        self._next_seq += 1


def _as_array(event: WireEvent) -> list[Any]:
    kind = type(event).__name__
    return [kind, *(getattr(event, name) for name in _FIELDS[kind])]


CASES = (
    *("none", "right", "unreachable", "arrays", "undecodable", "wrong tokens", "half dropped", "removals dropped"),
    *("removed that exist", "late"),
)


@dataclass
class _Run:
    """Tokens of all prompts, and how many of them were cached; and what the router said of the engines at the end."""

    prompt: int = 0
    cached: int = 0
    said: set[str] = field(default_factory=set)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt


async def events() -> list[Figure]:
    """hit_rate_vs_no_events: the share of prompt tokens that were cached, by what the engines' KV events are like. Baseline: the
    same requests to engines without events."""
    runs = {}
    for case in CASES:
        runs[case] = await _run(case)
    none = runs.pop("none").hit_rate
    return [
        Figure(f"hit_rate_vs_no_events ({case})", run.hit_rate, "", round(none, 4), "; ".join(sorted(run.said)))
        for case, run in runs.items()
    ]


async def _run(case: str) -> _Run:
    run = _Run()
    settings = EmulateSettings(port=0, kv_blocks=KV_BLOCKS, speedup=20.0, max_model_len=8_192)
    with tempfile.TemporaryDirectory() as folder, ChildProcesses(Path(folder)) as processes:
        engines = await _start_engines(case, settings)
        try:
            urls = [engine.url for engine in engines]
            plane = begin_plane(processes, Path(folder), urls, ["--policy", "unified"], (0, 0, 0))
            # The engines answer in this thread.
            await asyncio.to_thread(wait_for_plane, processes, plane, len(urls))
            await _ask_all(plane.url, settings.model, run)
            async with open_channel(plane.router) as channel:
                stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
                listed = await stub.ListInstances(fleet_pb2.ListInstancesRequest())
            run.said = {
                f"{fleet_pb2.PrefixSource.Name(status.prefix_source).rpartition('_')[2]}"
                f"{': ' if status.prefix_reason else ''}{status.prefix_reason}"
                for status in listed.instances
            }
            await asyncio.to_thread(processes.stop, "control-plane")
        finally:
            for engine in engines:
                await engine.stop()
    return run


async def _start_engines(case: str, settings: EmulateSettings) -> list[EmulatedEngine]:
    with tampering(case):
        return [await emulated_engine.start(settings) for _ in range(ENGINES)]


@contextmanager
def tampering(case: str) -> Iterator[None]:
    """Let engines that start in the block publish their events as `case` says."""
    with patch.object(emulated_engine, "KVEventPublisher", partial(_Publisher, case)):
        yield


async def _ask_all(url: str, model: str, run: _Run) -> None:
    """Send all questions about all documents, one after another, in an order that is the same in each run."""
    draw = random.Random(SEED)
    words = ChatTokenizer().words
    documents = [" ".join(draw.choices(words, k=DOCUMENT_WORDS)) for _ in range(DOCUMENTS)]
    prompts = [
        f"{document}\n{' '.join(draw.choices(words, k=QUESTION_WORDS))}"
        for document in documents
        for _ in range(QUESTIONS)
    ]
    draw.shuffle(prompts)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for prompt in prompts:
            body = {"model": model, "prompt": prompt, "max_tokens": 4}
            usage = await _ask(http, f"{url}/v1/completions", body)
            run.prompt += usage["prompt_tokens"]
            run.cached += usage["prompt_tokens_details"]["cached_tokens"]
            # As if others thought meanwhile: events arrive, and what was assumed for a moment expires.
            await asyncio.sleep(PAUSE_S)


async def _ask(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> dict[str, Any]:
    """Return the usage of an answer. On a busy machine the agent may find no engine that answers it in time for a while."""
    for _ in range(RETRIES):
        async with http.post(url, json=body) as answer:
            if answer.status == 200:
                usage: dict[str, Any] = (await answer.json())["usage"]
                return usage
            problem = await answer.text()
        await asyncio.sleep(1.0)
    raise RuntimeError(problem)
