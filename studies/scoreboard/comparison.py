"""What the board's trials say: each measure of each router with its ratio to Pointsman's in the same rounds, and who wins.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.rivals.contenders import OWN_POLICIES, POINTSMAN
from pointsman_lab.experiments.paired_statistics import Estimate, estimate
from studies.scoreboard.board import Cell, StoredTrial
from studies.scoreboard.measures import Measures


@dataclass(frozen=True)
class Column:
    """A measure as the page shows it: `value` x `factor` in `unit`. `digits`: decimals. The lower the better, unless `higher`."""

    name: str  # heading in tables
    unit: str
    value: Callable[[Measures], float | None]
    factor: float = 1.0
    digits: int = 2
    higher: bool = False


def _point(field: str, key: str) -> Callable[[Measures], float | None]:
    def value(measures: Measures) -> float | None:
        points: dict[str, float] | None = getattr(measures, field)
        return points[key] if points else None

    return value


def _latency(name: str, field: str, unit: str = "s", factor: float = 1.0, digits: int = 2) -> list[Column]:
    return [Column(f"{name} {key}", unit, _point(field, key), factor, digits) for key in ("p50", "p90", "p99")]


TTFT = _latency("TTFT", "ttft_s")
TPOT = _latency("TPOT", "tpot_s", "ms", 1e3, 1)
E2E = _latency("E2E", "e2e_s")
SESSION = Column("session mean", "s", _point("session_s", "mean"), 1.0, 1)
HITS = Column("hit ratio", "%", lambda measures: measures.hit_ratio, 100.0, 1, higher=True)
CPU = Column("router CPU/request", "ms", lambda measures: measures.router_cpu_ms, 1.0, 2)
# A router that failed a larger share of its requests cannot win: only answers have latencies.
FAILED_SHARE = 0.01
# The measures of the first table: who wins in each cell.
HEADLINES = (TTFT[0], TTFT[1], TPOT[1], E2E[1], SESSION, HITS, CPU)


@dataclass(frozen=True)
class Entry:
    """One router's measure in one cell: its mean over rounds, and its ratio to the reference with the ratio's 95 % interval; all
    None where it was not measured, the ratio also where the reference was not."""

    mean: float | None
    ratio: float | None = None
    low: float = 0.0
    high: float = math.inf

    @property
    def sure(self) -> bool:
        """Whether the interval of the ratio leaves out 1."""
        return self.ratio is not None and not self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class Verdict:
    """Who wins a measure in a cell, and Pointsman's best policy against the best other router: `entry` is that router's, with its
    ratio to Pointsman's policy `own`."""

    winner: str
    own: str
    rival: str
    entry: Entry


class Comparison:
    """The trials of one cell."""

    def __init__(self, cell: Cell, trials: Iterable[StoredTrial]) -> None:
        self.cell = cell
        self.problems: dict[str, str] = {}
        self.trials: dict[str, dict[int, Measures]] = {}
        for trial in trials:
            if trial.cell == cell.name and trial.measures is not None:
                self.trials.setdefault(trial.contender, {})[trial.round] = trial.measures
            elif trial.cell == cell.name:
                self.problems[trial.contender] = trial.problem

    @property
    def reference(self) -> str:
        """The policy of Pointsman that all are compared with: the first of OWN_POLICIES that was run; "" if none was."""
        own = [f"{POINTSMAN} {policy}" for policy in OWN_POLICIES]
        return next((name for name in own if name in self.trials), "")

    @property
    def rounds(self) -> int:
        """Number of rounds that the router with the most has."""
        return max(map(len, self.trials.values()), default=0)

    def ranked(self, column: Column = TTFT[1]) -> list[str]:
        """Return the routers by a measure, the best first; those that were not measured last."""
        sign = -1 if column.higher else 1

        def key(name: str) -> float:
            mean = self.entry(name, column, "").mean
            return math.inf if mean is None else sign * mean

        return sorted(self.trials, key=key)

    def failed_share(self, name: str) -> float:
        """Return the share of a router's requests that failed, 0 to 1."""
        rounds = self.trials[name].values()
        return sum(trial.failed for trial in rounds) / max(sum(trial.requests for trial in rounds), 1)

    def entry(self, name: str, column: Column, reference: str) -> Entry:
        """Return a router's measure, and its ratio to `reference` ("": none) over the rounds that both have."""
        own = _values(self.trials.get(name, {}), column)
        if not own:
            return Entry(None)
        mean = sum(own.values()) / len(own) * column.factor
        base = _values(self.trials.get(reference, {}), column)
        pairs = [(own[number], base[number]) for number in own if number in base]
        if not pairs or not all(first > 0 and second > 0 for first, second in pairs):
            return Entry(mean)
        return Entry(mean, *_ratio([first / second for first, second in pairs]))

    def verdict(self, column: Column) -> Verdict | None:
        """Return who wins among those that answered nearly all; None where only Pointsman or only others did."""
        order = [
            name
            for name in self.ranked(column)
            if self.entry(name, column, "").mean is not None and self.failed_share(name) <= FAILED_SHARE
        ]
        own = next((name for name in order if name.startswith(POINTSMAN)), "")
        rival = next((name for name in order if not name.startswith(POINTSMAN)), "")
        if not own or not rival:
            return None
        return Verdict(order[0], own, rival, self.entry(rival, column, own))


def _values(rounds: Mapping[int, Measures], column: Column) -> dict[int, float]:
    return {number: value for number, measures in rounds.items() if (value := column.value(measures)) is not None}


def _ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of paired ratios and its 95 % interval, Student's on the logarithms."""
    logs: Estimate = estimate([math.log(ratio) for ratio in ratios])
    return math.exp(logs.mean), _exp(logs.low), _exp(logs.high)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
