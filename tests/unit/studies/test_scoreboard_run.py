"""Which trials the board runs: the rounds of each router, when a comparison ends, and when a sitting does."""

from __future__ import annotations

import time
from pathlib import Path

from bench.rivals.contenders import OWN, Contender
from studies.scoreboard.__main__ import BoardRun, Plan
from studies.scoreboard.board import HELD_OUT, Cell, Results, StoredTrial
from studies.scoreboard.traffic import Load
from tests.unit.studies.test_scoreboard_page import trial

CELL = Cell("chat", "chat", Load("chat", 10.0), decides=("TTFT p90",))
BURST = Cell("burst", "burst", Load("agentic", 10.0, 2), decides=("TTFT p90",), admission=True)
RIVALS = (
    "smg cache_aware",
    "dynamo kv",
    "sglang-router cache_aware",
    "vllm-router kv_aware",
    "vllm-router cache_aware",
)
TRIAL_S = 40.0


class PretendedRun(BoardRun):
    """Stores made-up trials. `ttft_s`: each router's, the same in all rounds but for a little."""

    def __init__(self, results: Results, plan: Plan, ttft_s: dict[str, float]) -> None:
        everyone = [
            Contender(name, "1", lambda: None, lambda _: [], admits="admission" in name or "thunder" in name)
            for name in ttft_s
        ]
        super().__init__(results, everyone, plan, str)
        self._stored = results
        self._ttft_s = ttft_s

    def _trial(self, cell: Cell, contender: Contender, number: int) -> None:
        wobble = 1 + 0.01 * (number % 3) if contender.name == OWN else 1.0
        made = trial(contender.name, number, self._ttft_s[contender.name] * wobble, cell)
        made.wall_s = TRIAL_S
        self._stored.add(made)


def plan(minutes: float = 1e6) -> Plan:
    return Plan(3, 8, time.monotonic() + 60 * minutes, "abc", Path("none"))


def rounds(results: Results, cell: Cell) -> dict[str, int]:
    found: dict[str, int] = {}
    for stored in results.trials:
        if stored.cell == cell.name and stored.round != HELD_OUT:
            found[stored.contender] = found.get(stored.contender, 0) + 1
    return found


TTFT_S = {OWN: 1.0, "nginx least_conn": 9.0, **dict(zip(RIVALS, (1.01, 1.9, 2.0, 2.1, 3.0), strict=True))}


def test_only_what_is_not_decided_has_more_rounds(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    assert PretendedRun(results, plan(), TTFT_S).run([CELL])
    # One rival cannot be told from the reference; the others are decided by the first look, or are not among the best.
    expected = dict.fromkeys(TTFT_S, 3) | {OWN: 8, "smg cache_aware": 8}
    assert rounds(results, CELL) == expected
    held_out = {stored.contender for stored in results.trials if stored.round == HELD_OUT}
    assert held_out == {OWN, "smg cache_aware", "dynamo kv", "sglang-router cache_aware"}


def test_a_cell_is_over_when_all_are_decided(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    assert PretendedRun(results, plan(), TTFT_S | {"smg cache_aware": 1.5}).run([CELL])
    assert set(rounds(results, CELL).values()) == {3}


def test_routers_that_admit_are_in_bursts_alone(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    admitting = {"pointsman auto+admission": 1.0, "dynamo thunderagent": 1.02}
    assert PretendedRun(results, plan(), TTFT_S | admitting).run([CELL, BURST])
    assert not admitting.keys() & rounds(results, CELL).keys()
    assert rounds(results, BURST)["dynamo thunderagent"] == 8


def test_a_sitting_ends_before_a_trial_that_would_pass_its_limit(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.add(trial(OWN, 1, 1.0, CELL))
    results.trials[0].wall_s = TRIAL_S
    first = PretendedRun(results, plan(minutes=(TRIAL_S - 1) / 60), TTFT_S)
    assert not first.run([CELL])
    assert len(results.trials) == 1
    again = Results(tmp_path / "board.jsonl")
    assert PretendedRun(again, plan(), TTFT_S).run([CELL])
    assert rounds(again, CELL)[OWN] == 8


def test_a_router_that_does_not_run_is_named_once_and_tried_by_the_next_call(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.add(StoredTrial(cell="chat", contender="dynamo kv", version="1", round=1, problem="no answer"))
    assert PretendedRun(results, plan(), TTFT_S).run([CELL])
    assert "dynamo kv" not in {stored.contender for stored in results.trials if stored.measures}
    again = Results(tmp_path / "board.jsonl")
    again.forget_problems()
    assert PretendedRun(again, plan(), TTFT_S).run([CELL])
    assert rounds(again, CELL)["dynamo kv"] == 3
    assert not any(stored.problem for stored in again.trials)


def test_a_cell_of_some_has_those_alone(tmp_path: Path) -> None:
    light = Cell("light", "light", Load("chat", 10.0), ("TTFT p90",), everyone=False, also=("smg cache_aware",))
    results = Results(tmp_path / "board.jsonl")
    assert PretendedRun(results, plan(), TTFT_S).run([light])
    assert rounds(results, light) == {OWN: 8, "smg cache_aware": 8}
