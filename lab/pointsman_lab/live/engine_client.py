"""Client that measures one engine from outside: reads its metrics and KV events, and sends requests as token ids."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from pointsman_common.core.addresses import address_of_url, connect_endpoint

# Timeout for an answered request to appear in /metrics, s.
METRICS_WITHIN_S = 30.0
# Timeout for the next KV event, s.
EVENTS_WITHIN_S = 2.0
_LINE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineError(RuntimeError):
    """The engine cannot be measured."""


class EngineBusyError(EngineError):
    """The engine has requests of other clients."""


@dataclass(frozen=True)
class Metrics:
    """A reading of /metrics: each metric's sum over its labels, and the cache configuration."""

    values: dict[str, float]
    cache: dict[str, str]

    def since(self, before: Metrics, name: str) -> float:
        """Return a counter's increase since the reading `before`."""
        return self.values.get(name, 0.0) - before.values.get(name, 0.0)


class EngineClient:
    """One engine. The caller must be its only client: connect(), check_idle() and wait_until_counted() raise EngineBusyError
    else."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self.model = ""
        self.max_model_len = 0

    async def connect(self) -> Metrics:
        """Read the model's name and length; return the metrics. Raises EngineError, or EngineBusyError if the engine is not
        idle."""
        models = await self._get("/v1/models")
        try:
            card = msgspec.json.decode(models)["data"][0]
            self.model, self.max_model_len = str(card["id"]), int(card["max_model_len"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/v1/models names no model with its max_model_len") from error
        metrics = await self.metrics()
        if "vllm:request_prefill_time_seconds_sum" not in metrics.values:
            raise EngineError(
                f"{self.url}/metrics has no prefill times: the server is not vLLM, or runs with --disable-log-stats"
            )
        self.check_idle(metrics)
        return metrics

    async def metrics(self) -> Metrics:
        """Read /metrics. Raises EngineError if the engine does not answer."""
        text = (await self._get("/metrics")).decode()
        values: dict[str, float] = {}
        cache: dict[str, str] = {}
        for name, labels, value in _LINE.findall(text):
            values[name] = values.get(name, 0.0) + float(value)
            if name == "vllm:cache_config_info":
                cache = dict(_LABEL.findall(labels))
        return Metrics(values, cache)

    def check_idle(self, metrics: Metrics) -> None:
        """Raise EngineBusyError if a request is running or waiting."""
        there = metrics.values.get("vllm:num_requests_running", 0) + metrics.values.get("vllm:num_requests_waiting", 0)
        if there:
            raise EngineBusyError(f"{self.url} has {there:.0f} requests of others: only an idle engine can be measured")

    async def tokens_of(self, text: str) -> list[int]:
        """Return the text's token ids from the engine's tokenizer."""
        answer = await self._post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        tokens: list[int] = answer["tokens"]
        return tokens

    async def complete(self, prompt: Sequence[int], max_tokens: int, salt: str) -> float:
        """Generate exactly `max_tokens` after `prompt`; return the duration in s. The prompt's cache entries are for `salt` only.

        The answer is streamed, as most clients request: where an engine shares its machine with its front end, streaming is a
        part of the duration of a step. Raises EngineError for an incomplete answer.
        """
        began = time.monotonic()
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        text = await self._answer("/v1/completions", body | {"temperature": 0.0, "cache_salt": salt})
        if not text.rstrip().endswith(b"data: [DONE]"):
            end = " ".join(text[-200:].decode(errors="replace").split())
            raise EngineError(f"{self.url}/v1/completions breaks off: {end}")
        return time.monotonic() - began

    async def wait_until_counted(self, before: Metrics, requests: int) -> Metrics:
        """Wait until the metrics count `requests` more than `before`; return them. Raises EngineBusyError if they count more."""
        deadline = time.monotonic() + METRICS_WITHIN_S
        while True:
            metrics = await self.metrics()
            counted = metrics.since(before, "vllm:request_prefill_time_seconds_count")
            if counted > requests:
                raise EngineBusyError(f"{self.url} answers other clients: only an idle engine can be measured")
            if counted == requests:
                self.check_idle(metrics)
                return metrics
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url}/metrics does not count a request that the engine has answered")
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def stored(self) -> AsyncIterator[asyncio.Queue[int]]:
        """Yield a queue of the number of blocks that each step stores, from the KV events; empty if the engine sends no
        events."""
        queue: asyncio.Queue[int] = asyncio.Queue()
        endpoint = await self._event_endpoint()
        if not endpoint:
            yield queue
            return
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.connect(endpoint)
            listening = asyncio.create_task(_listen(socket, queue))
            try:
                yield queue
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _event_endpoint(self) -> str:
        try:
            sources = msgspec.json.decode(await self._get("/kv_event_sources"))
            endpoint = str(sources["0"]["endpoint"]) if sources["0"]["enable_kv_cache_events"] else ""
        except (EngineError, msgspec.DecodeError, LookupError, TypeError):
            return ""
        return connect_endpoint(endpoint, address_of_url(self.url).host)

    async def _get(self, path: str) -> bytes:
        try:
            async with self._http.get(self.url + path) as response:
                if response.status != 200:
                    raise EngineError(f"{self.url}{path} answers {response.status}")
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self.url}{path}: {error or type(error).__name__}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return msgspec.json.decode(await self._answer(path, body))

    async def _answer(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._http.post(self.url + path, json=body) as response:
                text = b"".join([part async for part in response.content.iter_any()])
                if response.status != 200:
                    raise EngineError(
                        f"{self.url}{path} answers {response.status}: {text[:200].decode(errors='replace')}"
                    )
                return text
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self.url}{path}: {error or type(error).__name__}") from error


async def _listen(socket: zmq.asyncio.Socket, queue: asyncio.Queue[int]) -> None:
    while True:
        *_, payload = await socket.recv_multipart()
        events = msgspec.msgpack.decode(payload)[1]
        queue.put_nowait(sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockStored"))


async def next_stored(queue: asyncio.Queue[int]) -> int | None:
    """Return the next step's number of stored blocks; None after EVENTS_WITHIN_S without an event."""
    try:
        async with asyncio.timeout(EVENTS_WITHIN_S):
            return await queue.get()
    except TimeoutError:
        return None
