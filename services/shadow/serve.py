"""`pointsman shadow serve`: beside a router that serves, on mirrored requests and its access log."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import typer
import uvloop

from lab.console import make_console
from lab.counterfactual import Observed
from services.common.logs import configure_logs
from services.gateway.http.message import Headers
from services.gateway.http.server import Limits, Server
from services.gateway.tokens import TokenizerMissing
from services.shadow.access_log import LineError, read_line
from services.shadow.book import Book, Ended
from services.shadow.fleet import FleetQuestions, Model, Now
from services.shadow.follow import follow
from services.shadow.mirror import Backlog, Door
from services.shadow.prompts import NotUnderstood, Reader
from services.shadow.report import print_report, summary_of
from services.shadow.settings import ServeSettings
from services.shadow.study import Engines, Study
from services.shadow.telemetry import Telemetry

log = structlog.get_logger()

LOOK_S = 0.25
BACKLOG_BYTES = 256 << 20


class Shadow:
    """One shadow. All methods belong to one event loop; the study goes on in a thread, one step at a time."""

    def __init__(self, settings: ServeSettings) -> None:
        """Raises ValueError, OSError and TokenizerMissing for settings that cannot be used."""
        self.telemetry = Telemetry()
        self._settings = settings
        self._study = Study(settings, self.telemetry.compared)
        self._reader = Reader(settings.tokenizer_map(), settings.alias_map())
        self._book = Book(settings.window_s, settings.output_tokens)
        self._backlog = Backlog(BACKLOG_BYTES, self.telemetry)
        self.door = Door(self._backlog, self.telemetry, self.summary)
        self._questions: FleetQuestions | None = None
        if settings.router:
            self._questions = FleetQuestions(
                settings.router, settings.ask_every_s, settings.policy, settings.policy_map()
            )
        elif not settings.instances or not settings.tokenizers:
            raise ValueError("instances, tokenizers: without a router that knows the engines, both are needed")
        for model in settings.tokenizer_map():
            if settings.instances:
                self._study.add_engines(model, Engines(tuple(settings.instances)))
        # The engines that a router told of last, by model.
        self._told: dict[str, tuple[str, ...]] = {}
        self._asked_now: dict[str, Now] = {}
        # The log has requests of its own, which are known at their ends only.
        self._from_log = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Compare until `stop`; then what is still open is taken as it is."""
        tasks = [self._understand()]
        if self._settings.access_log is not None:
            tasks.append(self._follow(self._settings.access_log))
        if self._questions is not None:
            tasks.append(self._questions.watch(self._learn))
        running = [asyncio.create_task(task) for task in tasks]
        # It ends by itself: a step of the study that is under way must be over before the last one.
        comparing = asyncio.create_task(self._compare(stop))
        stopping = asyncio.create_task(stop.wait())
        try:
            # None of the others does: a fault in one is the shadow's end, and the traffic's no concern.
            await asyncio.wait([stopping, comparing, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in (comparing, *running):
                if task.done():
                    task.result()
        finally:
            stop.set()
            for task in (stopping, *running, *self._tasks):
                task.cancel()
            await asyncio.gather(comparing, stopping, *running, *self._tasks, return_exceptions=True)
            if self._questions is not None:
                await self._questions.close()
        await asyncio.to_thread(self._observe, list(self._book.due(math.inf, math.inf)))
        await asyncio.to_thread(self._study.finish)

    def summary(self) -> dict[str, Any]:
        """All figures as JSON."""
        summary = summary_of(self._study.summaries(), self.telemetry.counts_left_out())
        summary["waiting"] = len(self._book) + self._study.open
        if self._questions is not None:
            summary["now"] = self._questions.summary()
        return summary

    async def _understand(self) -> None:
        while True:
            one = await self._backlog.get()
            await self._read(one.path, one.headers, one.body, one.at, None if self._settings.access_log else Ended())

    async def _read(self, path: str, headers: Headers, body: bytes, at: float, ended: Ended | None) -> None:
        try:
            asked, placement = await self._reader.read(path, headers, body, at)
        except NotUnderstood as reason:
            log.debug("not understood", reason=str(reason))
            self.telemetry.left_out.labels(reason.reason).inc()
            return
        except Exception:
            # One request that nobody foresaw must not end the study of all others.
            log.exception("a fault in the shadow")
            self.telemetry.left_out.labels("fault").inc()
            return
        if not self._study.engines_of(asked.model):
            self.telemetry.left_out.labels("model").inc()
            return
        if self._questions is not None and asked.keys:
            task = asyncio.create_task(self._ask_now(asked.request_id, placement))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._book.add(asked, ended)

    async def _ask_now(self, request_id: str, placement: Any) -> None:
        assert self._questions is not None
        now = await self._questions.ask(placement)
        if now is not None:
            self._asked_now[request_id] = now

    async def _follow(self, log_file: Path) -> None:
        async for line in follow(log_file):
            if not line.strip():
                continue
            try:
                entry = read_line(line)
                ended, request = entry.end, entry.request
                if self._book.end(entry.id, ended, follows=request is None) or request is None:
                    continue
                headers = Headers([("X-Request-ID", entry.id), ("X-Session-ID", entry.session)])
                came_at = entry.came_at
            except LineError as error:
                log.debug("a line of the access log is left out", reason=str(error))
                self.telemetry.left_out.labels("invalid").inc()
                continue
            self._from_log = True
            path, body = request
            await self._read(path, headers, body, came_at, ended)

    async def _learn(self, models: dict[str, Model]) -> None:
        """A router told of the fleet."""
        for name, model in models.items():
            if not self._reader.knows(name):
                source = self._settings.tokenizer_map().get(name) or model.root
                try:
                    await asyncio.to_thread(self._reader.learn, name, source, model.served_names, model.lora_names)
                except TokenizerMissing as missing:
                    self._reader.learn_without_tokens(name, model.served_names, str(missing))
            engines = model.engines
            names = tuple(self._settings.instances) or engines.names
            if names == self._study.engines_of(name):
                continue
            self._study.add_engines(name, Engines(names, engines.kv_tokens, engines.max_model_len))
            if self._study.engines_of(name) == names:
                log.info("engines", model=name, instances=len(names))
            elif self._told.get(name) != names:
                log.warning("engines came or went: the modelled fleets stay as they are", model=name)
            self._told[name] = names

    async def _compare(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            now = time.time()
            complete = now - self._settings.window_s if self._from_log else self._backlog.read_until
            failed = self._book.failed
            due = list(self._book.due(now, complete))
            self.telemetry.left_out.labels("failed").inc(self._book.failed - failed)
            if due:
                await asyncio.to_thread(self._observe, due)
                self.telemetry.behind.set(time.time() - due[-1].timestamp_ms / 1e3)
            self.telemetry.waiting.set(len(self._book))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()

    def _observe(self, due: list[Observed]) -> None:
        for request in due:
            self._study.observe(request)
            now = self._asked_now.pop(request.request_id, None)
            if now is not None and self._questions is not None:
                self._questions.totals.add(now, request.instance)


async def _serve(settings: ServeSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        shadow = Shadow(settings)
        server = Server(shadow.door, Limits(settings.max_body_bytes, BACKLOG_BYTES))
        host, _, port = settings.listen.rpartition(":")
        address, bound = await server.start(host.strip("[]"), int(port))
    except (OSError, ValueError, TokenizerMissing) as error:
        raise SystemExit(f"pointsman shadow serve: {error}") from None
    typer.echo(f"mirrored requests to http://{address}:{bound}")
    console = make_console()

    async def report() -> None:
        while settings.report_every_s:
            await asyncio.sleep(settings.report_every_s)
            print_report(console, shadow.summary(), settings.policy, settings.assumed)

    reporting = asyncio.create_task(report())
    try:
        await shadow.run(stop)
    finally:
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting
        await server.close(0.0)
    print_report(console, shadow.summary(), settings.policy, settings.assumed)


def run_serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT. Blocks."""
    configure_logs("shadow", settings.log_level)
    uvloop.run(_serve(settings))
