"""A service of Pointsman in a process that measures how long the turns of its event loop take.

`python -m bench.timed_service FILE SERVICE FLAGS...` runs `pointsman SERVICE FLAGS...`. On SIGUSR1 it appends a line of JSON to
FILE: the longest turn since the last signal and the memory in MB. The turn is in ms, both of the CPU time of the loop's thread
and of the clock. CPU time is what the service needs; clock time also includes delays by other threads and processes. A timer of
1 ms reads both, so a turn may be reported up to 1 ms too long.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

TICK_S = 0.001


class TurnTimer:
    """Measures the longest time between two ticks of an event loop; from clock times the tick's interval is subtracted."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cpu_s, self._clock_s = time.thread_time(), time.perf_counter()
        self._longest_cpu_s = self._longest_s = 0.0

    def start(self) -> None:
        """Start the timer and the signal handler in the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._tell)
        loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        cpu_s, clock_s = time.thread_time(), time.perf_counter()
        self._longest_cpu_s = max(self._longest_cpu_s, cpu_s - self._cpu_s)
        self._longest_s = max(self._longest_s, clock_s - self._clock_s - TICK_S)
        self._cpu_s, self._clock_s = cpu_s, clock_s
        loop.call_later(TICK_S, self._tick, loop)

    def _tell(self) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
        turn = {"cpu_ms": self._longest_cpu_s * 1e3, "clock_ms": self._longest_s * 1e3, "rss_mb": resident}
        self._longest_cpu_s = self._longest_s = 0.0
        with self._file.open("a") as file:
            file.write(json.dumps(turn) + "\n")


if __name__ == "__main__":
    run, turn_timer = uvloop.run, TurnTimer(Path(sys.argv[1]))

    def run_timed(main: Coroutine[Any, Any, Any], **loop: Any) -> None:
        """Run `main` as uvloop.run() does, with the timer."""

        async def timed() -> None:
            turn_timer.start()
            await main

        run(timed(), **loop)

    uvloop.run = run_timed  # type: ignore[assignment]
    sys.argv = ["pointsman", *sys.argv[2:]]
    runpy.run_module("pointsman_cli.main", run_name="__main__", alter_sys=True)
