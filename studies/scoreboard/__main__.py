"""`make scoreboard`: runs what is missing of the board and of the comparison of CPU time, and writes docs/scoreboard.md.

Trials are stored in .state/scoreboard/COMMIT.jsonl, so the next call goes on where one has ended. A call ends before a trial that
would pass its time limit; the page names what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from bench.rivals.contenders import OTHER_POLICIES, OWN, POINTSMAN, Contender, contenders, shown_command
from bench.rivals.engines import Fleet
from bench.rivals.environments import REPOSITORY, NotRunnable
from bench.side_by_side import side_by_side
from pointsman_lab.live.trace_sender import session_headers
from pointsman_lab.report.bundle import git_commit
from pointsman_lab.report.request_record import RequestRecord
from studies import TRACES
from studies.scoreboard.board import (
    ALWAYS,
    CELLS,
    HELD_OUT,
    MORE_ROUNDS,
    ROUNDS,
    Cell,
    Results,
    StoredTrial,
    best_rivals,
)
from studies.scoreboard.comparison import Comparison
from studies.scoreboard.costs import Costs, measure_costs
from studies.scoreboard.fleet import emulated_fleet
from studies.scoreboard.page import write_page
from studies.scoreboard.predictions import SIMULATED, predict
from studies.scoreboard.traffic import Draw, PreparedChats, Target, draw, send
from studies.scoreboard.trial import Send, run_trial
from tests.support.processes.process import ProcessFailure

STATE = REPOSITORY / ".state" / "scoreboard"
# Timeout of the requests of one trial, s: the slowest take half of it.
TRIAL_S = 240.0
# Length of a trial of which nothing is known, s.
UNKNOWN_S = 90.0
# How long the comparison of CPU time takes at most, s.
SIDE_BY_SIDE_S = 900.0
_SAY = partial(print, flush=True)


class OutOfTime(Exception):
    """The next trial would pass the time limit."""


@dataclass(frozen=True)
class Plan:
    """How a board is run. `end`: monotonic time that no trial may pass. `traces`: folder of the recorded traces."""

    rounds: int  # of all routers
    more_rounds: int  # of those that are not decided sooner
    end: float
    held_out: str  # name of the held-out draw
    traces: Path
    costs: Costs | None = None  # for the lab's predictions


class BoardRun:
    """Runs the missing trials of a board, one at a time, and stores each."""

    def __init__(
        self,
        results: Results,
        everyone: Sequence[Contender],
        plan: Plan,
        say: Callable[[str], object] = _SAY,
    ) -> None:
        self._results = results
        self._everyone = everyone
        self._plan = plan
        self._say = say
        # What was drawn last: all contenders of a round send the same.
        self._drawn: tuple[tuple[str, int], Draw] | None = None
        self._chats: PreparedChats | None = None

    def run(self, cells: Sequence[Cell]) -> bool:
        """Run the rounds of all routers, then further ones of those that are not decided, then the held-out draws. Return whether
        everything was run in time."""
        try:
            for number in range(1, self._plan.rounds + 1):
                for cell in cells:
                    if cell.everyone:
                        self._round(cell, number, [of for of in self._everyone if cell.admission or not of.admits])
            for number in range(1, self._plan.more_rounds + 1):
                for cell in cells:
                    self._round(cell, number, self._undecided(cell, number))
            for cell in cells:
                self._round(cell, HELD_OUT, [of for of in self._leading(cell) if of.name not in ALWAYS])
        except OutOfTime:
            return False
        return True

    def _leading(self, cell: Cell) -> list[Contender]:
        """Return the routers that have more rounds in a cell than others."""
        names = {OWN, *cell.also}
        if cell.everyone:
            names |= {*ALWAYS, *best_rivals(self._results.trials, POINTSMAN)}
        return [of for of in self._everyone if of.name in names or (cell.admission and of.admits)]

    def _undecided(self, cell: Cell, number: int) -> list[Contender]:
        """Return the routers of a further round: those that are not decided by the rounds before, and the reference; none if all
        are decided."""
        before = Comparison(cell, [trial for trial in self._results.trials if 1 <= trial.round < number])
        leading = self._leading(cell)
        left = [of for of in leading if of.name != OWN and not before.decided(of.name)]
        return [of for of in leading if of.name == OWN or of in left] if left else []

    def _round(self, cell: Cell, number: int, among: Sequence[Contender]) -> None:
        """Run a round's missing trials. Each round begins with another contender, so that none is always the first."""
        for contender in _rotated(among, number):
            if self._results.has(cell, contender, number):
                continue
            try:
                contender.check()
            except NotRunnable as error:
                self._store(cell, contender, number, problem=str(error))
                continue
            if time.monotonic() + (self._results.longest_s(cell, contender) or UNKNOWN_S) > self._plan.end:
                raise OutOfTime
            self._trial(cell, contender, number)

    def _trial(self, cell: Cell, contender: Contender, number: int) -> None:
        began, drawn = time.monotonic(), self._draw(cell, number)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="scoreboard-") as name,
                emulated_fleet(Path(name), cell.count, cell.speedup) as engines,
            ):
                measures = run_trial(contender, engines, Path(name), self._sender(cell, contender, drawn, engines))
        except NotRunnable as error:
            self._store(cell, contender, number, problem=str(error))
            return
        except ProcessFailure as error:
            # Engines that do not start say nothing of the router: the trial is missing, and the next run tries it again.
            self._say(f"{cell.name} {number} {contender.name}: {error}")
            return
        lab = predict(cell, drawn, contender.name, number, self._plan.costs)
        trial = StoredTrial(
            cell=cell.name, contender=contender.name, version=contender.version, round=number, source=drawn.source,
            measures=measures, command=shown_command(contender), wall_s=time.monotonic() - began, lab=lab,
        )  # fmt: skip
        self._results.add(trial)
        ttft = measures.ttft_s or {"p50": 0.0, "p90": 0.0}
        self._say(
            f"{time.strftime('%H:%M:%S')} {cell.name} {number} {contender.name}: {measures.requests} requests, "
            f"{measures.failed} failed, "
            f"TTFT p50 {ttft['p50']:.2f} p90 {ttft['p90']:.2f} s, {measures.router_cpu_ms:.1f} ms CPU per request, "
            f"{measures.idle:.0%} idle, {measures.span_s:.0f} of {trial.wall_s:.0f} s"
        )

    def _draw(self, cell: Cell, number: int) -> Draw:
        if self._drawn is None or self._drawn[0] != (cell.name, number):
            self._drawn = (cell.name, number), draw_of(cell, number, self._plan.held_out, self._plan.traces)
            self._chats = None
        return self._drawn[1]

    def _sender(self, cell: Cell, contender: Contender, drawn: Draw, fleet: Fleet) -> Send:
        self._chats = chats = self._chats or PreparedChats(drawn.sessions, fleet.words)

        def send_all(url: str) -> list[RequestRecord]:
            target = Target(url, fleet.model, cell.load.timing, cell.time_scale, session_headers)
            if contender.dynamo_sessions:
                target = Target(
                    url, fleet.model, cell.load.timing, cell.time_scale, dynamo_headers, dynamo_final_headers
                )
            return asyncio.run(send(drawn, chats, target, TRIAL_S))

        return send_all

    def _store(self, cell: Cell, contender: Contender, number: int, problem: str) -> None:
        self._results.add(
            StoredTrial(
                cell=cell.name, contender=contender.name, version=contender.version, round=number, problem=problem
            )
        )
        self._say(f"{cell.name}: {contender.name} does not run: {problem}")


def draw_of(cell: Cell, number: int, held_out: str, traces: Path) -> Draw:
    """Return what a cell sends in a round."""
    return draw(cell.load, f"held out {held_out}" if number == HELD_OUT else str(number), traces)


def dynamo_headers(session: str, parent: str) -> dict[str, str]:
    """Return the headers by which Dynamo's clients name a session, and the session that started it."""
    return {"X-Dynamo-Session-ID": session} | ({"X-Dynamo-Parent-Session-ID": parent} if parent else {})


def dynamo_final_headers(session: str) -> dict[str, str]:
    """Return the headers of the request by which Dynamo's clients end a session."""
    return dynamo_headers(session, "") | {"X-Dynamo-Session-Final": "true"}


def _rotated(among: Sequence[Contender], number: int) -> list[Contender]:
    at = (number - 1) * max(len(among) // 3, 1) % max(len(among), 1)
    return [*among[at:], *among[:at]]


def machine() -> str:
    """Return a description of this machine: processor, cores, kernel."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}, {platform.system()} {platform.release()}"


def costs_of(results: Results, cells: Sequence[Cell]) -> Costs:
    """Return the stored costs of the machine; measure and store them if there are none."""
    found = results.costs()
    if found is None:
        found = measure_costs([of for of in contenders() if of.name in SIMULATED], cells[0].speedup, _SAY)
        results.save_costs(found)
    return found


def predict_again(results: Results, traces: Path, costs: Costs | None) -> None:
    """Simulate all stored trials by this version of the lab. `costs` are the machine's; None: the modelled engine's."""
    cells, facts = results.plan()
    known = {cell.name: cell for cell in cells}
    drawn: dict[tuple[str, int], Draw] = {}
    for trial in results.trials:
        if trial.measures is not None:
            at = trial.cell, trial.round
            if at not in drawn:
                drawn = {at: draw_of(known[trial.cell], trial.round, str(facts["commit"]), traces)}
            lab = predict(known[trial.cell], drawn[at], trial.contender, trial.round, costs)
            results.replace(msgspec.structs.replace(trial, lab=lab))
    results.rewrite()


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser("python -m studies.scoreboard", description=__doc__)
    parser.add_argument("--minutes", type=float, default=90.0, help="no trial begins that would end later than this")
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="folder of recorded traces, under the names of ours"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of paired rounds of all routers")
    parser.add_argument("--more-rounds", type=int, default=MORE_ROUNDS, help="most rounds of the leading routers")
    parser.add_argument("--only", default="", help="names of cells and routers, by commas, of a part of the board")
    parser.add_argument("--state", type=Path, default=STATE, help="folder of the trials")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "scoreboard.md")
    parser.add_argument("--note", default="", help="a sentence about the run, for the page")
    parser.add_argument("--render-only", type=Path, metavar="FILE", help="write the page of these trials, run nothing")
    parser.add_argument(
        "--predict", type=Path, metavar="FILE", help="predict these trials again by the lab, run nothing"
    )
    given = parser.parse_args()
    stored = given.render_only or given.predict
    commit = git_commit().removesuffix("-dirty") or "unknown"
    results = Results(stored or given.state / f"{commit}.jsonl")
    if given.predict:
        predict_again(results, given.traces, costs_of(results, results.plan()[0]))
    try:
        if not stored:
            _run(results, given, commit)
    finally:
        if results.trials:
            write_page(results, given.out)
            print(f"{given.out}: written from {len(results.trials)} trials")


def _run(results: Results, given: argparse.Namespace, commit: str) -> None:
    if shutil.disk_usage(REPOSITORY).free < 2e9:
        sys.exit("the scoreboard needs 2 GB of disk for the other routers' environments")
    end = time.monotonic() + 60 * given.minutes
    chosen = set(filter(None, given.only.split(",")))
    cells = [cell for cell in CELLS if cell.name in chosen] or list(CELLS)
    of_board = [of for of in contenders() if of.name not in {f"{POINTSMAN} {policy}" for policy in OTHER_POLICIES}]
    among = [contender for contender in of_board if contender.name in chosen] or of_board
    results.forget_problems()
    facts = {"commit": commit, "machine": machine(), "rounds": given.rounds, "date": time.strftime("%Y-%m-%d")}
    results.save_plan(cells, facts | {"note": given.note})
    plan = Plan(given.rounds, given.more_rounds, end, commit, given.traces, costs_of(results, cells))
    run = BoardRun(results, among, plan)
    if not run.run(cells):
        print("out of time: the next call goes on")
    elif not chosen and results.figures() is None:
        if time.monotonic() > end - SIDE_BY_SIDE_S:
            print("the comparison of CPU time is left to the next call")
        else:
            results.save_figures(asyncio.run(side_by_side()), commit, time.strftime("%Y-%m-%d"))


if __name__ == "__main__":
    main()
