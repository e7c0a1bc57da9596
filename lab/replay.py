"""Replays a trace against a live gateway (or a lone engine), streaming, and records what every request got."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import typer
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from lab.analysis import make_console, print_summary, summarise
from lab.bundle import write_bundle
from lab.chats import ChatMaker
from lab.records import RequestRecord
from lab.text import TOKENIZER_DIR, ChatTokenizer
from lab.trace_files import load_trace
from lab.traces import TINY_TRACE, TraceError, TraceRequest, by_session

OnResult = Callable[[RequestRecord], None]


class ReplaySettings(BaseSettings):
    """One replay."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_REPLAY_")

    trace: Path = Field(TINY_TRACE, description="trace file (jsonl, jsonl.gz)")
    url: str = Field("http://127.0.0.1:8080", description="base URL of a gateway or an engine")
    model: str = Field("", description="model to ask for; default: the first that /v1/models lists")
    api_key: SecretStr = Field(SecretStr(""), description="sent as bearer token when given")
    timing: Literal["trace", "think"] = Field(
        "trace",
        description="trace: a turn at the later of the previous end and its timestamp; think: think_ms after the end",
    )
    time_scale: float = Field(1.0, gt=0, description="factor on timestamps and thinking times")
    token_scale: float = Field(1.0, gt=0, description="factor on prompt and answer lengths, e.g. 0.125 for a laptop")
    max_sessions: int = Field(64, ge=1, description="sessions in flight")
    sessions: int = Field(0, ge=0, description="replay only the first so many sessions; 0 is all")
    timeout_s: float = Field(900.0, gt=0, description="limit of one request in s")
    tokenizer: Path = Field(TOKENIZER_DIR, description="tokenizer folder whose one-token words make up the prompts")
    out: Path = Field(Path("runs/replay"), description="folder of the run's bundle")


class ReplayError(RuntimeError):
    """A replay that cannot begin."""


def run(settings: ReplaySettings) -> None:
    """Replay, write the bundle and print its summary. Exits with 2 when it cannot begin, with 1 when a request failed."""
    console = make_console()

    def tell(record: RequestRecord) -> None:
        if not record.ok:
            console.print(f"{record.session} turn {record.turn}: {record.status} {record.error}", highlight=False)

    try:
        records = asyncio.run(replay(settings, tell))
    except (TraceError, ReplayError) as error:
        typer.echo(f"pointsman replay: {error}", err=True)
        raise typer.Exit(2) from None
    summary = summarise(records)
    write_bundle(settings.out, config_of(settings), records, summary)
    print_summary(console, summary, str(settings.out))
    if summary["failed"]:
        raise typer.Exit(1)


def config_of(settings: ReplaySettings) -> dict[str, Any]:
    """What the bundle keeps of the settings: all but the key."""
    return settings.model_dump(mode="json", exclude={"api_key"})


async def replay(settings: ReplaySettings, on_result: OnResult | None = None) -> list[RequestRecord]:
    """Replay a trace; records in the order in which requests ended, each told to `on_result` when it does.

    Failed requests are recorded and their session goes on. Raises TraceError for a bad trace or one without think_ms where it
    is needed, ReplayError when `url` does not list a model.
    """
    requests = load_trace(settings.trace)
    sessions = list(by_session(requests).values())[: settings.sessions or None]
    if settings.timing == "think":
        for request in requests:
            if request.turn > 1 and request.think_ms is None:
                raise TraceError(
                    f"{settings.trace}: think_ms: missing in session {request.session} turn {request.turn}"
                )
    words = ChatTokenizer(settings.tokenizer).words
    chats = ChatMaker(requests, words, settings.token_scale)
    key = settings.api_key.get_secret_value()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    ) as http:
        model = settings.model or await _first_model(http, settings.url)
        player = _Player(settings, http, model, chats, on_result)
        await player.play(sessions)
    return player.records


async def _first_model(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(f"{url}/v1/models") as response:
            listed = await response.json() if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ReplayError(f"{url}/v1/models: {type(error).__name__}: {error}") from error
    models = [str(card["id"]) for card in listed.get("data", [])]
    if not models:
        raise ReplayError(f"{url}/v1/models answered {response.status} and lists no model")
    return models[0]


class _Player:
    def __init__(
        self,
        settings: ReplaySettings,
        http: aiohttp.ClientSession,
        model: str,
        chats: ChatMaker,
        on_result: OnResult | None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._settings = settings
        self._http = http
        self._model = model
        self._chats = chats
        self._on_result = on_result
        self._started = 0.0
        self._origin_ms = 0.0

    async def play(self, sessions: Sequence[Sequence[TraceRequest]]) -> None:
        free = asyncio.Semaphore(self._settings.max_sessions)
        self._started = time.monotonic()
        self._origin_ms = sessions[0][0].timestamp_ms
        async with asyncio.TaskGroup() as group:
            for turns in sessions:
                await self._sleep_until(self._due(turns[0]))
                # A session holds its place from its first turn to its last; others wait for it in the trace's order.
                await free.acquire()
                group.create_task(self._session(turns)).add_done_callback(lambda _: free.release())

    async def _session(self, turns: Sequence[TraceRequest]) -> None:
        for request in turns:
            if request is turns[0] or self._settings.timing == "trace":
                await self._sleep_until(self._due(request))
            else:
                await asyncio.sleep((request.think_ms or 0.0) / 1e3 * self._settings.time_scale)
            record = await self._ask(request)
            self.records.append(record)
            if self._on_result:
                self._on_result(record)

    def _due(self, request: TraceRequest) -> float:
        return self._started + (request.timestamp_ms - self._origin_ms) / 1e3 * self._settings.time_scale

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    async def _ask(self, request: TraceRequest) -> RequestRecord:
        body = {
            "model": self._model,
            "messages": self._chats.messages(request),
            "max_tokens": self._chats.tokens(request.output_length),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", "X-Session-ID": request.session}
        sent = time.monotonic()
        record = RequestRecord(session=request.session, turn=request.turn, t_send=sent - self._started)
        try:
            async with self._http.post(
                f"{self._settings.url}/v1/chat/completions", data=data, headers=headers
            ) as response:
                record.status = response.status
                record.instance = response.headers.get("X-Pointsman-Instance", "")
                record.decision = response.headers.get("X-Pointsman-Decision", "")
                if response.status == 200:
                    await _read_stream(response, record, sent)
                else:
                    record.error = (await response.text())[:500]
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.e2e_s = time.monotonic() - sent
        return record


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, sent: float) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        # Between the first token and the usage nothing is needed of a chunk, and decoding them all would cost the most.
        if record.ttft_s is not None and b'"usage"' not in data and b'"error"' not in data:
            continue
        chunk = msgspec.json.decode(data)
        if error := chunk.get("error"):
            record.error = str(error.get("message", error))[:500]
        choices = chunk.get("choices") or []
        if record.ttft_s is None and choices and choices[0].get("delta", {}).get("content"):
            record.ttft_s = time.monotonic() - sent
        if used := chunk.get("usage"):
            record.prompt_tokens = used["prompt_tokens"]
            record.output_tokens = used["completion_tokens"]
            record.cached_tokens = (used.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not done and not record.error:
        record.error = "the stream broke off"
