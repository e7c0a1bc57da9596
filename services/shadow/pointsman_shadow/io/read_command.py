"""`pointsman shadow read`: replays a router's access log, or a record of a serving shadow, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import typer

from pointsman_common.io.logs import configure_logs
from pointsman_gateway.io.tokenizer_files import TokenizerNotFound
from pointsman_lab.report.terminal import make_console
from pointsman_lab.simulation.counterfactual import ObservedRequest
from pointsman_lab.workload.trace_files import lines_of
from pointsman_lab.workload.traces import TraceError
from pointsman_shadow.core.access_log import LineError, read_line
from pointsman_shadow.core.report import print_report, summary_of
from pointsman_shadow.io.logged_requests import FORMATS, LineCauses, LoggedRequests
from pointsman_shadow.io.placement_comparison import ModelEngines, PlacementComparison
from pointsman_shadow.io.request_reader import RequestReader
from pointsman_shadow.io.settings import ReadSettings

# Said with each report, because both commands read the same log.
BESIDE_COMPARE = (
    "Against the recorded placement, at the recorded times. `pointsman compare` answers another question, with other figures: "
    "docs/compare.md"
)
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
        self.causes = LineCauses()

    async def run(self) -> None:
        """Read and compare the whole log. Raises TraceError if the file cannot be read, ValueError if it has no usable request,
        with the causes, or if the settings do not fit together."""
        path = self._settings.log
        recorded = _is_recorded(path)
        named = tuple(self._settings.instances)
        engines = self._recorded_engines() if recorded else self._logged_engines()
        for model, found in engines.items():
            if names := named or tuple(sorted(found)):
                self.comparison.add_engines(model, ModelEngines(names))
            else:
                raise ValueError("instances: the log names no upstream; list the engines, under any names")
        if not engines:
            raise ValueError(f"{path}: no line has a request that can be used\n{await self._why_none()}")
        await (self._read_recorded() if recorded else self._read_log())
        self.comparison.finish()

    async def _read_recorded(self) -> None:
        for _, line in lines_of(self._settings.log):
            self.comparison.observe(_recorded.decode(line))

    async def _read_log(self) -> None:
        settings = self._settings
        logged = LoggedRequests(
            settings.log,
            self._reader,
            settings.window_s,
            settings.output_tokens,
            lambda model: bool(self.comparison.engines_of(model)),
        )
        async for observed in logged.read():
            self.comparison.observe(observed)
        self.causes = logged.causes
        self.excluded = logged.causes.counts + Counter({"failed": logged.failed})

    def _logged_engines(self) -> dict[str, set[str]]:
        """Return the upstreams of each known model."""
        found: dict[str, set[str]] = {}
        for _, raw in lines_of(self._settings.log):
            try:
                line = read_line(raw)
                request, ended = line.request, line.end
                asked = msgspec.json.decode(request[1], type=_Named).model if request else ""
            except (LineError, msgspec.DecodeError):
                continue
            model = self._aliases.get(asked, asked)
            if self._reader.has_model(model):
                found.setdefault(model, set()).update({ended.instance} - {""} if not ended.failed else ())
        return found

    async def _why_none(self) -> str:
        """Return the causes for which no line can be used, one a line."""
        settings = self._settings
        logged = LoggedRequests(settings.log, self._reader, settings.window_s, settings.output_tokens)
        async for _ in logged.read():
            pass
        causes = [*logged.causes.lines()]
        if logged.failed:
            causes.append(f"{logged.failed:,} failed requests")
        if logged.causes.counts["model"]:
            causes.append("give the tokenizer of each model: --tokenizers MODEL=FOLDER")
        return "\n".join(f"  {cause}" for cause in [*causes, FORMATS])

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
    for cause in reader.causes.lines():
        typer.echo(f"  {cause}")
    typer.echo(BESIDE_COMPARE)
    if settings.out is not None:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(summary, indent=1) + "\n")
