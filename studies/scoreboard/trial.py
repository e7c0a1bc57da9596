"""One trial of the scoreboard: a router in front of the engines, a draw of sessions sent to it, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.rivals.contenders import Contender
from bench.rivals.engines import Fleet
from bench.rivals.process_cpu import MachineTime, cpu_s, resident_mb
from bench.rivals.running import RunningRouter, running_router
from pointsman_lab.report.request_record import RequestRecord
from studies.scoreboard.measures import Measures, measure

# Sends a trial's requests to a base URL, and returns their records.
Send = Callable[[str], list[RequestRecord]]


@dataclass
class Meter:
    """CPU time of a router's processes and the engines' own counts over the time between start() and read()."""

    router: RunningRouter  # whose processes are looked up at start()
    fleet: Fleet  # the engines behind it
    _pids: Mapping[str, list[int]] = field(default_factory=dict)
    _beside: Mapping[str, list[int]] = field(default_factory=dict)
    _before: Mapping[str, float] = field(default_factory=dict)
    _counts: tuple[float, float] = (0.0, 0.0)
    _machine: MachineTime = field(default_factory=MachineTime.now)
    _engines_s: float = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._pids, self._beside = self.router.processes(), self.router.processes(counted=False)
        self._counts = self.fleet.cached_and_asked()
        self._before = self._cpu()
        self._engines_s = cpu_s(self.fleet.pids)
        self._machine = MachineTime.now()

    def read(self) -> dict[str, object]:
        """Return what was counted: `cpu_s` by part, `beside_cpu_s`, `engines_cpu_s`, `rss_mb`, `cached` and `asked` tokens, and
        the machine's `idle` share."""
        idle = MachineTime.now().idle_share_since(self._machine)
        # A process that has ended counts 0.
        spent = {name: max(value - self._before[name], 0.0) for name, value in self._cpu().items()}
        hits, queries = self.fleet.cached_and_asked()
        return {
            "cpu_s": {name: value for name, value in spent.items() if name in self._pids},
            "beside_cpu_s": sum(value for name, value in spent.items() if name in self._beside),
            "engines_cpu_s": cpu_s(self.fleet.pids) - self._engines_s,
            "rss_mb": resident_mb(pid for pids in self._pids.values() for pid in pids),
            "cached": hits - self._counts[0],
            "asked": queries - self._counts[1],
            "idle": idle,
        }

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_s(pids) for name, pids in {**self._beside, **self._pids}.items()}


def run_trial(contender: Contender, fleet: Fleet, folder: Path, send: Send) -> Measures:
    """Have `send` send requests through a router in front of `fleet`, whose caches are empty; return the trial's measures. Raises
    NotRunnable if the router does not answer."""
    with running_router(contender, fleet, folder) as router:
        meter = Meter(router, fleet)
        meter.start()
        began = time.monotonic()
        records = send(router.url)
        counted, span_s = meter.read(), time.monotonic() - began
    return measure(records, counted, span_s)
