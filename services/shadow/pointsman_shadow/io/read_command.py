"""`pointsman shadow read`: replays a router's access log, or a record of a serving shadow, in virtual time."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog
import typer

from pointsman_common.io.logs import configure_logs
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.io.tokenizer_files import TokenizerNotFound
from pointsman_lab.report.terminal import make_console
from pointsman_lab.simulation.counterfactual import ObservedRequest
from pointsman_lab.workload.trace_files import lines_of
from pointsman_lab.workload.traces import TraceError
from pointsman_shadow.core.access_log import LineError, LogLine, read_line
from pointsman_shadow.core.pending_requests import PendingRequests
from pointsman_shadow.core.report import print_report, summary_of
from pointsman_shadow.io.placement_comparison import ModelEngines, PlacementComparison
from pointsman_shadow.io.request_reader import RequestReader, UnusableRequest
from pointsman_shadow.io.settings import ReadSettings

log = structlog.get_logger()

_recorded = msgspec.json.Decoder(ObservedRequest)


class _Named(msgspec.Struct):
    """The model of a request body; other fields are ignored."""

    model: str = ""


class LogReader:
    """Compares the requests of one log. The log is read twice, first for its engines."""

    def __init__(self, settings: ReadSettings) -> None:
        """Raises ValueError, OSError and TokenizerNotFound for settings that cannot be used."""
        self._settings = settings
        self.comparison = PlacementComparison(settings)
        self._aliases = settings.alias_map()
        self._reader = RequestReader(settings.tokenizer_map(), self._aliases)
        self.excluded: Counter[str] = Counter()

    async def run(self) -> None:
        """Read and compare the whole log. Raises TraceError if the file cannot be read, ValueError if it has no usable request or
        the settings do not fit together."""
        path = self._settings.log
        recorded = _is_recorded(path)
        named = tuple(self._settings.instances)
        for model, found in (self._recorded_engines() if recorded else self._logged_engines()).items():
            if names := named or tuple(sorted(found)):
                self.comparison.add_engines(model, ModelEngines(names))
            else:
                raise ValueError("instances: the log names no upstream; list the engines, under any names")
        if not self.comparison.summaries():
            raise ValueError(f"{path}: no request is for a known model")
        await (self._read_recorded() if recorded else self._read_log())
        self.comparison.finish()

    async def _read_recorded(self) -> None:
        for _, line in lines_of(self._settings.log):
            self.comparison.observe(_recorded.decode(line))

    async def _read_log(self) -> None:
        window_s = self._settings.window_s
        pending = PendingRequests(window_s, self._settings.output_tokens)
        for number, line in self._lines():
            try:
                request, ended_at = line.request, line.ended_at
                if request is None:
                    raise UnusableRequest("without a prompt", "neither body nor prompt_token_ids")
                path, body = request
                headers = Headers([("X-Request-ID", line.id or f"line-{number}"), ("X-Session-ID", line.session)])
                asked, _ = await self._reader.read(path, headers, body, line.arrived_at)
                if not self.comparison.engines_of(asked.model):
                    raise UnusableRequest("model", "no engine of the model is known")
                pending.add(asked, line.end)
            except (LineError, UnusableRequest) as error:
                self.excluded[error.reason if isinstance(error, UnusableRequest) else "unreadable lines"] += 1
                log.debug("a line of the log is ignored", line=number, reason=str(error))
                continue
            for observed in pending.due(ended_at, ended_at - window_s):
                self.comparison.observe(observed)
        for observed in pending.due(math.inf, math.inf):
            self.comparison.observe(observed)
        self.excluded["failed"] += pending.failed

    def _lines(self, *, counting: bool = True) -> Iterator[tuple[int, LogLine]]:
        for number, line in lines_of(self._settings.log):
            try:
                yield number, read_line(line)
            except LineError as error:
                if counting:
                    self.excluded["unreadable lines"] += 1
                    log.debug("a line of the log is ignored", line=number, reason=str(error))

    def _logged_engines(self) -> dict[str, set[str]]:
        """Return the upstreams of each known model."""
        found: dict[str, set[str]] = {}
        for _, line in self._lines(counting=False):
            try:
                request, ended = line.request, line.end
                asked = msgspec.json.decode(request[1], type=_Named).model if request else ""
            except (LineError, msgspec.DecodeError):
                continue
            model = self._aliases.get(asked, asked)
            if self._reader.has_model(model):
                found.setdefault(model, set()).update({ended.instance} - {""} if not ended.failed else ())
        return found

    def _recorded_engines(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for number, line in lines_of(self._settings.log):
            try:
                request = _recorded.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{self._settings.log}:{number}: {error}") from None
            found.setdefault(request.model, set()).update({request.instance} - {""})
        return found


def _is_recorded(path: Path) -> bool:
    """Return whether a file was written by --record: its first line has blocks."""
    _, line = next(lines_of(path), (0, b"{}"))
    try:
        return "hash_ids" in msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return False


def run_read(settings: ReadSettings) -> None:
    """Run `pointsman shadow read`: compare the log's requests and print the report. Exits with status 2 if the log or a setting
    cannot be used."""
    configure_logs("shadow", settings.log_level)
    try:
        reader = LogReader(settings)
        asyncio.run(reader.run())
    except (TraceError, TokenizerNotFound, ValueError, OSError) as error:
        typer.echo(f"pointsman shadow read: {error}", err=True)
        raise typer.Exit(2) from None
    summary = summary_of(reader.comparison.summaries(), reader.excluded)
    print_report(make_console(), summary, settings.policy, settings.assumed)
    if settings.out is not None:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(summary, indent=1) + "\n")
