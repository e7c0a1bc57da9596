"""`pointsman shadow serve`: compares mirrored requests while the other router serves them, and follows its access log."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import typer
import uvloop

from pointsman_common.core.addresses import parse_address
from pointsman_common.core.router_targets import router_targets
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.logs import configure_logs
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.io.http.server import Server
from pointsman_gateway.io.http.server_types import ServerLimits
from pointsman_gateway.io.tokenizer_files import TokenizerNotFound
from pointsman_lab.report.terminal import make_console
from pointsman_lab.simulation.counterfactual import ObservedRequest
from pointsman_shadow.core.access_log import LineError, read_line
from pointsman_shadow.core.pending_requests import PendingRequests, RequestOutcome
from pointsman_shadow.core.report import print_report, summary_of
from pointsman_shadow.io.fleet_queries import ASK_EVERY_S, FleetQueries, LivePlacement, ServedModel
from pointsman_shadow.io.log_follower import follow
from pointsman_shadow.io.metrics import ShadowMetrics
from pointsman_shadow.io.mirror_handler import Backlog, MirrorHandler
from pointsman_shadow.io.placement_comparison import ModelEngines, PlacementComparison
from pointsman_shadow.io.request_reader import RequestReader, UnusableRequest
from pointsman_shadow.io.settings import ServeSettings

log = structlog.get_logger()

# Interval between two checks for requests that can be compared, s.
LOOK_S = 0.25
# Maximum size of the bodies of mirrored requests that are not read yet, bytes.
BACKLOG_BYTES = 256 << 20
# Maximum number of placements of the running router that are kept for requests that are not compared yet.
MAX_LIVE_PLACEMENTS = 10_000


class ShadowService:
    """One shadow. All methods run in one event loop. The comparison runs in a thread, one batch of requests at a time."""

    def __init__(self, settings: ServeSettings) -> None:
        """Raises ValueError, OSError and TokenizerNotFound for settings that cannot be used."""
        self.telemetry = ShadowMetrics()
        self._settings = settings
        self._comparison = PlacementComparison(settings, self.telemetry.compared)
        self._reader = RequestReader(settings.tokenizer_map(), settings.alias_map())
        self._pending = PendingRequests(settings.window_s, settings.output_tokens)
        self._backlog = Backlog(BACKLOG_BYTES, self.telemetry)
        self.handler = MirrorHandler(self._backlog, self.telemetry, self.summary)
        self._fleet: FleetQueries | None = None
        if settings.router:
            self._fleet = FleetQueries(
                router_targets(settings.router), ASK_EVERY_S, settings.policy, settings.policy_map()
            )
        elif not settings.instances or not settings.tokenizers:
            raise ValueError("instances, tokenizers: both must be given unless a router reports the engines")
        for model in settings.tokenizer_map():
            if settings.instances:
                self._comparison.add_engines(model, ModelEngines(tuple(settings.instances)))
        # The engines that the router reported last, by model.
        self._logged_names: dict[str, tuple[str, ...]] = {}
        # By request id, until the request is compared. Those of requests that fail, or that were compared before, stay.
        self._live_placements: OrderedDict[str, LivePlacement] = OrderedDict()
        # Whether the log has whole requests. These are known only when they have ended.
        self._from_log = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Compare until `stop` is set. Then compare the requests that are still open, without their outcomes."""
        tasks = [self._understand()]
        if self._settings.access_log is not None:
            tasks.append(self._follow(self._settings.access_log))
        if self._fleet is not None:
            tasks.append(self._fleet.watch(self._add_models))
        running = [asyncio.create_task(task) for task in tasks]
        # This task is not cancelled, because a running batch of the comparison must end before the last one starts.
        comparing = asyncio.create_task(self._compare(stop))
        stopping = asyncio.create_task(stop.wait())
        try:
            # The other tasks end only by a fault. A fault ends the shadow, which does not affect the traffic.
            await asyncio.wait([stopping, comparing, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in (comparing, *running):
                if task.done():
                    task.result()
        finally:
            stop.set()
            for task in (stopping, *running, *self._tasks):
                task.cancel()
            await asyncio.gather(comparing, stopping, *running, *self._tasks, return_exceptions=True)
            if self._fleet is not None:
                await self._fleet.close()
        await asyncio.to_thread(self._observe, self._due(math.inf, math.inf))
        await asyncio.to_thread(self._comparison.finish)

    def summary(self) -> dict[str, Any]:
        """Return the report as JSON."""
        summary = summary_of(self._comparison.summaries(), self.telemetry.counts_left_out())
        summary["waiting"] = len(self._pending) + self._comparison.open
        if self._fleet is not None:
            summary["now"] = self._fleet.summary()
        return summary

    async def _understand(self) -> None:
        while True:
            mirrored = await self._backlog.get()
            await self._read(
                mirrored.path,
                mirrored.headers,
                mirrored.body,
                mirrored.at,
                None if self._settings.access_log else RequestOutcome(),
            )

    async def _read(self, path: str, headers: Headers, body: bytes, at: float, ended: RequestOutcome | None) -> None:
        try:
            asked, placement = await self._reader.read(path, headers, body, at)
        except UnusableRequest as reason:
            log.debug("a request cannot be used", reason=str(reason))
            self.telemetry.excluded.labels(reason.reason).inc()
            return
        except Exception:
            # An unexpected error in one request must not end the comparison of all others.
            log.exception("a request could not be read because of a fault")
            self.telemetry.excluded.labels("fault").inc()
            return
        if not self._comparison.engines_of(asked.model):
            self.telemetry.excluded.labels("model").inc()
            return
        if self._fleet is not None and asked.keys:
            task = asyncio.create_task(self._ask_live_placement(asked.request_id, placement))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._pending.add(asked, ended)

    async def _ask_live_placement(self, request_id: str, placement: Any) -> None:
        assert self._fleet is not None
        now = await self._fleet.ask(placement)
        if now is not None:
            self._live_placements[request_id] = now
            if len(self._live_placements) > MAX_LIVE_PLACEMENTS:
                self._live_placements.popitem(last=False)

    async def _follow(self, log_file: Path) -> None:
        async for line in follow(log_file):
            if not line.strip():
                continue
            try:
                entry = read_line(line)
                ended, request = entry.end, entry.request
                if self._pending.end(entry.id, ended, follows=request is None) or request is None:
                    continue
                headers = Headers([("X-Request-ID", entry.id), ("X-Session-ID", entry.session)])
                arrived_at = entry.arrived_at
            except LineError as error:
                log.debug("a line of the access log is ignored", reason=str(error))
                self.telemetry.excluded.labels("invalid").inc()
                continue
            self._from_log = True
            path, body = request
            await self._read(path, headers, body, arrived_at, ended)

    async def _add_models(self, models: dict[str, ServedModel]) -> None:
        """Add the models and engines that the router reported."""
        for name, model in models.items():
            if not self._reader.has_model(name):
                source = self._settings.tokenizer_map().get(name) or model.root
                try:
                    await asyncio.to_thread(self._reader.add_model, name, source)
                except TokenizerNotFound as missing:
                    self._reader.add_model_without_tokenizer(name, str(missing))
            # Engines load adapters while they run, and of a model in `tokenizers` only the router knows the names.
            self._reader.add_names(name, model.served_names, model.lora_names)
            engines = model.engines
            names = tuple(self._settings.instances) or engines.names
            if names == self._comparison.engines_of(name):
                continue
            self._comparison.add_engines(name, ModelEngines(names, engines.kv_capacity_tokens, engines.max_model_len))
            if self._comparison.engines_of(name) == names:
                log.info("the engines of a model are set", model=name, instances=len(names))
            elif self._logged_names.get(name) != names:
                log.warning("the engines of a model have changed; its modelled fleets have not", model=name)
            self._logged_names[name] = names

    async def _compare(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            now = time.time()
            complete = now - self._settings.window_s if self._from_log else self._backlog.read_until
            if due := self._due(now, complete):
                await asyncio.to_thread(self._observe, due)
                self.telemetry.behind.set(time.time() - due[-1].timestamp_ms / 1e3)
            elif not len(self._pending):
                self.telemetry.behind.set(0.0)
            self.telemetry.waiting.set(len(self._pending))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()

    def _due(self, now: float, complete_until: float) -> list[ObservedRequest]:
        """Return the requests to compare, and count the failed ones before them. As PendingRequests.due."""
        failed = self._pending.failed
        due = list(self._pending.due(now, complete_until))
        self.telemetry.excluded.labels("failed").inc(self._pending.failed - failed)
        return due

    def _observe(self, due: list[ObservedRequest]) -> None:
        for request in due:
            self._comparison.observe(request)
            now = self._live_placements.pop(request.request_id, None)
            if now is not None and self._fleet is not None:
                self._fleet.totals.add(now, request.instance)


async def _serve(settings: ServeSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        shadow = ShadowService(settings)
        server = Server(shadow.handler, ServerLimits(settings.max_body_bytes, BACKLOG_BYTES))
        with listening(settings, "listen"):
            bound = await server.start(parse_address(settings.listen))
    except (OSError, ValueError, TokenizerNotFound) as error:
        raise SystemExit(f"pointsman shadow serve: {error}") from None
    typer.echo(f"send mirrored requests to http://{bound}")
    console = make_console()

    async def report() -> None:
        while settings.report_interval_s:
            await asyncio.sleep(settings.report_interval_s)
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
    """Run `pointsman shadow serve` until SIGTERM or SIGINT. Blocks. Exits with status 1 and the reason if it cannot start."""
    configure_logs("shadow", settings.log_level)
    uvloop.run(_serve(settings))
