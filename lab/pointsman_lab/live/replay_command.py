"""`pointsman replay`: sends a trace to a live gateway (or one engine) and writes a bundle, with the router's decisions in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import typer
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.progress import TaskID

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.enum_words import word
from pointsman_common.io.auth import showing
from pointsman_common.io.router_target import router_of
from pointsman_common.io.settings import Tokens
from pointsman_common.io.writable import make_writable
from pointsman_lab.live.fleet_watch import FleetError, FleetWatcher
from pointsman_lab.live.latency_breakdown import break_down, parts, rule_of
from pointsman_lab.live.trace_sender import OnResult, TraceSender
from pointsman_lab.report.bundle import write_bundle
from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import print_summary, summarise
from pointsman_lab.report.terminal import make_console, make_progress
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import (
    TINY_TRACE,
    TraceError,
    TraceRequest,
    by_session,
    first_sessions,
    require_think_times,
)

OnBegin = Callable[[Sequence[Sequence[TraceRequest]], str], None]

# Exit status after Ctrl-C.
INTERRUPTED = 130
# Timeout for the gateway's last lines in its breakdown file after its last answer, s.
LINES_WITHIN_S = 2.0
# Interval between two reads of the breakdown file, s.
LOOK_AGAIN_S = 0.1


class ReplaySettings(BaseSettings):
    """Settings of one replay."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_REPLAY_")

    trace: Path = Field(TINY_TRACE, description="trace file (jsonl, jsonl.gz), of any format that lab/README.md names")
    url: str = Field("http://127.0.0.1:8080", description="base URL of a gateway or an engine")
    model: str = Field("", description="model of the requests; default: the first that /v1/models lists")
    api_key: SecretStr = Field(SecretStr(""), description="API key, sent as bearer token; default: none")
    timing: Literal["trace", "think"] = Field(
        "trace",
        description="time of a turn; trace: the later of its timestamp and the previous answer's end; think: think_ms "
        "after that end",
    )
    time_scale: float = Field(1.0, gt=0, description="factor on timestamps and think times")
    token_scale: float = Field(1.0, gt=0, description="factor on prompt and answer lengths, e.g. 0.125 for a laptop")
    max_sessions: int = Field(64, ge=1, description="maximum sessions in flight")
    sessions: int = Field(0, ge=0, description="number of sessions replayed, the first ones of the trace; 0: all")
    timeout_s: float = Field(900.0, gt=0, description="timeout of one request, in s")
    tokenizer: Path = Field(TOKENIZER_DIR, description="tokenizer folder whose one-token words make up the prompts")
    router: str = Field(
        "",
        description="router, as for `pointsman instances`, that decisions, timeline and caches are read from, with the token "
        "for that; default: none",
    )
    sample_s: float = Field(1.0, gt=0, description="interval between samples of the instances, in s")
    breakdown_file: Path | None = Field(
        None,
        description="the gateway's --breakdown-file, if this machine can read it: adds all moments of each request",
    )
    out: Path = Field(Path("runs/replay"), description="folder of the run's bundle")


class ReplayError(RuntimeError):
    """The replay cannot start; the message says why."""


@dataclass
class ReplayResult:
    """Results of a replay. Without a router there are no samples, caches and breakdown."""

    records: list[RequestRecord] = field(default_factory=list)  # in the order in which requests ended
    interrupted: bool = False  # the task was cancelled (Ctrl-C) before all requests had ended
    samples: list[InstanceSample] = field(default_factory=list)  # of all instances, one every sample_s; by time
    missed_samples: int = 0  # number of times that the router did not answer for a sample
    caches: dict[str, Any] | None = None  # content of cache.json, by instance: FleetWatcher.caches()
    breakdown: dict[str, Any] | None = None  # content of breakdown.json: timing_source, parts_s and requests


def run(settings: ReplaySettings) -> None:
    """Replay, write the bundle and print its summary.

    Exits with 2 if the replay cannot start, with 1 if a request failed, and with 130 on Ctrl-C; the bundle then has the requests
    that had finished.
    """
    console = make_console()
    try:
        check_writable(settings.out)
        with ReplayProgress(console) as progress:
            replayed = asyncio.run(replay(settings, progress.add, progress.begin))
    except (TraceError, ReplayError) as error:
        typer.echo(f"pointsman replay: {error}", err=True)
        raise typer.Exit(2) from None
    summary = save(settings, replayed)
    print_summary(console, summary, str(settings.out))
    if replayed.interrupted:
        console.print(f"interrupted: {settings.out} has the {len(replayed.records)} requests that had finished")
        raise typer.Exit(INTERRUPTED)
    if summary["failed"]:
        raise typer.Exit(1)


class ReplayProgress:
    """Shows the progress of a replay: a bar on a terminal, else a line for each tenth of its requests; and each failed
    request."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = make_progress(console)
        self._task: TaskID | None = None
        self._done = self._failed = self._total = 0

    def __enter__(self) -> ReplayProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def begin(self, sessions: Sequence[Sequence[TraceRequest]], model: str) -> None:
        """Print the number of requests and sessions that will be sent, and start the bar."""
        self._total = sum(map(len, sessions))
        self._console.print(f"{self._total:,} requests of {len(sessions):,} sessions for {model}", highlight=False)
        if self._console.is_terminal:
            self._task = self._bar.add_task("requests", total=self._total)
            self._bar.start()

    def add(self, record: RequestRecord) -> None:
        """Count an ended request, and print it if it failed."""
        self._done += 1
        self._failed += not record.ok
        if not record.ok:
            self._console.print(f"{record.session} turn {record.turn}: {record.status} {record.error}", highlight=False)
        if self._task is not None:
            self._bar.advance(self._task)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            at = record.t_send + record.e2e_s
            self._console.print(
                f"{at:7.1f} s  {self._done:,} of {self._total:,} answered, {self._failed:,} failed", highlight=False
            )


def check_writable(folder: Path) -> None:
    """Make the folder of a bundle, before a replay, which may take long. Raises ReplayError if it cannot be made or written."""
    try:
        make_writable(folder)
    except OSError as error:
        raise ReplayError(f"{folder} cannot be written ({error.strerror}); --out names another folder") from None


def save(settings: ReplaySettings, replayed: ReplayResult) -> dict[str, Any]:
    """Write the bundle of a replay to `settings.out`; return its summary."""
    summary = summarise(replayed.records)
    write_bundle(
        settings.out,
        config_of(settings) | {"interrupted": replayed.interrupted, "missed_samples": replayed.missed_samples},
        replayed.records,
        summary,
        replayed.samples,
        replayed.caches,
        replayed.breakdown,
    )
    return summary


def config_of(settings: ReplaySettings) -> dict[str, Any]:
    """Return the settings that the bundle records: all except the API key."""
    return {"kind": "replay"} | settings.model_dump(mode="json", exclude={"api_key"})


async def replay(
    settings: ReplaySettings, on_result: OnResult | None = None, on_begin: OnBegin | None = None
) -> ReplayResult:
    """Replay a trace; return its records in the order in which requests ended.

    `on_result` is called with each record when its request ends, and `on_begin` with the sessions and the model before the first
    request. A failed request is recorded, and its session continues. If cancelled, as by Ctrl-C, it returns what has finished.

    Raises TraceError for a bad trace or a missing think_ms that is needed. Raises ReplayError if `url` lists no model, `router`
    does not answer or `breakdown_file` cannot be read.
    """
    requests = load_trace(settings.trace)
    sessions = list(by_session(first_sessions(requests, settings.sessions)).values())
    if settings.timing == "think":
        try:
            require_think_times(sessions)
        except TraceError as error:
            raise TraceError(f"{settings.trace}: {error}") from None
    chats = ChatMaker(requests, ChatTokenizer(settings.tokenizer).words, settings.token_scale)
    log = _GatewayLog(settings.breakdown_file)
    key = settings.api_key.get_secret_value()
    replayed = ReplayResult()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    ) as http:
        model = settings.model or await _first_model(http, settings.url)
        sender = TraceSender(settings, http, model, chats, on_result)
        replayed.records = sender.records
        begin = partial(on_begin, sessions, model) if on_begin is not None else None
        if not settings.router:
            replayed.interrupted = await _send_all(sender, sessions, begin)
            return replayed
        try:
            watch = FleetWatcher(
                router_of(settings.router), showing(Tokens(), "operator"), settings.sample_s, sender.clock
            )
            async with watch:
                replayed.interrupted = await _send_all(sender, sessions, begin)
                asked = [record.decision for record in sender.records if record.decision]
                await watch.wait_for_outcomes(asked)
                await log.wait_for_lines(asked)
        except FleetError as error:
            raise ReplayError(str(error)) from error
    _annotate(replayed, watch, log)
    return replayed


async def _send_all(
    sender: TraceSender, sessions: Sequence[Sequence[TraceRequest]], begin: Callable[[], None] | None
) -> bool:
    """Send all sessions; return whether the task was cancelled before the end."""
    if begin is not None:
        begin()
    task = asyncio.current_task()
    assert task is not None
    try:
        await sender.send(sessions)
    except asyncio.CancelledError:
        task.uncancel()
        return True
    return False


def _annotate(replayed: ReplayResult, watch: FleetWatcher, log: _GatewayLog) -> None:
    """Add the data of the router and of the gateway's log to the results. Mutates `replayed`."""
    for record in replayed.records:
        if (decision := watch.decisions.get(record.decision)) is not None:
            record.mode = word(fleet_pb2.PlacementMode, decision.mode)
            record.route_class = word(fleet_pb2.RouteClass, decision.route_class)
            record.reason, record.rule = decision.reason, rule_of(decision)
            record.predicted_cached_tokens = decision.cached_tokens
    lines = log.read()
    rows = break_down(replayed.records, watch.decisions, lines)
    replayed.samples = watch.samples
    replayed.missed_samples = watch.missed
    replayed.caches = watch.caches()
    replayed.breakdown = {
        "timing_source": "gateway's log" if lines else "router's decisions",
        "parts_s": parts(rows),
        "requests": msgspec.to_builtins(rows),
    }


class _GatewayLog:
    """Reader of the lines that a gateway appends to its breakdown file after this object is made."""

    def __init__(self, file: Path | None) -> None:
        """Note the file's size. Raises ReplayError if the file cannot be read."""
        self._file = file
        self._begin = 0
        if file is not None:
            try:
                self._begin = file.stat().st_size
            except OSError as error:
                raise ReplayError(f"{file}: cannot be read: {error.strerror}") from error

    async def wait_for_lines(self, decisions: Sequence[str]) -> None:
        """Wait until the file has the lines of all `decisions`, at most LINES_WITHIN_S: the gateway writes them after its
        answers."""
        for _ in range(round(LINES_WITHIN_S / LOOK_AGAIN_S)):
            if self._file is None or self.read().keys() >= set(decisions):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the lines by decision id, without an incomplete last line."""
        if self._file is None:
            return {}
        with self._file.open("rb") as opened:
            opened.seek(self._begin)
            lines = opened.read().splitlines()
        found = {}
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                summary = msgspec.json.decode(line, type=dict[str, Any])
                found[str(summary["decision_id"])] = summary
        return found


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
