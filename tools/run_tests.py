"""All tests, in two runs side by side: those that only compute, at low priority, fill the pauses of those that start processes
and wait for them. Arguments go to the second run. Exits with the first failure's status; the first run's report comes last."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPUTING = ("tests/unit", "tests/chaos/test_virtual.py")
NICENESS = 15


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--durations=20", "--durations-min=5", *arguments]


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status. An interrupt from the terminal reaches both runs, and each still says what it had done."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def main(arguments: list[str]) -> int:
    # Hundreds of processes import the same files, and each would compile them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as report:
        try:
            runs.append(
                subprocess.Popen(
                    _pytest("-p", "no:cacheprovider", *COMPUTING),  # the cache of what failed is the other run's
                    cwd=ROOT,
                    stdout=report,
                    stderr=subprocess.STDOUT,
                    preexec_fn=lambda: os.nice(NICENESS),
                )
            )
            runs.append(subprocess.Popen(_pytest(*(f"--ignore={path}" for path in COMPUTING), *arguments), cwd=ROOT))
            statuses = [_ended(run) for run in reversed(runs)]
        finally:
            for run in runs:
                if run.poll() is None:
                    run.send_signal(signal.SIGINT)  # its fixtures end what they started
                    run.wait()
        print(f"\n{' and '.join(COMPUTING)}:", flush=True)
        report.seek(0)
        shutil.copyfileobj(report, sys.stdout.buffer)
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
