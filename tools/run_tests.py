"""All tests, in runs side by side: while one waits for its processes, others have the machine. Those that only compute are of low
priority. `--fast` leaves out real engines; other arguments go to the runs that start processes. The first run's report is shown
as it goes, the others' after it. Exits with a failure's status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
ENGINES, UNIT, VIRTUAL = "tests/engine", "tests/unit", "tests/virtual"
OPTIONS = ("--durations=20", "--durations-min=5")
# Of a low priority, what only computes takes as long as a busy machine lets it; a hang is found all the same.
PATIENT = ("--timeout=900",)
PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class Run:
    """One pytest. Several that start processes would take each other's ports: each gets some of its own."""

    name: str
    paths: tuple[str, ...]
    niceness: int
    computes: bool = False


# The second takes what the others do not name.
RUNS = (
    Run("real engines", (ENGINES,), 0),
    Run("processes", tuple(f"--ignore={path}" for path in (ENGINES, UNIT, VIRTUAL)), 1),
    # Low enough to leave the others' waits alone, and not so low that a busy machine starves it.
    Run("unit tests and virtual time", (UNIT, VIRTUAL), 4, computes=True),
)


def _begin(
    number: int, run: Run, arguments: list[str], report: IO[bytes] | None, folder: str
) -> subprocess.Popen[bytes]:
    # The cache of what failed is the first run's.
    cache = ("-p", "no:cacheprovider") if number else ()
    share = len(PORTS) // len(RUNS)
    ports = PORTS[number * share : (number + 1) * share]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *OPTIONS, *cache, *run.paths, *(PATIENT if run.computes else arguments)],
        cwd=ROOT,
        env=os.environ | {"POINTSMAN_TEST_PORTS": f"{ports.start}-{ports.stop}", "PYTEST_DEBUG_TEMPROOT": folder},
        stdout=report,
        stderr=None if report is None else subprocess.STDOUT,
        preexec_fn=lambda: os.nice(run.niceness),
    )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status. An interrupt from the terminal reaches all runs, and each still says what it had done."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _all_ended(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """The exit statuses. The last run gives way to nobody any more once the others are over, where one may raise its priority."""
    *others, last = processes
    statuses = [_ended(process) for process in others]
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, last.pid, 0)
    return [*statuses, _ended(last)]


def main(arguments: list[str]) -> int:
    # Hundreds of processes import the same files, and each would compile them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = [run for run in RUNS if "--fast" not in arguments or run.paths != (ENGINES,)]
    arguments = [word for word in arguments if word != "--fast"]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        reports = [stack.enter_context(tempfile.TemporaryFile()) for _ in runs[1:]]
        try:
            for number, run in enumerate(runs):
                # Runs that share pytest's folder fail where two of them clear away what an earlier one left.
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="p", ignore_cleanup_errors=True))
                processes.append(_begin(number, run, arguments, reports[number - 1] if number else None, folder))
            statuses = _all_ended(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # its fixtures end what they started
                    process.wait()
            for run, report in zip(runs[1:], reports, strict=True):
                print(f"\n{run.name}:", flush=True)
                report.seek(0)
                shutil.copyfileobj(report, sys.stdout.buffer)
                sys.stdout.buffer.flush()
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
