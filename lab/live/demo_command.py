"""`pointsman demo`: runs emulated engines, the whole control plane and a short agentic replay, then explains a placement.

Everything runs on this machine in child processes, which all end with the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pointsman.lab.live.replay_command import ReplayError, ReplaySettings, replay, save
from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.report.run_summary import print_summary
from pointsman.lab.report.terminal import make_console
from pointsman.lab.workload.trace_files import load_trace
from pointsman.lab.workload.traces import TINY_TRACE, TraceError

# Timeout for each engine's start and for the gateway to be ready, s.
START_S = 180.0
# Time that a child has to end after SIGTERM before it is killed, s.
STOP_S = 40.0
# Number of rows that the live table shows.
SHOWN_ROWS = 16


class DemoSettings(BaseSettings):
    """Settings of the demo; with the defaults it runs on a laptop and takes half a minute."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_DEMO_")

    engines: int = Field(4, ge=1, le=64, description="number of emulated engines")
    listen_port: int = Field(8080, ge=1, le=65535, description="port of the gateway; if taken, the next free port")
    router_port: int = Field(50051, ge=1, le=65535, description="port of the router; if taken, the next free port")
    console_port: int = Field(9102, ge=1, le=65535, description="port of the console; if taken, the next free port")
    policy: str = Field("unified", description="placement policy")
    trace: Path = Field(TINY_TRACE, description="trace to replay")
    time_scale: float = Field(0.2, gt=0, description="factor on the trace's times")
    token_scale: float = Field(0.25, gt=0, description="factor on the trace's prompt and answer lengths")
    speedup: float = Field(1.0, gt=0, description="factor on the speed of the modelled engines")
    out: Path = Field(Path("runs/demo"), description="folder of the run's bundle")
    keep: bool = Field(False, description="keep the fleet running after the replay, until Ctrl-C")


class DemoError(RuntimeError):
    """A part of the demo did not start or ended early; the message names it."""


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
        with _Processes(folder) as processes:
            return _run(settings, console, processes, folder)
    except (DemoError, TraceError, ReplayError) as error:
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


def _run(settings: DemoSettings, console: Console, processes: _Processes, folder: Path) -> int:
    began = time.monotonic()
    console.print(f"starting {settings.engines} emulated engines, a router, an agent and a gateway ...")
    for number in range(settings.engines):
        processes.start(f"engine-{number}", ["emulate", "--port", "0", "--speedup", str(settings.speedup)])
    urls = [processes.read_url(f"engine-{number}", START_S) for number in range(settings.engines)]
    ports = (settings.listen_port, settings.router_port, settings.console_port)
    listen, router, page = (f"127.0.0.1:{_free_port(port)}" for port in ports)
    flags = [flag for url in urls for flag in ("--engine", url)]
    flags += ["--listen", listen, "--router-listen", router, "--router-metrics", "", "--agent-metrics", ""]
    flags += ["--console", page]
    flags += ["--policy", settings.policy, "--state-dir", str(folder / "agent")]
    processes.start("control-plane", ["up", *flags])
    _wait_healthy(f"http://{listen}/health", settings.engines, processes)
    console.print(f"ready after {time.monotonic() - began:.1f} s: OpenAI API on http://{listen}/v1, router on {router}")
    console.print(f"watch it in the console: http://{page}", highlight=False)
    asked = ReplaySettings(
        trace=settings.trace,
        url=f"http://{listen}",
        time_scale=settings.time_scale,
        token_scale=settings.token_scale,
        router=router,
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
    _explain_a_placement(settings, console, replayed.records, listen, router)
    if settings.keep:
        console.print("the fleet keeps running; Ctrl-C ends it")
        processes.wait()
    return 1 if summary["failed"] else 0


def idle_words(records: Sequence[RequestRecord], instances: Iterable[str]) -> str:
    """Return a sentence that names the instances without requests, with figures that explain why; empty if all had requests."""
    idle = sorted(set(instances) - {record.instance for record in records})
    if not idle:
        return ""
    # The number of open requests grows only when a request is sent, so its maximum is at a sending.
    most = max(sum(one.t_send <= at.t_send < one.t_send + one.e2e_s for one in records) for at in records)
    cached = sum(bool(record.cached_tokens) for record in records)
    return (
        f"{', '.join(idle)} got none: at most {most} requests were open at a time, and {cached} of {len(records)} found a part "
        "of their prompt cached where they went"
    )


def _explain_a_placement(
    settings: DemoSettings, console: Console, records: Sequence[RequestRecord], listen: str, router: str
) -> None:
    """Run `pointsman explain` for one placement, and print further commands to run."""
    placed = [record for record in records if record.decision]
    reused = [record for record in placed if record.turn > 1]
    if not placed:
        return
    asked = (reused or placed)[-1]
    explain = ["explain", asked.decision, "--router", router]
    console.print(f"\n[bold]Why did {asked.session} turn {asked.turn} go there?[/bold]")
    console.print(f"$ pointsman {' '.join(explain)}", highlight=False)
    console.file.flush()
    environment = os.environ | {"COLUMNS": str(console.width)}
    subprocess.run([sys.executable, "-m", "pointsman.cli.main", *explain], check=False, timeout=30, env=environment)
    hint = "" if settings.keep else " of a fleet that runs on (POINTSMAN_DEMO_KEEP=true make demo)"
    console.print(f"\n[bold]Ask more[/bold]{hint}:", highlight=False)
    if not shutil.which("pointsman"):
        console.print(f'  export PATH="{Path(sys.executable).parent}:$PATH"', highlight=False, soft_wrap=True)
    for command in (
        f"instances --router {router}",
        f"decisions --router {router} --session {asked.session}",
        f"explain {asked.decision} --router {router}",
        f"explain --prompt README.md --gateway http://{listen} --router {router}",
        f"analyze {settings.out}",
    ):
        console.print(f"  pointsman {command}", highlight=False, soft_wrap=True)


class _Processes:
    """Child processes, ended at the end of the `with` block: the control plane first, then the engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        control_plane = [process for name, process in self._running.items() if not name.startswith("engine")]
        engines = [process for name, process in self._running.items() if name.startswith("engine")]
        for group in (control_plane, engines):
            for process in group:
                process.terminate()
            for process in group:
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdout:
                    process.stdout.close()

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `pointsman ARGUMENTS`; its stderr goes to NAME.log."""
        command = [sys.executable, "-m", "pointsman.cli.main", *arguments]
        with (self._folder / f"{name}.log").open("w") as log:
            # A new process group: a terminal's Ctrl-C must reach the demo alone, which ends its children in order.
            self._running[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
            )

    def read_url(self, name: str, timeout_s: float) -> str:
        """Return the URL at the end of a child's first line. Raises DemoError if no line comes within `timeout_s`."""
        process = self._running[name]
        assert process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout_s) else ""
        if not line.strip():
            raise DemoError(f"{name} did not start: {self._last_log_line(name)}")
        return line.split()[-1]

    def check(self) -> None:
        """Raise DemoError if a child has ended."""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                raise DemoError(f"{name} ended with status {status}: {self._last_log_line(name)}")

    def wait(self) -> None:
        """Block until a child ends. Raises DemoError then."""
        while True:
            self.check()
            time.sleep(0.5)

    def _last_log_line(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no message"


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


def _free_port(wanted: int) -> int:
    """Return the first free port from `wanted` on. Raises DemoError if 200 ports are taken."""
    for port in range(wanted, min(wanted + 200, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoError(f"no free port from {wanted} on")


def _wait_healthy(url: str, engines: int, processes: _Processes) -> None:
    """Wait until the gateway is ready and reports `engines` instances. Raises DemoError with its last answer after START_S."""
    until = time.monotonic() + START_S
    last = "no answer"
    while time.monotonic() < until:
        processes.check()
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                last = response.read(4_000).decode(errors="replace")
            if f'"instances":{engines},' in last.replace(" ", ""):
                return
        except urllib.error.HTTPError as answer:
            last = answer.read(4_000).decode(errors="replace")
        except OSError as error:
            last = str(error)
        time.sleep(0.2)
    raise DemoError(f"the gateway is not ready after {START_S:.0f} s: {last}")
