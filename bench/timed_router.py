"""`pointsman router` in a process that tells how long the turns of its event loop take.

`python -m bench.timed_router FILE FLAGS...`. On SIGUSR1 it appends a line of JSON to FILE: the longest turn since the signal
before, in ms of the CPU time of the loop's thread and by the clock, and its memory in MB. CPU time is what the router needs; the
clock has what others took from it, too.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import selectors
import signal
import sys
import time
from pathlib import Path


class TimedSelector(selectors.DefaultSelector):
    """Takes the time between two of its waits, which is a turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: tuple[float, float] | None = None
        self.longest_cpu_s = self.longest_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The end of a turn, a wait, and the beginning of the next turn."""
        if self._begun is not None:
            cpu_s, clock_s = self._begun
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu_s)
            self.longest_s = max(self.longest_s, time.perf_counter() - clock_s)
        ready = super().select(timeout)
        self._begun = time.thread_time(), time.perf_counter()
        return ready


class TimedLoops(asyncio.DefaultEventLoopPolicy):
    """Every loop has a TimedSelector."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """One, whose figures are told on SIGUSR1."""
        selector = TimedSelector()

        def tell(*_: object) -> None:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
            told = {"cpu_ms": selector.longest_cpu_s * 1e3, "clock_ms": selector.longest_s * 1e3, "rss_mb": resident}
            selector.longest_cpu_s = selector.longest_s = 0.0
            with self._file.open("a") as file:
                file.write(json.dumps(told) + "\n")

        signal.signal(signal.SIGUSR1, tell)
        return asyncio.SelectorEventLoop(selector)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(TimedLoops(Path(sys.argv[1])))
    sys.argv = ["pointsman", "router", *sys.argv[2:]]
    runpy.run_module("pointsman.cli.main", run_name="__main__", alter_sys=True)
