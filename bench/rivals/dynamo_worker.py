"""A Dynamo worker that passes each request to one engine's HTTP API, and the engine's KV events to Dynamo's router.

Runs in Dynamo's own environment, which has no part of Pointsman. It is written against dynamo.common.backend, the interface that
Dynamo offers to engines of others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from tokenizers import Tokenizer

# As the engines of the board are started.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8_192


class HttpEngine(LLMEngine):
    """One vLLM server, or an emulated one, behind Dynamo's request plane."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._tokenizer = Tokenizer.from_file(f"{given.model}/tokenizer.json")
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[HttpEngine, WorkerConfig]:
        """Read the command line."""
        parser = argparse.ArgumentParser(description=__doc__)
        for name in ("engine", "events", "model", "served", "registered"):
            parser.add_argument(f"--{name}", required=True)
        for name in ("block-size", "kv-blocks", "context"):
            parser.add_argument(f"--{name}", type=int, required=True)
        given = parser.parse_args(argv)
        config = WorkerConfig(
            namespace="dynamo", component="backend", model_name=given.model, served_model_name=given.registered,
            discovery_backend="file", event_plane="zmq",
        )  # fmt: skip
        return cls(given), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Connect, and tell Dynamo what the engine is."""
        del worker_id
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        given = self._given
        return EngineConfig(
            model=given.model,
            served_model_name=given.served,
            llm=LlmRegistration(
                context_length=given.context,
                kv_cache_block_size=given.block_size,
                total_kv_blocks=given.kv_blocks,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            ),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        """The engine's own KV events."""
        return [ZmqSource(self._given.events)]

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Stream the engine's answer as token ids. Every word of the board's models is one token."""
        assert self._http is not None
        stop = request.get("stop_conditions") or {}
        body = {
            "model": self._given.served, "prompt": list(request["token_ids"]), "max_tokens": stop.get("max_tokens"),
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        used: dict[str, Any] = {}
        async with self._http.post(f"{self._given.engine}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"the engine answers {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if context.is_stopped():
                    return
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                used = chunk.get("usage") or used
                text = "".join(choice["text"] for choice in chunk["choices"])
                if ids := self._tokenizer.encode(text, add_special_tokens=False).ids if text else []:
                    yield {"token_ids": ids, "index": 0}
        yield {"token_ids": [], "index": 0, "finish_reason": "length", "completion_usage": used}

    async def cleanup(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


if __name__ == "__main__":
    run(HttpEngine)
