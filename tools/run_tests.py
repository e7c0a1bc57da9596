"""Runs all tests but those in containers and on other versions of Python as concurrent pytest runs: while one run waits for its
processes, the others use the machine.

Runs that only compute have a low priority. `--fast` leaves out the tests on real engines; other arguments are passed to the runs
that start processes. The first run's report is shown as it is written, the other reports after it. Exits with the status of
largest absolute value of all runs. The other reports stay in the folder REPORTS, also if this process is killed; Ctrl-C and
SIGTERM print their paths.

Of the runs that start processes, up to AGAIN_AT_MOST failed tests are run once more with nothing beside them, and named at the
end: a process that gets no CPU for seconds breaks a test whose code is right. Tests that only compute have no such excuse.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
ENGINES, UNIT, VIRTUAL = "tests/engine", "tests/unit", "tests/virtual"
REPORTS = ".state/test_logs"
# They have targets of their own.
LEFT_OUT = ("tests/containers", "tests/pythons")
OPTIONS = ("--durations=20", "--durations-min=5")
# Ports that the runs share out among them.
PORTS = range(20_000, 32_000)
# Engines are shared: one failure may be followed by those of tests that find an engine out of step. More than these have
# another reason than a busy machine.
AGAIN_AT_MOST = 5
TESTS_FAILED = 1  # pytest's exit status


@dataclass(frozen=True)
class Run:
    """One pytest process. Runs that start processes would take each other's ports, so each run gets its own part of PORTS."""

    name: str
    paths: tuple[str, ...]
    niceness: int
    computes: bool = False


# The second run has all tests that the others do not name.
RUNS = (
    Run("real engines", (ENGINES,), 0),
    Run("processes", tuple(f"--ignore={path}" for path in (ENGINES, UNIT, VIRTUAL, *LEFT_OUT)), 1),
    # This niceness does not delay the other runs' processes, and a busy machine does not starve the run.
    Run("unit tests and virtual time", (UNIT, VIRTUAL), 4, computes=True),
)


@dataclass
class Begun:
    """A run with its process, the file of its report (None: it is shown) and its temporary folder."""

    run: Run
    process: subprocess.Popen[bytes]
    report: IO[bytes] | None
    folder: Path

    def failed(self) -> list[str]:
        """Return the tests that failed, as arguments for pytest."""
        # Of pytest's cache, which has a folder of its own for each run.
        path = self.folder / "cache/v/cache/lastfailed"
        return list(json.loads(path.read_text())) if path.exists() else []


def _begin(number: int, run: Run, arguments: list[str], report: IO[bytes] | None, folder: Path) -> Begun:
    share = len(PORTS) // len(RUNS)
    ports = PORTS[number * share : (number + 1) * share]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", *OPTIONS, "-o", f"cache_dir={folder / 'cache'}", *run.paths),
            *(() if run.computes else arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"POINTSMAN_TEST_PORTS": f"{ports.start}-{ports.stop}", "PYTEST_DEBUG_TEMPROOT": str(folder)},
        stdout=report,
        stderr=None if report is None else subprocess.STDOUT,
        preexec_fn=lambda: os.nice(run.niceness),
    )
    return Begun(run, process, report, folder)


def _all_ended(begun: Sequence[Begun]) -> list[int]:
    """Wait for all runs; return their exit statuses. The last run gets normal priority when the others have ended, if that is
    permitted."""

    def ended(process: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # Ctrl-C also reaches the runs, and each still has to print its report.
                _name_reports(begun)

    *others, last = (started.process for started in begun)
    statuses = [ended(process) for process in others]
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, last.pid, 0)
    return [*statuses, ended(last)]


def _name_reports(begun: Sequence[Begun]) -> None:
    for started in begun:
        if started.report is not None:
            print(f"\nreport of {started.run.name}: {started.report.name}", flush=True)


def main(arguments: list[str]) -> int:
    # With the variable set, each of hundreds of processes would compile the same imported files.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A shell without job control lets what it starts in the background ignore SIGINT, and the runs would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = [run for run in RUNS if "--fast" not in arguments or run.paths != (ENGINES,)]
    arguments = [word for word in arguments if word != "--fast"]
    begun: list[Begun] = []
    with ExitStack() as stack:
        folder = ROOT / REPORTS
        folder.mkdir(parents=True, exist_ok=True)
        reports = [stack.enter_context((folder / f"{run.name.replace(' ', '_')}.txt").open("w+b")) for run in runs[1:]]
        try:
            for number, run in enumerate(runs):
                # With a shared temporary folder a run fails when two runs remove an earlier run's files at the same time.
                own = stack.enter_context(tempfile.TemporaryDirectory(prefix="p", ignore_cleanup_errors=True))
                begun.append(_begin(number, run, arguments, reports[number - 1] if number else None, Path(own)))
            statuses = _all_ended(begun)
        except BaseException:
            _name_reports(begun)
            raise
        finally:
            for started in begun:
                if started.process.poll() is None:
                    started.process.send_signal(signal.SIGINT)  # lets its fixtures end their processes
                    started.process.wait()
            for started in begun:
                if started.report is not None:
                    print(f"\n{started.run.name}:", flush=True)
                    started.report.seek(0)
                    shutil.copyfileobj(started.report, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
        return _after_another_try(begun, statuses)


def _after_another_try(begun: list[Begun], statuses: list[int]) -> int:
    """Return the status of all runs. If nothing but a few tests with processes failed, it is that of these tests, run again."""
    status = max(statuses, key=abs)
    if any(
        code not in (0, TESTS_FAILED) or (code and started.run.computes)
        for started, code in zip(begun, statuses, strict=True)
    ):
        return status
    failed = [test for started in begun for test in started.failed()]
    if not 0 < len(failed) <= AGAIN_AT_MOST:
        return status
    print(f"\n{len(failed)} that failed, with nothing beside:", flush=True)
    status = subprocess.call([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], cwd=ROOT)
    if status == 0:
        print(
            "\nFAILED AT FIRST, AND PASSED ALONE. Find out why, this may be a defect of the code:",
            *failed,
            sep="\n  ",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
