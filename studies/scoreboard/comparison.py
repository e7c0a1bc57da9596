"""What the board's trials say: each measure of each router with its ratio to Pointsman's in the same rounds, who wins, whether
the goals are met, and how far the lab's predictions are off.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.rivals.contenders import OWN, POINTSMAN
from studies.scoreboard.board import HELD_OUT, Cell, StoredTrial
from studies.scoreboard.measures import Measures
from studies.scoreboard.sequential import interval


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
COLUMNS = {column.name: column for column in (*TTFT, *TPOT, *E2E, SESSION, HITS, CPU)}
# A router that failed a larger share of its requests is not compared: only answers have latencies.
FAILED_SHARE = 0.01
# The measures of the first table: who wins in each cell.
HEADLINES = (TTFT[0], TTFT[1], TPOT[1], E2E[1], SESSION, HITS, CPU)
# The measures that the lab predicts, and the error from which on a prediction is marked.
PREDICTED = (TTFT[0], TTFT[1], E2E[1], SESSION, HITS)
MARKED_ERROR = 0.15
AHEAD, BEHIND, EVEN = "ahead", "behind", "even"


@dataclass(frozen=True)
class Entry:
    """One router's measure in one cell: its mean over rounds, and its ratio to the reference with the ratio's interval; all None
    where it was not measured, the ratio also where the reference was not."""

    mean: float | None
    ratio: float | None = None
    low: float = 0.0
    high: float = math.inf

    @property
    def sure(self) -> bool:
        """Whether the interval of the ratio leaves out 1."""
        return self.ratio is not None and not self.low <= 1.0 <= self.high

    def word(self, column: Column) -> str:
        """Return where the reference is beside this router."""
        if not self.sure:
            return EVEN
        return AHEAD if (self.low > 1.0) is not column.higher else BEHIND


@dataclass(frozen=True)
class Goal:
    """A goal: to be ahead of `rivals` (empty: of all) in a measure, or not to have more than `limit` times what they have.
    `cells`: their names; empty: all."""

    title: str  # what is to be reached, after the measure's name
    column: Column  # the measure
    cells: Sequence[str] = ()
    rivals: Sequence[str] = ()
    limit: float = 1.0
    ahead: bool = True  # whether "even" misses the goal


GOALS = (
    Goal("ahead of every rival", TTFT[1], ("agentic-high", "fan-out")),
    Goal("not behind SMG", TTFT[0], ("agentic-light",), ("smg cache_aware",), ahead=False),
    Goal("ahead of every rival", SESSION),
    Goal("at most 1.3 times kv_aware's", CPU, (), ("vllm-router kv_aware",), limit=1.3),
)


class Comparison:
    """The trials of one cell."""

    def __init__(self, cell: Cell, trials: Iterable[StoredTrial]) -> None:
        self.cell = cell
        self.problems: dict[str, str] = {}
        self.trials: dict[str, dict[int, Measures]] = {}
        self.predicted: dict[str, dict[int, Measures]] = {}
        self.held_out: dict[str, Measures] = {}
        for trial in trials:
            if trial.cell == cell.name and trial.measures is not None and trial.round == HELD_OUT:
                self.held_out[trial.contender] = trial.measures
            elif trial.cell == cell.name and trial.measures is not None:
                self.trials.setdefault(trial.contender, {})[trial.round] = trial.measures
                if trial.lab is not None:
                    self.predicted.setdefault(trial.contender, {})[trial.round] = trial.lab
            elif trial.cell == cell.name:
                self.problems[trial.contender] = trial.problem

    @property
    def reference(self) -> str:
        """The router that all are compared with; "" if it was not run."""
        return OWN if OWN in self.trials else ""

    @property
    def rounds(self) -> int:
        """Number of rounds that the router with the most has."""
        return max(map(len, self.trials.values()), default=0)

    def ranked(self, column: Column = TTFT[1]) -> list[str]:
        """Return the routers by the ratio of a measure to the reference's, the best first; those without one last."""
        sign = -1 if column.higher else 1

        def key(name: str) -> float:
            ratio = 1.0 if name == self.reference else self.entry(name, column).ratio
            return math.inf if ratio is None else sign * ratio

        return sorted(self.trials, key=key)

    @property
    def rivals(self) -> list[str]:
        """The other products' routers that answered nearly all requests."""
        return [
            name for name in self.trials if not name.startswith(POINTSMAN) and self.failed_share(name) <= FAILED_SHARE
        ]

    def decided(self, name: str) -> bool:
        """Whether a router needs no further rounds: the cell's measures are decided."""
        return all(self.entry(name, COLUMNS[column]).sure for column in self.cell.decides)

    def failed_share(self, name: str) -> float:
        """Return the share of a router's requests that failed, 0 to 1."""
        rounds = self.trials[name].values()
        return sum(trial.failed for trial in rounds) / max(sum(trial.requests for trial in rounds), 1)

    def entry(self, name: str, column: Column) -> Entry:
        """Return a router's measure, and its ratio to the reference over the rounds that both have."""
        own = _values(self.trials.get(name, {}), column)
        if not own:
            return Entry(None)
        mean = sum(own.values()) / len(own) * column.factor
        base = _values(self.trials.get(self.reference, {}), column)
        pairs = [(own[number], base[number]) for number in sorted(own.keys() & base.keys())]
        if not pairs or not all(first > 0 and second > 0 for first, second in pairs):
            return Entry(mean)
        logs = interval([math.log(first / second) for first, second in pairs])
        return Entry(mean, math.exp(logs.mean), _exp(logs.low), _exp(logs.high))

    def standing(self, column: Column) -> dict[str, list[tuple[str, float]]]:
        """Return the rivals that the reference is AHEAD of, BEHIND, and EVEN with, each with its ratio to it. None is compared if
        the reference itself failed too many requests."""
        found: dict[str, list[tuple[str, float]]] = {AHEAD: [], BEHIND: [], EVEN: []}
        if not self.reference or self.failed_share(self.reference) > FAILED_SHARE:
            return found
        for name in self.rivals:
            entry = self.entry(name, column)
            if entry.ratio is not None:
                found[entry.word(column)].append((name, entry.ratio))
        return found

    def goal(self, goal: Goal) -> tuple[str, list[str]]:
        """Return whether a goal is "met", "missed", or "open", and by which rivals it is not met; by the reference itself if that
        failed too many requests."""
        if self.reference and self.failed_share(self.reference) > FAILED_SHARE:
            return "missed", [self.reference]
        names = [name for name in self.rivals if name in goal.rivals or not goal.rivals]
        missed, still_open = [], []
        for name in names:
            entry = self.entry(name, goal.column)
            if goal.limit != 1.0:
                # Pointsman's share of the rival's is the inverse of the rival's ratio.
                below, above = entry.low * goal.limit >= 1.0, entry.high * goal.limit < 1.0
            else:
                word = entry.word(goal.column)
                below, above = word == AHEAD or (not goal.ahead and word == EVEN), word == BEHIND
            if above:
                missed.append(name)
            elif not below:
                still_open.append(name)
        if missed:
            return "missed", missed
        return ("open", still_open) if still_open or not names else ("met", [])

    def held_out_ratio(self, name: str, column: Column) -> float | None:
        """Return the ratio to the reference in the held-out draw; None without both."""
        found = [self.held_out.get(router) for router in (name, self.reference)]
        values = [column.value(measures) if measures is not None else None for measures in found]
        return values[0] / values[1] if values[0] and values[1] else None

    def prediction(self, name: str, column: Column) -> tuple[float, float] | None:
        """Return the means of what the lab predicts and of what was measured, over the rounds with both; None without any."""
        live, lab = (_values(rounds.get(name, {}), column) for rounds in (self.trials, self.predicted))
        common = live.keys() & lab.keys()
        if not common:
            return None
        return tuple(sum(values[number] for number in common) / len(common) * column.factor for values in (lab, live))  # type: ignore[return-value]


def _values(rounds: Mapping[int, Measures], column: Column) -> dict[int, float]:
    return {number: value for number, measures in rounds.items() if (value := column.value(measures)) is not None}


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if value < math.inf else math.inf
