"""`pointsman demo`: runs emulated engines, the whole control plane and a short agentic replay, then explains a placement.

Everything runs on this machine in child processes, which all end with the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pointsman_lab.live.local_fleet import (
    ChildProcesses,
    LocalFleetError,
    PlaneAddresses,
    begin_plane,
    start_engines,
    wait_for_plane,
)
from pointsman_lab.live.replay_command import ReplayError, ReplaySettings, check_writable, replay, save
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import print_summary
from pointsman_lab.report.terminal import make_console
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TINY_TRACE, TraceError
from pointsman_router.core.policy.registry import DEFAULT_POLICY

# Number of rows that the live table shows.
SHOWN_ROWS = 16
# Of more engines than these the start is told after each so many.
TOLD_EVERY = 8


class DemoSettings(BaseSettings):
    """Settings of the demo; with the defaults it runs on a laptop and takes half a minute."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_DEMO_")

    engines: int = Field(4, ge=1, le=64, description="number of emulated engines")
    listen_port: int = Field(8080, ge=1, le=65535, description="port of the gateway; if taken, the next free port")
    router_port: int = Field(50051, ge=1, le=65535, description="port of the router; if taken, the next free port")
    console_port: int = Field(9102, ge=1, le=65535, description="port of the console; if taken, the next free port")
    policy: str = Field(
        DEFAULT_POLICY,
        description="placement policy, NAME or NAME:SETTING=VALUE,...; if not given, that of POINTSMAN_ROUTER_POLICY counts",
    )
    trace: Path = Field(TINY_TRACE, description="trace to replay")
    time_scale: float = Field(0.2, gt=0, description="factor on the trace's times")
    token_scale: float = Field(0.25, gt=0, description="factor on the trace's prompt and answer lengths")
    speedup: float = Field(1.0, gt=0, description="factor on the speed of the modelled engines")
    out: Path = Field(Path("runs/demo"), description="folder of the run's bundle")
    keep: bool = Field(False, description="keep the fleet running after the replay, until Ctrl-C")


def run(settings: DemoSettings) -> None:
    """Run the demo. Exits with 1 if a request failed or a process did not start, with 130 on Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise typer.Exit(run_demo(settings))


def run_demo(settings: DemoSettings) -> int:
    """Run the demo and end all its processes; return the exit status, 0 if every request was answered."""
    console = make_console()
    folder = Path(tempfile.mkdtemp(prefix="pointsman-demo-"))
    try:
        load_trace(settings.trace)
        check_writable(settings.out)
        with ChildProcesses(folder) as processes:
            return _run(settings, console, processes, folder)
    except (LocalFleetError, TraceError, ReplayError) as error:
        console.print(f"[red]pointsman demo: {error}[/red]", highlight=False)
        for log in sorted(folder.glob("*.log")):
            if text := log.read_text(errors="replace").strip():
                console.print(f"--- {log.name}\n{text[-2_000:]}", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    finally:
        shutil.rmtree(folder)


def _run(settings: DemoSettings, console: Console, processes: ChildProcesses, folder: Path) -> int:
    began = time.monotonic()
    console.print(f"starting {settings.engines} emulated engines, a router, an agent and a gateway ...")

    def told(ready: int) -> None:
        if settings.engines > TOLD_EVERY and (not ready % TOLD_EVERY or ready == settings.engines):
            console.print(f"{ready} of {settings.engines} engines run", highlight=False)

    urls = start_engines(processes, settings.engines, given_flags(settings, "speedup"), told)
    wanted = (settings.listen_port, settings.router_port, settings.console_port)
    plane = begin_plane(processes, folder, urls, given_flags(settings, "policy"), wanted=wanted)
    wait_for_plane(processes, plane, len(urls))
    console.print(
        f"ready after {time.monotonic() - began:.1f} s: OpenAI API on {plane.url}/v1, router on {plane.router}"
    )
    console.print(f"watch it in the console: http://{plane.console}", highlight=False)
    asked = ReplaySettings(
        trace=settings.trace,
        url=plane.url,
        time_scale=settings.time_scale,
        token_scale=settings.token_scale,
        router=plane.router,
        out=settings.out,
    )
    with _table(console) as table:
        replayed = asyncio.run(replay(asked, table.add))
    summary = save(asked, replayed)
    if replayed.interrupted:
        raise KeyboardInterrupt
    console.print()
    print_summary(console, summary, "demo")
    if idle := idle_words(replayed.records, replayed.caches or {}):
        console.print(idle, highlight=False)
    _explain_a_placement(settings, console, replayed.records, plane)
    if settings.keep:
        console.print("the fleet keeps running; Ctrl-C ends it")
        processes.wait()
    return 1 if summary["failed"] else 0


def given_flags(settings: DemoSettings, name: str) -> list[str]:
    """Return the flag that passes a setting on, if it was given; else none, so that the variables of the part that gets it
    count."""
    return [f"--{name}", str(getattr(settings, name))] if name in settings.model_fields_set else []


def idle_words(records: Sequence[RequestRecord], instances: Iterable[str]) -> str:
    """Return a sentence that names the instances without requests, with figures that explain why; empty if all had requests."""
    idle = sorted(set(instances) - {record.instance for record in records})
    if not idle:
        return ""
    # The number of open requests grows only when a request is sent, so its maximum is at a sending.
    most = max(sum(record.t_send <= at.t_send < record.t_send + record.e2e_s for record in records) for at in records)
    cached = sum(bool(record.cached_tokens) for record in records)
    return (
        f"{', '.join(idle)} got none: at most {most} requests were open at a time, and {cached} of {len(records)} found a part "
        "of their prompt cached where they went"
    )


def _explain_a_placement(
    settings: DemoSettings, console: Console, records: Sequence[RequestRecord], plane: PlaneAddresses
) -> None:
    """Run `pointsman explain` for one placement, and print further commands to run."""
    placed = [record for record in records if record.decision]
    reused = [record for record in placed if record.turn > 1]
    if not placed:
        return
    asked = (reused or placed)[-1]
    explain = ["explain", asked.decision, "--router", plane.router]
    console.print(f"\n[bold]Why did {asked.session} turn {asked.turn} go there?[/bold]")
    console.print(f"$ pointsman {' '.join(explain)}", highlight=False)
    console.file.flush()
    environment = os.environ | {"COLUMNS": str(console.width)}
    subprocess.run([sys.executable, "-m", "pointsman_cli.main", *explain], check=False, timeout=30, env=environment)
    hint = "" if settings.keep else " of a fleet that runs on (option --keep, or POINTSMAN_DEMO_KEEP=true)"
    console.print(f"\n[bold]Ask more[/bold]{hint}:", highlight=False)
    if not shutil.which("pointsman"):
        console.print(f'  export PATH="{Path(sys.executable).parent}:$PATH"', highlight=False, soft_wrap=True)
    for command in (
        f"instances --router {plane.router}",
        f"decisions --router {plane.router} --session {asked.session}",
        f"explain {asked.decision} --router {plane.router}",
        f"explain --prompt {settings.out}/config.json --gateway {plane.url} --router {plane.router}",
        f"analyze {settings.out}",
    ):
        console.print(f"  pointsman {command}", highlight=False, soft_wrap=True)


class _PlacementTable:
    """Shows requests as they end: a live table on a terminal, else one line per request."""

    COLUMNS = ("time", "session", "turn", "instance", "cached", "new", "out", "TTFT", "decision")

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[tuple[str, ...]] = []
        self._live: Live | None = None
        self._totals: dict[str, int] = {}

    def add(self, record: RequestRecord) -> None:
        """Show a finished request."""
        cached = record.cached_tokens or 0
        failed = "" if record.ok else f"FAILED {record.status} {record.error[:60]}"
        row = (
            f"{record.t_send + record.e2e_s:6.1f} s",
            record.session,
            str(record.turn),
            record.instance,
            f"{cached:,}",
            f"{(record.prompt_tokens or 0) - cached:,}",
            str(record.output_tokens or 0),
            failed or f"{(record.ttft_s or 0) * 1e3:,.0f} ms",
            record.decision,
        )
        self._rows.append(row)
        if self._live:
            self._totals[record.instance] = self._totals.get(record.instance, 0) + 1
            self._live.update(self._render())
            return
        if len(self._rows) == 1:
            self._line(self.COLUMNS)
        self._line(row)

    def begin(self) -> Live | None:
        """Return the live display if the console is a terminal, else None."""
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=8)
        return self._live

    def _line(self, cells: Sequence[str]) -> None:
        widths = (9, 8, 5, 17, 8, 8, 5, 9, 0)
        text = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Table:
        counts = "  ".join(f"{name}: {count}" for name, count in sorted(self._totals.items()))
        table = Table(title=f"{len(self._rows)} requests  {counts}", box=None, title_justify="left")
        for column in self.COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self._rows[-SHOWN_ROWS:]:
            table.add_row(*row)
        return table


@contextlib.contextmanager
def _table(console: Console) -> Iterator[_PlacementTable]:
    table = _PlacementTable(console)
    with table.begin() or contextlib.nullcontext():
        yield table
