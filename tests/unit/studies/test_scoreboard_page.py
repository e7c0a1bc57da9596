"""The scoreboard's page, made from stored trials, and who wins on it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Figure
from bench.rivals.contenders import ABSENT, POINTSMAN, contenders, part_label, shown_command
from bench.side_by_side import GOALS
from pointsman_lab.report.request_record import RequestRecord
from studies.marked_sections import BOARD, section_of
from studies.scoreboard.board import CELLS, Cell, Results, SavedFigures, StoredTrial, best_rivals
from studies.scoreboard.comparison import CPU, HITS, TTFT, Comparison
from studies.scoreboard.measures import Measures, measure
from studies.scoreboard.page import front_section, render, write_page
from studies.scoreboard.traffic import PAUSE_LIMIT_S, TURN_LIMIT, Load, draw
from tests.support.repository import REPOSITORY

CELL = CELLS[0]
FACTS: dict[str, object] = {"commit": "abc", "machine": "2 cores", "rounds": 3, "date": "2026-01-01"}


def points(value: float) -> dict[str, float]:
    return {"p50": value / 2, "p90": value, "p99": value * 2, "mean": value / 2, "count": 10}


def trial(contender: str, number: int, ttft_s: float, cell: Cell = CELL, failed: int = 0) -> StoredTrial:
    measures = Measures(
        requests=10,
        failed=failed,
        errors={"503": failed} if failed else {},
        sessions=3,
        span_s=9.0,
        ttft_s=points(ttft_s),
        tpot_s=points(0.008),
        e2e_s=points(ttft_s + 1),
        session_s=points(ttft_s * 3),
        output_tokens=99,
        hit_ratio=0.5,
        cpu_ms={"gateway": 2.0, "router": 1.0} if contender.startswith(POINTSMAN) else {"router": 1.5},
        beside_cpu_ms=0.0,
        engines_cpu_s=1.0,
        rss_mb=50.0,
        idle=0.3,
    )
    return StoredTrial(
        cell=cell.name,
        contender=contender,
        version="1",
        round=number,
        source="generated",
        command="run",
        measures=measures,
    )


def rounds(contender: str, *ttfts: float) -> list[StoredTrial]:
    return [trial(contender, number, ttft) for number, ttft in enumerate(ttfts, 1)]


def row(page: str, heading: str, name: str) -> list[str]:
    """The fields of a router's first row after a heading."""
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", page.partition(heading)[2], re.MULTILINE)
    assert found
    return found[1].split(" | ")


def test_each_figure_stands_beside_its_ratio_in_the_same_rounds(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.save_plan([CELL], FACTS)
    for result in rounds("pointsman unified", 1.0, 2.0, 4.0) + rounds("smg cache_aware", 2.0, 4.0, 8.0):
        results.add(result)
    write_page(Results(tmp_path / "board.jsonl"), tmp_path / "docs" / "scoreboard.md")
    page = (tmp_path / "docs" / "scoreboard.md").read_text()
    # Twice as slow in every round, however much the rounds differ: the interval has no width.
    assert row(page, "## Coding agents", "smg cache_aware")[1] == "4.67 (x2.00, 2.00 to 2.00)"
    assert row(page, "## Coding agents", "pointsman unified")[1] == "2.33"
    assert "gateway 2.00, router 1.00" in page
    for name in ("scoreboard_ttft.svg", "scoreboard_cpu.svg"):
        assert "smg cache_aware" in (tmp_path / "docs" / name).read_text()


def test_cpu_time_stands_beside_its_goal(tmp_path: Path) -> None:
    results = Results(tmp_path / "abc.jsonl")
    results.save_plan([CELL], FACTS)
    for result in rounds(f"{POINTSMAN} auto", 1.0, 1.1):
        results.add(result)
    assert results.figures() is None
    _, _, of_new = GOALS["side_new_1k_us"]
    _, _, of_answer = GOALS["side_answer_300_us"]
    missed, reached = round(of_new * 1.25, 2), round(of_answer * 0.8, 2)
    figures = [
        Figure("side_new_1k_us", round(200 * missed), "us", 200.0, "nginx 30, smg 350; baseline is vllm-router"),
        Figure("side_serve_answer_300_us", round(200 * reached), "us", 200.0, "nginx 90; baseline is vllm-router"),
        Figure("side_rss_mb_1000_streams", 90.0, "MB", 60.0, "nginx 9; baseline is vllm-router"),
    ]
    results.save_figures(figures, "abc", "2026-11-01")
    assert results.figures() == SavedFigures("abc", "2026-11-01", figures)
    write_page(results, tmp_path / "page.md")
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if "vllm-router |" in line]
    assert rows == [
        f"| a new prompt of 1 KB | two processes | {200 * missed:.0f} us | vllm-router | {missed:.2f} | {of_new:g}, **missed** "
        "| nginx 30, smg 350 |",
        f"| a whole answer of 300 chunks | `serve` | {200 * reached:.0f} us | vllm-router | {reached:.2f} | {of_answer:g}, "
        "reached | nginx 90 |",
        "| memory at 1,000 open streams | two processes | 90 MB | vllm-router | 1.50 | - | nginx 9 |",
    ]


def test_readme_tells_losses_and_marks_what_chance_may_do(tmp_path: Path) -> None:
    board = Results(tmp_path / "board.jsonl")
    board.save_plan([CELL], FACTS)
    # The nearer router differs in one round only; the faster one in all.
    other = [1.0, 1.0, 1.2], [0.5, 0.5, 0.5]
    for stored in rounds(f"{POINTSMAN} auto", 1.0, 1.0, 1.0):
        board.add(stored)
    for name, ttfts in zip(("nginx least_conn", "smg cache_aware"), other, strict=True):
        for stored in rounds(name, *ttfts):
            board.add(stored)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- board -->\nold\n<!-- end of board -->\nafter\n")
    write_page(board, tmp_path / "docs" / "scoreboard.md")
    before, *table, after = readme.read_text().splitlines()
    assert (before, after, "old" in table) == ("before", "after", False)
    assert table[1:6] == [
        f"| router | {CELL.title} | router CPU/request, ms |",
        "|---|---|---|",
        "| smg cache_aware | 0.25 / 0.50 | 1.50 |",
        "| pointsman auto | 0.50 / 1.00 | 3.00 |",
        "| nginx least_conn | 0.53 / 1.07 = | 1.50 |",
    ]
    text = "\n".join(table)
    assert "- **behind**: TTFT p50 (all x0.50 to x0.50), TTFT p90 (all x0.50 to x0.50)" in text
    assert "- ahead: none.\n- no difference beyond chance: the other 2 of 7." in text


def test_readme_has_the_figures_of_the_stored_trials() -> None:
    results = Results(REPOSITORY / "docs/results/scoreboard.jsonl")
    cells, facts = results.plan()
    remedy = "python -m studies.scoreboard --render-only docs/results/scoreboard.jsonl"
    assert (REPOSITORY / "docs/scoreboard.md").read_text() == render(cells, results.trials, facts, results.figures()), (
        remedy
    )
    readme = (REPOSITORY / "README.md").read_text()
    assert section_of(readme, BOARD) == front_section(cells, results.trials), remedy


def test_a_loss_is_shown_as_one() -> None:
    trials = rounds("pointsman unified", 3.0, 3.1, 3.2) + rounds("nginx least_conn", 1.0, 1.1, 1.0)
    winners = row(render([CELL], trials, FACTS), "## Who wins", CELL.title)
    assert winners[1] == "**behind**: unified, nginx least_conn x0.33"
    # Equal in every round.
    assert winners[2] == "even: unified, nginx least_conn x1.00"
    assert winners[6] == "**behind**: unified, nginx least_conn x0.50"


def test_a_lead_is_shown_as_one() -> None:
    trials = rounds("pointsman unified", 1.0, 1.1, 1.0) + rounds("nginx least_conn", 3.0, 3.1, 3.2)
    trials += rounds("pointsman foresight", 0.5, 0.6, 0.5)
    winners = row(render([CELL], trials, FACTS), "## Who wins", CELL.title)
    assert re.fullmatch(r"ahead: foresight, nginx least_conn x5\.\d\d", winners[1])


def test_a_router_that_fails_requests_cannot_win() -> None:
    quick = [trial("nginx least_conn", number, 0.1, failed=2) for number in (1, 2, 3)]
    trials = rounds("pointsman unified", 1.0, 1.1, 1.0) + rounds("smg cache_aware", 3.0, 3.1, 3.2) + quick
    assert row(render([CELL], trials, FACTS), "## Who wins", CELL.title)[1].startswith(
        "ahead: unified, smg cache_aware"
    )


def test_a_difference_that_may_be_chance_is_marked() -> None:
    trials = rounds("pointsman unified", 1.0, 3.0, 2.0) + rounds("smg cache_aware", 2.0, 2.0, 2.5)
    assert row(render([CELL], trials, FACTS), "## Who wins", CELL.title)[1].startswith("even: ")


def test_a_router_that_does_not_run_is_named_with_the_reason() -> None:
    broken = StoredTrial(cell=CELL.name, contender="dynamo kv", version="1.6.1", round=1, problem="no | answer\nat all")
    page = render([CELL], [*rounds("pointsman unified", 1.0), broken], FACTS)
    assert "| dynamo kv | 1.6.1 | no: no / answer at all |" in page
    for name in ABSENT:
        assert f"| {name} | - | no: " in page


def test_what_is_missing_is_named() -> None:
    trials = rounds("pointsman unified", 1.0, 1.0, 1.0) + rounds("smg cache_aware", 1.0)
    assert "Missing of 3 rounds: coding agents: smg cache_aware has 1." in render([CELL], trials, FACTS)
    assert "Missing of 3 rounds: chat: all." in render(
        [CELL, CELLS[3]], rounds("pointsman unified", 1.0, 1.0, 1.0), FACTS
    )
    assert "Missing" not in render([CELL], rounds("pointsman unified", 1.0, 1.0, 1.0), FACTS)


def test_failed_requests_are_counted_by_kind() -> None:
    page = render([CELL], [trial("pointsman unified", 1, 1.0), trial("smg cache_aware", 1, 1.0, failed=2)], FACTS)
    assert row(page, "failed |", "smg cache_aware")[-1] == "2 of 10 (503 2)"


def test_the_best_rivals_are_of_different_products_and_answer_everything() -> None:
    trials = [
        *rounds("pointsman unified", 0.1, 0.1),
        *rounds("vllm-router cache_aware", 1.0, 1.0),
        *rounds("vllm-router kv_aware", 1.1, 1.1),
        *rounds("smg cache_aware", 2.0, 2.0),
        *rounds("nginx least_conn", 3.0, 3.0),
        *rounds("dynamo kv", 0.5),
    ]
    assert best_rivals(trials, POINTSMAN) == ["vllm-router cache_aware", "smg cache_aware"]
    trials[2] = trial("vllm-router cache_aware", 1, 1.0, failed=1)
    assert best_rivals(trials, POINTSMAN) == ["vllm-router kv_aware", "smg cache_aware"]


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=5))
def test_the_interval_of_a_ratio_contains_it(pairs: list[tuple[float, float]]) -> None:
    trials = rounds("pointsman unified", *(own for own, _ in pairs)) + rounds(
        "smg cache_aware", *(rival for _, rival in pairs)
    )
    entry = Comparison(CELL, trials).entry("smg cache_aware", TTFT[1], "pointsman unified")
    assert entry.ratio is not None
    assert entry.ratio == pytest.approx(math.prod(rival / own for own, rival in pairs) ** (1 / len(pairs)))
    assert entry.low <= entry.ratio * (1 + 1e-9)
    assert entry.high >= entry.ratio * (1 - 1e-9)


def test_more_hits_win_and_less_cpu_time_wins() -> None:
    comparison = Comparison(CELL, rounds("pointsman unified", 1.0) + rounds("smg cache_aware", 2.0))
    assert comparison.ranked(CPU) == ["smg cache_aware", "pointsman unified"]
    comparison.trials["smg cache_aware"][1].hit_ratio = 0.9
    assert comparison.ranked(HITS)[0] == "smg cache_aware"


def test_an_interrupted_board_goes_on_where_it_was(tmp_path: Path) -> None:
    [own, *_] = contenders()
    results = Results(tmp_path / "board.jsonl")
    results.add(trial(own.name, 2, 1.0))
    results.add(StoredTrial(cell=CELLS[1].name, contender=own.name, version="", round=1, problem="none"))
    again = Results(tmp_path / "board.jsonl")
    assert [again.has(CELL, own, number) for number in (1, 2, 3)] == [False, True, False]
    assert again.has(CELLS[1], own, 3)
    again.forget_problems()
    assert not again.has(CELLS[1], own, 1)


def test_measures_are_of_whole_answers_and_count_the_others() -> None:
    records = [
        RequestRecord(session="a", turn=1, status=200, t_send=0.0, ttft_s=1.0, e2e_s=2.0, output_tokens=11),
        RequestRecord(session="a", turn=2, status=200, t_send=3.0, ttft_s=1.0, e2e_s=2.0, output_tokens=11),
        RequestRecord(session="b", turn=1, status=503, t_send=0.0, e2e_s=0.1),
        RequestRecord(session="c", turn=1, error="TimeoutError: late", t_send=0.0, e2e_s=9.0),
    ]
    counted = {
        "cpu_s": {"router": 0.4},
        "beside_cpu_s": 0.0,
        "engines_cpu_s": 1.0,
        "rss_mb": 9.0,
        "cached": 30.0,
        "asked": 40.0,
    }
    found = measure(records, {**counted, "idle": 0.5}, 9.0)
    assert (found.requests, found.failed, found.errors) == (4, 2, {"503": 1, "TimeoutError": 1})
    assert found.session_s is not None
    assert (found.session_s["mean"], found.session_s["count"]) == (5.0, 1)
    assert (found.hit_ratio, found.cpu_ms, found.router_cpu_ms) == (0.75, {"router": 100.0}, 100.0)
    assert found.tpot_s is not None
    assert found.tpot_s["p50"] == pytest.approx(0.1)


@pytest.mark.parametrize("load", [cell.load for cell in CELLS], ids=[cell.name for cell in CELLS])
def test_a_round_is_the_same_for_everybody_and_another_round_is_another_draw(load: Load, tmp_path: Path) -> None:
    first, again, other = (draw(load, number, tmp_path) for number in (1, 1, 2))
    assert first == again
    assert first.sessions != other.sessions
    assert first.source == "generated"
    starts = [turns[0].timestamp_ms for turns in first.sessions]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert starts[-1] <= load.span_s * 1e3
    names = [(turn.session, turn.turn) for turns in first.sessions for turn in turns]
    assert len(set(names)) == len(names)
    if load.kind != "chat":
        assert len(first.sessions) == load.sessions + load.burst
        turns = [turn for of in first.sessions for turn in of]
        assert all((turn.think_ms or 0.0) <= PAUSE_LIMIT_S * 1e3 for turn in turns)
        assert max(map(len, first.sessions)) <= TURN_LIMIT


def test_a_burst_comes_within_its_seconds(tmp_path: Path) -> None:
    load = Load("agentic", 80.0, 5, burst=10, burst_s=5.0)
    starts = [turns[0].timestamp_ms / 1e3 for turns in draw(load, 1, tmp_path).sessions]
    assert max(sum(begin <= start <= begin + 5.0 for start in starts) for begin in starts) >= 10


def test_shown_commands_name_no_folder_of_this_machine() -> None:
    for contender in contenders():
        if contender.is_pointsman or contender.name.startswith("nginx"):
            assert not re.search(r"(^| )[./][^ ]*/", shown_command(contender)), contender.name
    up = next(contender for contender in contenders() if contender.name == "pointsman unified")
    assert "pointsman_cli.main up --engine URL --listen 127.0.0.1:PORT" in shown_command(up)


@pytest.mark.parametrize("module", ["pointsman.cli.main", "pointsman_cli.main"])
def test_pointsmans_commands_are_shown_as_an_operator_types_them(module: str, tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.add(
        StoredTrial(
            cell=CELL.name,
            contender="pointsman unified",
            version="1",
            round=1,
            command=f"python -m {module} up --engine URL",
        )
    )
    page = render([CELL], results.trials, {"rounds": 1})
    assert "pointsman unified:\npointsman up --engine URL\n" in page
    assert module not in page


def test_the_services_of_one_command_are_told_apart() -> None:
    from bench.rivals.contenders import Part

    up = Part("up", ["python"])
    assert part_label(up, ["python", "-m", "pointsman_cli.main", "gateway", "--listen", "a:1"]) == "gateway"
    assert part_label(up, ["python", "-c", "from multiprocessing"]) == "up"
