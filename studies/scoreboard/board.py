"""The board's cells, and the trials that are stored: one line of JSON each, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bench.figures import Figure
from bench.rivals.contenders import Contender
from studies.scoreboard.measures import Measures, geometric_mean
from studies.scoreboard.traffic import Load

EMULATED, VLLM = "emulated", "vllm"
OWN_CLIENT, AIPERF = "pointsman", "aiperf"
# The policies of Pointsman that the short cells compare with BEST_RIVALS other products.
SHORT_OWN = ("pointsman auto", "pointsman unified")
BEST_RIVALS = 2


@dataclass(frozen=True)
class Cell:
    """One comparison. `engines`: EMULATED or VLLM, `count` of them, emulated ones `speedup` times as fast as the modelled engine.
    `client`: who sends. `everyone`: all routers, or SHORT_OWN and the best rivals of the cells before."""

    name: str  # in stored trials
    title: str  # on the page, begins in lower case
    load: Load  # the sessions that are sent, drawn anew for each round
    engines: str = EMULATED
    count: int = 4
    speedup: float = 5.0
    client: str = OWN_CLIENT
    everyone: bool = True

    @property
    def time_scale(self) -> float:
        """The factor on the traffic's times."""
        return 1 / self.speedup


CELLS = (
    Cell("agentic", "coding agents", Load("agentic", 80.0, 18)),
    Cell("agentic-high", "coding agents, high load", Load("agentic", 80.0, 40)),
    Cell("agentic-burst", "coding agents and a burst", Load("agentic", 80.0, 14, burst=16)),
    Cell("chat", "chat", Load("chat", 150.0, share=0.5)),
    Cell("vllm", "real vLLM on CPU", Load("tiny", 20.0, 16), VLLM, count=2, speedup=1.0, everyone=False),
    Cell("aiperf", "coding agents, sent by aiperf", Load("agentic", 80.0, 18), client=AIPERF, everyone=False),
)
# The cells whose TTFT decides who are the best rivals.
RANKING = ("agentic", "agentic-high", "agentic-burst")


class StoredTrial(msgspec.Struct, kw_only=True):
    """One trial in the file, or that a router could not run: `problem` is then why, and there are no measures."""

    cell: str  # Cell.name
    contender: str  # Contender.name
    version: str  # of the router; of Pointsman the commit, 12 characters; empty: unknown
    round: int  # number from 1 on; its draw is the same for all contenders
    source: str = ""  # name of the trace file, or "generated"; empty with a problem
    command: str = ""  # the router's command lines, with placeholders for addresses; empty with a problem
    measures: Measures | None = None  # None with a problem
    problem: str = ""


@dataclass(frozen=True)
class SavedFigures:
    """Figures of `python -m bench side_by_side`, with the commit and the date of the run."""

    commit: str
    date: str
    figures: Sequence[Figure]


class Results:
    """The trials of one board, in a file that grows by a line for each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.trials: list[StoredTrial] = []
        if file.exists():
            self.trials = [
                msgspec.json.decode(line, type=StoredTrial) for line in file.read_bytes().splitlines() if line
            ]

    def add(self, trial: StoredTrial) -> None:
        """Store a trial."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")
        self.trials.append(trial)

    def forget_problems(self) -> None:
        """Let the routers that could not run be tried again."""
        self.trials = [trial for trial in self.trials if not trial.problem]

    def has(self, cell: Cell, contender: Contender, number: int) -> bool:
        """Whether a trial was run, or its router cannot run in the cell."""
        return any(
            (trial.cell, trial.contender) == (cell.name, contender.name) and (trial.round == number or trial.problem)
            for trial in self.trials
        )

    def save_plan(self, cells: Sequence[Cell], facts: dict[str, object]) -> None:
        """Write beside the trials what the page says of them: the cells and `facts`."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.with_suffix(".plan.json").write_text(
            json.dumps({"cells": [asdict(cell) for cell in cells], **facts})
        )

    def save_figures(self, figures: Sequence[Figure], commit: str, date: str) -> None:
        """Write beside the trials what `python -m bench side_by_side` has measured, and at which commit."""
        rows = [figure.row() for figure in figures]
        self._file.with_suffix(".figures.json").write_text(
            json.dumps({"commit": commit, "date": date, "figures": rows})
        )

    def figures(self) -> SavedFigures | None:
        """Return the saved figures; None if there are none."""
        file = self._file.with_suffix(".figures.json")
        if not file.exists():
            return None
        saved = json.loads(file.read_text())
        names = ("metric", "value", "unit", "baseline", "note")
        return SavedFigures(saved["commit"], saved["date"], [Figure(*map(row.get, names)) for row in saved["figures"]])

    def plan(self) -> tuple[list[Cell], dict[str, object]]:
        """Return the saved cells and facts."""
        facts = json.loads(self._file.with_suffix(".plan.json").read_text())
        return [msgspec.convert(cell, Cell) for cell in facts.pop("cells")], facts


def best_rivals(trials: Iterable[StoredTrial], own_prefix: str) -> list[str]:
    """Return the best policies of the BEST_RIVALS best other products, by the geometric mean of TTFT p90 over the RANKING cells'
    trials. Products without all the trials that the fullest one has are left out."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        rival = not trial.contender.startswith(own_prefix)
        if rival and trial.cell in RANKING and trial.measures and trial.measures.ttft_s and not trial.measures.failed:
            found.setdefault(trial.contender, []).append(trial.measures.ttft_s["p90"])
    fullest = max(map(len, found.values()), default=0)
    order = sorted((geometric_mean(values), name) for name, values in found.items() if len(values) == fullest)
    products: dict[str, str] = {}
    for _, name in order:
        products.setdefault(name.split()[0], name)
    return list(products.values())[:BEST_RIVALS]
