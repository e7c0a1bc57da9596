"""How a command starts many emulated engines."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from pointsman_lab.live import local_fleet
from pointsman_lab.live.local_fleet import ChildProcesses, start_engines


class Recorded(ChildProcesses):
    """Children that are only recorded. `most`: the highest number of those that had started and not told their URL."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.told = 0
        self.most = 0

    def start(self, name: str, arguments: Sequence[str], environment: object = None) -> None:
        self.started.append(name)
        self.most = max(self.most, len(self.started) - self.told)

    def read_url(self, name: str, timeout_s: float = 0.0) -> str:
        assert name in self.started
        self.told += 1
        return f"http://{name}"


@pytest.mark.parametrize("count", [1, 3, 4, 64])
def test_engines_start_a_few_at_a_time_and_are_counted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    children, counted = Recorded(), list[int]()
    urls = start_engines(children, count, [], counted.append)
    assert urls == [f"http://engine-{number}" for number in range(count)]
    assert children.started == [f"engine-{number}" for number in range(count)]
    assert children.most <= 2 * local_fleet.STARTS_PER_CPU
    assert counted == list(range(1, count + 1))
