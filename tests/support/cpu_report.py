"""Prints the tests that took the most CPU, with the processes that they started and ended, after a run.

On a busy machine a test's duration tells how busy the machine was; its CPU time tells what the test costs.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator

import pytest

SHOWN, LEAST_S = 20, 3.0


class CpuReport:
    """Adds up the CPU time of each test with its fixtures, s. A fixture of a wider scope counts for the test that sets it up, or
    the last one that uses it."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure one test."""
        before = _cpu_s()
        try:
            return (yield)
        finally:
            self.cpu_s[item.nodeid] += _cpu_s() - before

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests with the most CPU time."""
        most = sorted(self.cpu_s.items(), key=lambda item: -item[1])[:SHOWN]
        shown = [(name, cpu_s) for name, cpu_s in most if cpu_s >= LEAST_S]
        if not shown:
            return
        terminalreporter.section(f"most CPU time, of {sum(self.cpu_s.values()):,.0f} s in all")
        for name, cpu_s in shown:
            terminalreporter.write_line(f"{cpu_s:8.1f}s {name}")


def _cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
