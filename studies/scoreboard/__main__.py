"""`make scoreboard`: runs what is missing of the board and of the comparison of CPU time, and writes docs/scoreboard.md.

Trials are stored in .state/scoreboard/COMMIT.jsonl, so an interrupted run goes on where it was. No trial begins after the time
limit; the page names what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.rivals.contenders import POINTSMAN, Contender, contenders, shown_command
from bench.rivals.engines import Fleet
from bench.rivals.environments import REPOSITORY, NotRunnable
from bench.side_by_side import side_by_side
from pointsman_lab.report.bundle import git_commit
from pointsman_lab.report.request_record import RequestRecord
from studies.scoreboard.aiperf_client import send_with_aiperf
from studies.scoreboard.board import AIPERF, CELLS, SHORT_OWN, VLLM, Cell, Results, StoredTrial, best_rivals
from studies.scoreboard.fleet import emulated_fleet, reset_caches, vllm_fleet
from studies.scoreboard.page import write_page
from studies.scoreboard.traffic import Draw, PreparedChats, SendSettings, draw, send
from studies.scoreboard.trial import Send, run_trial
from tests.support.processes.process import ProcessFailure

STATE = REPOSITORY / ".state" / "scoreboard"
# Timeout of one trial, s: the slowest take half of it.
TRIAL_S = 240.0
# Timeout of aiperf with its start, s.
AIPERF_S = 400.0
# How long the comparison of CPU time takes at most, s.
SIDE_BY_SIDE_S = 900.0


class BoardRun:
    """Runs the missing trials of a board, one at a time, and stores each."""

    def __init__(
        self,
        results: Results,
        everyone: Sequence[Contender],
        rounds: int,
        end: float,
        say: Callable[[str], object] = print,
    ) -> None:
        """`end`: monotonic time after which no trial begins."""
        self._results = results
        self._everyone = everyone
        self._rounds = rounds
        self._end = end
        self._say = say
        # The chats of the draw that was used last: all contenders of a round send the same.
        self._prepared: tuple[Draw, PreparedChats] | None = None

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells that everybody is in, round by round, and then the cells of the best."""
        for number in range(1, self._rounds + 1):
            for cell in cells:
                if cell.everyone:
                    self._round(cell, number, self._everyone)
        names = {*SHORT_OWN, *best_rivals(self._results.trials, POINTSMAN)}
        named = [contender for contender in self._everyone if contender.name in names]
        for cell in cells:
            if not cell.everyone:
                self._all_rounds(cell, named)

    def _all_rounds(self, cell: Cell, named: Sequence[Contender]) -> None:
        rounds = range(1, self._rounds + 1)
        if cell.engines != VLLM:
            for number in rounds:
                self._round(cell, number, named)
            return
        if (
            all(self._results.has(cell, contender, number) for contender in named for number in rounds)
            or time.monotonic() > self._end
        ):
            return
        # Real engines take a minute to start: all trials share them, each with empty caches.
        with tempfile.TemporaryDirectory() as folder:
            try:
                with vllm_fleet(Path(folder), cell.count) as fleet:
                    for number in rounds:
                        self._round(cell, number, named, fleet)
            except FileNotFoundError as error:
                for contender in named:
                    self._store(cell, contender, 1, problem=f"no engines: {error}")

    def _round(self, cell: Cell, number: int, among: Sequence[Contender], fleet: Fleet | None = None) -> None:
        """Run a round's missing trials. Each round begins with another contender, so that none is always the first."""
        missing = [contender for contender in _rotated(among, number) if not self._results.has(cell, contender, number)]
        drawn: Draw | None = None
        for contender in missing:
            if time.monotonic() > self._end:
                return
            try:
                contender.check()
            except NotRunnable as error:
                self._store(cell, contender, number, problem=str(error))
                continue
            drawn = drawn or draw(cell.load, number)
            self._trial(cell, contender, number, drawn, fleet)

    def _trial(self, cell: Cell, contender: Contender, number: int, drawn: Draw, fleet: Fleet | None) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="scoreboard-") as name, _fleet(cell, Path(name), fleet) as engines:
                sender = self._sender(cell, drawn, engines, Path(name))
                measures = run_trial(contender, engines, Path(name), sender)
        except NotRunnable as error:
            self._store(cell, contender, number, problem=str(error))
            return
        except ProcessFailure as error:
            # Engines that do not start say nothing of the router: the trial is missing, and the next run tries it again.
            self._say(f"{cell.name} {number} {contender.name}: {error}")
            return
        trial = StoredTrial(
            cell=cell.name, contender=contender.name, version=contender.version, round=number, source=drawn.source,
            measures=measures, command=shown_command(contender),
        )  # fmt: skip
        self._results.add(trial)
        ttft = measures.ttft_s or {"p50": 0.0, "p90": 0.0}
        self._say(
            f"{time.strftime('%H:%M:%S')} {cell.name} {number} {contender.name}: {measures.requests} requests, "
            f"{measures.failed} failed, "
            f"TTFT p50 {ttft['p50']:.2f} p90 {ttft['p90']:.2f} s, {measures.router_cpu_ms:.1f} ms CPU per request, "
            f"{measures.idle:.0%} idle, {measures.span_s:.0f} s"
        )

    def _sender(self, cell: Cell, drawn: Draw, fleet: Fleet, folder: Path) -> Send:
        if cell.client == AIPERF:
            return partial(
                send_with_aiperf, drawn, folder, model=fleet.model, tokenizer=fleet.tokenizer, time_scale=cell.time_scale,
                timeout_s=AIPERF_S,
            )  # fmt: skip
        if self._prepared is None or self._prepared[0] is not drawn:
            self._prepared = drawn, PreparedChats(drawn.sessions, fleet.words)
        chats = self._prepared[1]

        def send_all(url: str) -> list[RequestRecord]:
            target = SendSettings(url, cell.load.timing, cell.time_scale)
            return asyncio.run(send(drawn, chats, target, fleet.model, TRIAL_S))

        return send_all

    def _store(self, cell: Cell, contender: Contender, number: int, problem: str) -> None:
        self._results.add(
            StoredTrial(
                cell=cell.name, contender=contender.name, version=contender.version, round=number, problem=problem
            )
        )
        self._say(f"{cell.name}: {contender.name} does not run: {problem}")


@contextlib.contextmanager
def _fleet(cell: Cell, folder: Path, running: Fleet | None) -> Iterator[Fleet]:
    """Yield the engines of a trial, with empty caches: `running` ones, or new ones."""
    if running is not None:
        reset_caches(running)
        yield running
        return
    with emulated_fleet(folder, cell.count, cell.speedup) as fleet:
        yield fleet


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


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser("python -m studies.scoreboard", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of paired rounds")
    parser.add_argument("--minutes", type=float, default=145.0, help="no trial begins later than this")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "scoreboard.md")
    parser.add_argument("--note", default="", help="a sentence about the run, for the page")
    parser.add_argument(
        "--render-only", type=Path, metavar="FILE", help="write the page of these trials, and run nothing"
    )
    given = parser.parse_args()
    if shutil.disk_usage(REPOSITORY).free < 2e9:
        sys.exit("the scoreboard needs 2 GB of disk for the other routers' environments")
    commit = git_commit() or "unknown"
    # The page that an interrupted run has written does not make another board.
    results = Results(given.render_only or STATE / f"{commit.removesuffix('-dirty')}.jsonl")
    if not given.render_only:
        results.forget_problems()
        facts = {"commit": commit, "machine": machine(), "rounds": given.rounds, "date": time.strftime("%Y-%m-%d")}
        results.save_plan(CELLS, facts)
    end = time.monotonic() + 60 * given.minutes
    try:
        if not given.render_only:
            BoardRun(results, contenders(), given.rounds, end).run(CELLS)
            if results.figures() is None and time.monotonic() < end - SIDE_BY_SIDE_S:
                results.save_figures(asyncio.run(side_by_side()), commit, time.strftime("%Y-%m-%d"))
    finally:
        if results.trials:
            write_page(results, given.out)
            print(f"{given.out}: written from {len(results.trials)} trials")


if __name__ == "__main__":
    main()
