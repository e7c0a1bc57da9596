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
from bench.side_by_side import GOALS as CPU_GOALS
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.subagents import SubagentRequest
from studies.marked_sections import BOARD, section_of
from studies.scoreboard.__main__ import predict_again
from studies.scoreboard.board import CELLS, HELD_OUT, VERSION, Cell, Results, SavedFigures, StoredTrial, best_rivals
from studies.scoreboard.comparison import CPU, GOALS, HITS, SESSION, TTFT, Comparison
from studies.scoreboard.costs import Costs, Way
from studies.scoreboard.measures import Measures, measure
from studies.scoreboard.page import EARLIER, front_section, render, write_page
from studies.scoreboard.predictions import predict
from studies.scoreboard.traffic import PAUSE_LIMIT_S, TURN_LIMIT, Load, draw
from tests.support.repository import REPOSITORY

CELL = CELLS[0]
FACTS: dict[str, object] = {"board": VERSION, "commit": "abc", "machine": "2 cores", "rounds": 3, "date": "2026-01-01"}


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
    for result in rounds("pointsman auto", 1.0, 2.0, 4.0) + rounds("smg cache_aware", 2.0, 4.0, 8.0):
        results.add(result)
    write_page(Results(tmp_path / "board.jsonl"), tmp_path / "docs" / "scoreboard.md")
    page = (tmp_path / "docs" / "scoreboard.md").read_text()
    # Twice as slow in every round, however much the rounds differ: the interval has no width.
    assert row(page, "## Coding agents, high", "smg cache_aware")[1] == "4.67 (x2.00, 2.00 to 2.00)"
    assert row(page, "## Coding agents, high", "pointsman auto")[1] == "2.33"
    assert "gateway 2.00, router 1.00" in page
    for name in ("scoreboard_ttft.svg", "scoreboard_cpu.svg"):
        assert "smg cache_aware" in (tmp_path / "docs" / name).read_text()


def test_cpu_time_stands_beside_its_goal(tmp_path: Path) -> None:
    results = Results(tmp_path / "abc.jsonl")
    results.save_plan([CELL], FACTS)
    for result in rounds(f"{POINTSMAN} auto", 1.0, 1.1):
        results.add(result)
    assert results.figures() is None
    _, _, of_new = CPU_GOALS["side_new_1k_us"]
    _, _, of_answer = CPU_GOALS["side_answer_300_us"]
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
        f"| router | {CELL.title} | router CPU/request |",
        "|---|---|---|",
        "| pointsman auto | 0.50 / 1.00 | 3.00 |",
        "| smg cache_aware | x0.50 / x0.50 | x0.50 |",
        "| nginx least_conn | x1.06 / x1.06 = | x0.50 |",
    ]
    text = "\n".join(table)
    assert f"- **behind**: TTFT p50 ({CELL.title}: smg cache_aware x0.50), TTFT p90" in text
    assert "- ahead: none.\n- no difference beyond chance: 8 of 14." in text


def test_readme_has_the_figures_of_the_stored_trials() -> None:
    results = Results(REPOSITORY / "docs/results/scoreboard.jsonl")
    cells, facts = results.plan()
    page = render(cells, results.trials, facts, results.figures(), results.costs())
    if facts.get("board") != VERSION:
        # The page and README are those of the board that these trials are of, until this one has been run.
        assert EARLIER in page
        return
    remedy = "python -m studies.scoreboard --render-only docs/results/scoreboard.jsonl"
    assert (REPOSITORY / "docs/scoreboard.md").read_text() == page, remedy
    readme = (REPOSITORY / "README.md").read_text()
    assert section_of(readme, BOARD) == front_section(cells, results.trials), remedy


def winners(trials: list[StoredTrial]) -> list[str]:
    return row(render([CELL], trials, FACTS), "## Who wins", CELL.title)


def test_a_loss_is_shown_as_one() -> None:
    fields = winners(rounds("pointsman auto", 3.0, 3.1, 3.2) + rounds("nginx least_conn", 1.0, 1.03, 1.06))
    assert fields[1] == "**behind** nginx least_conn x0.33"
    # Equal in every round.
    assert fields[2] == "even with 1"
    assert fields[6] == "**behind** nginx least_conn x0.50"


def test_a_lead_is_shown_as_one() -> None:
    trials = rounds("pointsman auto", 1.0, 1.1, 1.0) + rounds("nginx least_conn", 3.0, 3.3, 3.0)
    # Only other products count, whatever Pointsman's other policies do.
    assert winners(trials + rounds("pointsman foresight", 0.5, 0.6, 0.5))[1] == "ahead of 1"


def test_two_rounds_decide_nothing() -> None:
    assert winners(rounds("pointsman auto", 1.0, 1.0) + rounds("nginx least_conn", 9.0, 9.0))[1] == "even with 1"


def goal_rows(trials: list[StoredTrial]) -> dict[str, str]:
    page = render([CELL], trials, FACTS).partition("## Goals")[2].partition("## Who wins")[0]
    return dict(re.findall(rf"^\| (.*) \| {CELL.title} \| (.*) \|$", page, re.MULTILINE))


def test_goals_are_met_missed_or_open() -> None:
    own = rounds("pointsman auto", 1.0, 1.1, 1.0)
    ahead, near = rounds("smg cache_aware", 2.0, 2.2, 2.0), rounds("vllm-router kv_aware", 1.0, 1.2, 0.9)
    assert goal_rows(own + ahead)["TTFT p90: ahead of every rival"] == "met"
    assert goal_rows(own + ahead + near)["TTFT p90: ahead of every rival"].startswith("open: vllm-router kv_aware x")
    behind = rounds("vllm-router kv_aware", 0.5, 0.55, 0.5)
    found = goal_rows(own + ahead + behind)
    assert found["session mean: ahead of every rival"] == "**missed**: vllm-router kv_aware x0.50"
    # 3 ms against 1.5 ms.
    assert found["router CPU/request: at most 1.3 times kv_aware's"] == "**missed**: vllm-router kv_aware x2.00"
    assert goal_rows(own + ahead)["router CPU/request: at most 1.3 times kv_aware's"] == "open"


def test_a_limit_is_met_by_the_intervals_far_end() -> None:
    comparison = Comparison(
        CELL, rounds("pointsman auto", 1.0, 1.0, 1.0) + rounds("vllm-router kv_aware", 1.0, 1.0, 1.0)
    )
    [of_cpu] = [goal for goal in GOALS if goal.limit != 1.0]
    for measures in comparison.trials["vllm-router kv_aware"].values():
        measures.cpu_ms = {"router": 2.4}
    assert comparison.goal(of_cpu) == ("met", [])


def test_a_reference_that_failed_its_requests_misses_its_goals() -> None:
    own = rounds("pointsman auto", 1.0, 1.0, 1.0)
    for stored in own:
        assert stored.measures is not None
        stored.measures.failed = stored.measures.requests // 2
    found = goal_rows(own + rounds("vllm-router kv_aware", 2.0, 2.0, 2.0))
    assert all("**missed**: pointsman auto failed 50" in result for result in found.values()), found


def test_a_held_out_draw_is_told_beside_the_rounds_and_not_among_them() -> None:
    trials = rounds("pointsman auto", 1.0, 1.1, 1.0) + rounds("smg cache_aware", 2.0, 2.2, 2.0)
    trials += [trial("pointsman auto", HELD_OUT, 1.0), trial("smg cache_aware", HELD_OUT, 1.5)]
    page = render([CELL], trials, FACTS)
    assert (
        "A held-out draw, of one round and so without an interval: smg cache_aware TTFT p90 x1.50, session mean x1.50."
        in page
    )
    assert row(page, "## Coding agents, high", "smg cache_aware")[1].startswith("2.07 (x2.00")


def predicted(contender: str, live: float, lab: float) -> StoredTrial:
    found = trial(contender, 1, live)
    found.lab = trial(contender, 1, lab).measures
    return found


def test_the_labs_errors_are_marked_from_their_limit_on() -> None:
    page = render([CELL], [predicted("pointsman auto", 1.0, 1.1), predicted("smg cache_aware", 1.0, 0.8)], FACTS)
    heading = "## The lab's predictions"
    assert (
        f"| {CELL.title} | pointsman auto | 0.55 for 0.50 (+10%) | 1.10 for 1.00 (+10%) |" in page.partition(heading)[2]
    )
    assert "| smg cache_aware | **0.40 for 0.50 (-20%)** | **0.80 for 1.00 (-20%)** |" in page.partition(heading)[2]
    assert heading not in render([CELL], rounds("pointsman auto", 1.0), FACTS)


def test_the_lab_predicts_the_sent_sessions(tmp_path: Path) -> None:
    cell = Cell("tiny", "tiny", Load("tiny", 1.0, 3), count=2, speedup=20.0)
    drawn = draw(cell.load, "1", tmp_path)
    found = predict(cell, drawn, "sglang-router cache_aware", 1)
    assert found is not None
    assert (found.failed, found.requests) == (0, sum(map(len, drawn.sessions)))
    assert found.output_tokens == sum(turn.output_length for turns in drawn.sessions for turn in turns)
    assert found.ttft_s is not None
    slow = Cell("tiny", "tiny", Load("tiny", 1.0, 3), count=2, speedup=10.0)
    slower = predict(slow, drawn, "sglang-router cache_aware", 1)
    assert slower is not None
    assert slower.ttft_s is not None
    assert slower.ttft_s["p50"] == pytest.approx(2 * found.ttft_s["p50"], rel=0.2)
    assert predict(cell, drawn, "vllm-router kv_aware", 1) is None
    costs = Costs(cell.speedup, Profile().slowed(cell.time_scale), {"sglang-router cache_aware": Way(0.5, 0.0, 0.0)})
    late = predict(cell, drawn, "sglang-router cache_aware", 1, costs)
    assert late is not None
    assert late.ttft_s is not None
    assert late.ttft_s["p50"] == pytest.approx(found.ttft_s["p50"] + 0.5, rel=0.2)
    assert predict(slow, drawn, "sglang-router cache_aware", 1, costs) == slower, "costs are of another speed-up"


def test_costs_are_stored_beside_the_trials(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    assert results.costs() is None
    costs = Costs(5.0, Profile(step_s=0.003), {"nginx least_conn": Way(0.001, 2e-6, 3e-4)})
    results.save_costs(costs)
    assert results.costs() == costs
    page = render([CELL], [predicted("pointsman auto", 1.0, 1.1)], FACTS, costs=costs)
    assert "| nginx least_conn | 1 | 2.00 | 0.30 |" in page


def test_stored_trials_are_predicted_again_in_place(tmp_path: Path) -> None:
    cell = Cell("tiny", "tiny", Load("tiny", 1.0, 3), count=2, speedup=20.0)
    results = Results(tmp_path / "board.jsonl")
    results.save_plan([cell], FACTS)
    results.add(trial("pointsman auto", 1, 1.0, cell))
    predict_again(results, tmp_path, None)
    [again] = Results(tmp_path / "board.jsonl").trials
    assert again.lab is not None
    assert again.lab.ttft_s is not None


def test_a_router_that_fails_requests_cannot_win() -> None:
    quick = [trial("nginx least_conn", number, 0.1, failed=2) for number in (1, 2, 3)]
    trials = rounds("pointsman auto", 1.0, 1.1, 1.0) + rounds("smg cache_aware", 3.0, 3.3, 3.0) + quick
    assert winners(trials)[1] == "ahead of 1"
    assert f"Failed more: {CELL.title}: nginx least_conn 20.0%." in render([CELL], trials, FACTS)


def test_a_difference_that_may_be_chance_is_marked() -> None:
    assert (
        winners(rounds("pointsman auto", 1.0, 3.0, 2.0) + rounds("smg cache_aware", 2.0, 2.0, 2.5))[1] == "even with 1"
    )


def test_a_router_that_does_not_run_is_named_with_the_reason() -> None:
    broken = StoredTrial(cell=CELL.name, contender="dynamo kv", version="1.6.1", round=1, problem="no | answer\nat all")
    page = render([CELL], [*rounds("pointsman auto", 1.0), broken], FACTS)
    assert "| dynamo kv | 1.6.1 | no: no / answer at all |" in page
    for name in ABSENT:
        assert f"| {name} | - | no: " in page


def test_what_is_missing_is_named() -> None:
    trials = rounds("pointsman auto", 1.0, 1.0, 1.0) + rounds("smg cache_aware", 1.0)
    assert f"Missing of 3 rounds: {CELL.title}: smg cache_aware has 1." in render([CELL], trials, FACTS)
    assert "Missing of 3 rounds: chat: all." in render([CELL, CELLS[3]], rounds("pointsman auto", 1.0, 1.0, 1.0), FACTS)
    assert "Missing" not in render([CELL], rounds("pointsman auto", 1.0, 1.0, 1.0), FACTS)


def test_failed_requests_are_counted_by_kind() -> None:
    page = render([CELL], [trial("pointsman auto", 1, 1.0), trial("smg cache_aware", 1, 1.0, failed=2)], FACTS)
    assert row(page, "failed |", "smg cache_aware")[-1] == "2 of 10 (503 2)"


def test_the_best_rivals_are_of_different_products_and_answer_everything() -> None:
    trials = [
        *rounds("pointsman auto", 0.1, 0.1),
        *rounds("vllm-router cache_aware", 1.0, 1.0),
        *rounds("vllm-router kv_aware", 1.1, 1.1),
        *rounds("smg cache_aware", 2.0, 2.0),
        *rounds("sglang-router cache_aware", 2.5, 2.5),
        *rounds("nginx least_conn", 0.3, 0.3),
        *rounds("dynamo kv", 0.5),
    ]
    assert best_rivals(trials, POINTSMAN) == ["vllm-router cache_aware", "smg cache_aware", "sglang-router cache_aware"]
    trials[2] = trial("vllm-router cache_aware", 1, 1.0, failed=1)
    assert best_rivals(trials, POINTSMAN) == ["vllm-router kv_aware", "smg cache_aware", "sglang-router cache_aware"]
    # Only the rounds that all have, and no held-out draw.
    later = [trial("vllm-router kv_aware", number, 9.0) for number in (4, HELD_OUT)]
    assert best_rivals(trials + later, POINTSMAN)[0] == "vllm-router kv_aware"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=5))
def test_the_interval_of_a_ratio_contains_it(pairs: list[tuple[float, float]]) -> None:
    trials = rounds("pointsman auto", *(own for own, _ in pairs)) + rounds(
        "smg cache_aware", *(rival for _, rival in pairs)
    )
    entry = Comparison(CELL, trials).entry("smg cache_aware", TTFT[1])
    assert entry.ratio is not None
    assert entry.ratio == pytest.approx(math.prod(rival / own for own, rival in pairs) ** (1 / len(pairs)))
    assert entry.low <= entry.ratio * (1 + 1e-9)
    assert entry.high >= entry.ratio * (1 - 1e-9)


def test_more_hits_win_and_less_cpu_time_wins() -> None:
    comparison = Comparison(CELL, rounds("pointsman auto", 1.0) + rounds("smg cache_aware", 2.0))
    assert comparison.ranked(SESSION) == ["pointsman auto", "smg cache_aware"]
    assert comparison.ranked(CPU) == ["smg cache_aware", "pointsman auto"]
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
        RequestRecord(
            session="a", turn=1, status=200, t_send=0.0, ttft_s=1.0, e2e_s=2.0, prompt_tokens=10, output_tokens=11
        ),
        RequestRecord(
            session="a", turn=2, status=200, t_send=3.0, ttft_s=1.0, e2e_s=2.0, prompt_tokens=30, output_tokens=11
        ),
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
    # Slices of a prompt: its 20 first tokens are looked up again.
    sliced = measure(records, {**counted, "cached": 50.0, "asked": 60.0, "idle": 0.5}, 9.0)
    assert sliced.hit_ratio == 0.75


@pytest.mark.parametrize("load", [cell.load for cell in CELLS], ids=[cell.name for cell in CELLS])
def test_a_round_is_the_same_for_everybody_and_another_round_is_another_draw(load: Load, tmp_path: Path) -> None:
    first, again, other = (draw(load, name, tmp_path) for name in ("1", "1", "2"))
    assert first == again
    assert first.sessions != other.sessions
    assert first.source == "generated"
    parents = [turns for turns in first.sessions if not isinstance(turns[0], SubagentRequest)]
    starts = [turns[0].timestamp_ms for turns in parents]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert starts[-1] <= load.span_s * 1e3
    names = [(turn.session, turn.turn) for turns in first.sessions for turn in turns]
    assert len(set(names)) == len(names)
    if load.kind != "chat":
        assert len(parents) == load.sessions + load.burst
        turns = [turn for of in parents for turn in of]
        assert all((turn.think_ms or 0.0) <= PAUSE_LIMIT_S * 1e3 for turn in turns)
        assert max(map(len, parents)) <= TURN_LIMIT
    assert (len(parents) < len(first.sessions)) is bool(load.forks.share)


def test_a_burst_comes_within_its_seconds(tmp_path: Path) -> None:
    load = Load("agentic", 80.0, 5, burst=10, burst_s=5.0)
    starts = [turns[0].timestamp_ms / 1e3 for turns in draw(load, "1", tmp_path).sessions]
    assert max(sum(begin <= start <= begin + 5.0 for start in starts) for begin in starts) >= 10


def test_shown_commands_name_no_folder_of_this_machine() -> None:
    for contender in contenders():
        if contender.is_pointsman or contender.name.startswith("nginx"):
            assert not re.search(r"(^| )[./][^ ]*/", shown_command(contender)), contender.name
    up = next(contender for contender in contenders() if contender.name == "pointsman auto")
    assert "pointsman_cli.main up --engine URL --listen 127.0.0.1:PORT" in shown_command(up)


@pytest.mark.parametrize("module", ["pointsman.cli.main", "pointsman_cli.main"])
def test_pointsmans_commands_are_shown_as_an_operator_types_them(module: str, tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.add(
        StoredTrial(
            cell=CELL.name,
            contender="pointsman auto",
            version="1",
            round=1,
            command=f"python -m {module} up --engine URL",
        )
    )
    page = render([CELL], results.trials, {"rounds": 1})
    assert "pointsman auto:\npointsman up --engine URL\n" in page
    assert module not in page


def test_the_services_of_one_command_are_told_apart() -> None:
    from bench.rivals.contenders import Part

    up = Part("up", ["python"])
    assert part_label(up, ["python", "-m", "pointsman_cli.main", "gateway", "--listen", "a:1"]) == "gateway"
    assert part_label(up, ["python", "-c", "from multiprocessing"]) == "up"
