"""The board's cells, and the trials that are stored: one line of JSON each, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bench.figures import Figure
from bench.rivals.contenders import Contender
from pointsman_lab.workload.forks import Forks
from studies.scoreboard.costs import Costs
from studies.scoreboard.measures import Measures, geometric_mean
from studies.scoreboard.sequential import MOST
from studies.scoreboard.traffic import Load
from studies.stored_trials import append_trial, read_trials

# Of the plan of a board: which cells and bounds it has. The trials of another number are of an earlier board.
VERSION = 2
# Number of paired rounds: of all routers; and of Pointsman, the BEST_RIVALS best other products and ALWAYS, if a cell is not
# decided sooner.
ROUNDS, MORE_ROUNDS = 3, MOST
BEST_RIVALS = 3
ALWAYS = ("nginx least_conn",)
# The number of the round that is drawn anew for each commit, so that nothing can be fitted to it.
HELD_OUT = 0


@dataclass(frozen=True)
class Cell:
    """One comparison, in front of `count` emulated engines, `speedup` times as fast as the modelled engine.

    `decides`: names of the measures by whose intervals a rival is decided. `everyone`: all routers, or only Pointsman and `also`.
    `admission`: whether routers that admit sessions are in it, too.
    """

    name: str  # in stored trials
    title: str  # on the page, begins in lower case
    load: Load  # the sessions that are sent, drawn anew for each round
    decides: Sequence[str] = ("TTFT p90", "session mean")
    everyone: bool = True
    also: Sequence[str] = ()
    admission: bool = False
    count: int = 4
    speedup: float = 5.0

    @property
    def time_scale(self) -> float:
        """The factor on the traffic's times."""
        return 1 / self.speedup


CELLS = (
    Cell("agentic-high", "coding agents, high load", Load("agentic", 50.0, 28)),
    Cell("burst", "a burst of coding agents", Load("agentic", 60.0, 10, burst=22), admission=True),
    Cell("fan-out", "agents that fork", Load("agentic", 50.0, 8, forks=Forks(0.6, 2, 40, mean_turns=2.0))),
    Cell("chat", "chat", Load("chat", 100.0, share=0.5)),
    Cell(
        "agentic-light", "coding agents, light load", Load("agentic", 60.0, 12), ("TTFT p50",), everyone=False,
        also=("smg cache_aware", "vllm-router kv_aware"),
    ),
)  # fmt: skip
# The cells whose TTFT decides who are the best rivals.
RANKING = ("agentic-high", "burst", "fan-out", "chat")


class StoredTrial(msgspec.Struct, kw_only=True):
    """One trial in the file, or that a router could not run: `problem` is then why, and there are no measures."""

    cell: str  # Cell.name
    contender: str  # Contender.name
    version: str  # of the router; of Pointsman the commit, 12 characters; empty: unknown
    round: int  # number from 1 on, or HELD_OUT; its draw is the same for all contenders
    source: str = ""  # name of the trace file, or "generated"; empty with a problem
    command: str = ""  # the router's command lines, with placeholders for addresses; empty with a problem
    measures: Measures | None = None  # None with a problem
    problem: str = ""
    wall_s: float = 0.0  # length of the trial with the starts and the ends of all programs; 0: not known
    lab: Measures | None = None  # the lab's prediction of `measures`, with times as live; None: not predicted


@dataclass(frozen=True)
class SavedFigures:
    """Figures of `python -m bench side_by_side`, with the commit and the date of the run."""

    commit: str
    date: str
    figures: Sequence[Figure]


class Results:
    """The trials of one board, in a file that grows by a line for each. A later line of a trial replaces the earlier one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._trials = {_key(trial): trial for trial in read_trials(file, StoredTrial)}

    @property
    def trials(self) -> list[StoredTrial]:
        """All trials."""
        return list(self._trials.values())

    def add(self, trial: StoredTrial) -> None:
        """Store a trial."""
        append_trial(self._file, trial)
        self._trials[_key(trial)] = trial

    def replace(self, trial: StoredTrial) -> None:
        """Put a trial in the place of an earlier one, to be stored by rewrite()."""
        self._trials[_key(trial)] = trial

    def rewrite(self) -> None:
        """Store all trials again."""
        new = self._file.with_suffix(".new")
        new.unlink(missing_ok=True)
        for trial in self.trials:
            append_trial(new, trial)
        new.replace(self._file)

    def forget_problems(self) -> None:
        """Let the routers that could not run be tried again."""
        self._trials = {key: trial for key, trial in self._trials.items() if not trial.problem}

    def has(self, cell: Cell, contender: Contender, number: int) -> bool:
        """Whether a trial was run, or its router cannot run in the cell."""
        return any(
            (trial.cell, trial.contender) == (cell.name, contender.name) and (trial.round == number or trial.problem)
            for trial in self._trials.values()
        )

    def longest_s(self, cell: Cell, contender: Contender) -> float:
        """Return the length of a cell's longest trial, of the contender's own if there are any; 0 if nothing is known."""
        of_cell = [trial for trial in self._trials.values() if trial.cell == cell.name]
        own = [trial.wall_s for trial in of_cell if trial.contender == contender.name]
        return max(own or [trial.wall_s for trial in of_cell], default=0.0)

    def save_plan(self, cells: Sequence[Cell], facts: dict[str, object]) -> None:
        """Write beside the trials what the page says of them: the cells and `facts`."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.with_suffix(".plan.json").write_text(
            json.dumps({"board": VERSION, "cells": [asdict(cell) for cell in cells], **facts})
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

    def save_costs(self, costs: Costs) -> None:
        """Write beside the trials what the lab is told of the machine."""
        self._file.with_suffix(".costs.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n"
        )

    def costs(self) -> Costs | None:
        """Return the saved costs; None if there are none."""
        file = self._file.with_suffix(".costs.json")
        return msgspec.json.decode(file.read_bytes(), type=Costs) if file.exists() else None

    def plan(self) -> tuple[list[Cell], dict[str, object]]:
        """Return the saved cells and facts."""
        facts = json.loads(self._file.with_suffix(".plan.json").read_text())
        return [msgspec.convert(cell, Cell) for cell in facts.pop("cells")], facts


def best_rivals(trials: Iterable[StoredTrial], own_prefix: str) -> list[str]:
    """Return the best policies of the BEST_RIVALS best other products, by the geometric mean of TTFT p90 over the first ROUNDS
    rounds of the RANKING cells. Products without all the trials that the fullest one has are left out."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        rival = (
            not trial.contender.startswith(own_prefix) and trial.contender not in ALWAYS and 1 <= trial.round <= ROUNDS
        )
        if rival and trial.cell in RANKING and trial.measures and trial.measures.ttft_s and not trial.measures.failed:
            found.setdefault(trial.contender, []).append(trial.measures.ttft_s["p90"])
    fullest = max(map(len, found.values()), default=0)
    order = sorted((geometric_mean(values), name) for name, values in found.items() if len(values) == fullest)
    products: dict[str, str] = {}
    for _, name in order:
        products.setdefault(name.split()[0], name)
    return list(products.values())[:BEST_RIVALS]


def _key(trial: StoredTrial) -> tuple[str, str, int]:
    return trial.cell, trial.contender, trial.round
