"""CPU time and memory of process trees, and the idle share of the machine, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return a process and all processes below it; empty if it has ended."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        threads = list(Path(f"/proc/{one}/task").glob("*/children"))
        if threads:
            found.append(one)
        for file in threads:
            with contextlib.suppress(OSError):
                waiting += map(int, file.read_text().split())
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, s. Those that have ended count 0.

    /proc/PID/stat counts threads that have ended, too, in whole ticks; schedstat is exact to the nanosecond and counts live
    threads only. Neither is ever more than the truth.
    """
    return sum(max(_ticks_s(pid), _live_s(pid)) for pid in pids)


def resident_mb(pids: Iterable[int]) -> float:
    """Return the resident memory of processes, MB (10^6 bytes)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * _PAGE_BYTES / 1e6


def _ticks_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _live_s(pid: int) -> float:
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(file.read_text().split()[0])
    return total / 1e9


@dataclass(frozen=True)
class MachineTime:
    """The machine's ticks since its start, over all cores."""

    idle: int
    total: int

    @classmethod
    def now(cls) -> MachineTime:
        """Read /proc/stat."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(ticks[3] + ticks[4], sum(ticks))

    def idle_share_since(self, before: MachineTime) -> float:
        """Return the share of the cores' time that was idle since `before`, 0 to 1."""
        return (self.idle - before.idle) / max(self.total - before.total, 1)
