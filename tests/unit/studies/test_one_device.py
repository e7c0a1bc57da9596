"""What routers get in front of engines that share a device: the draws of a round, and the figures of the trials."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pointsman_lab.workload.traces import shared_prefix
from studies.scoreboard.board import Cell, StoredTrial
from studies.scoreboard.comparison import Comparison
from studies.scoreboard.measures import Measures
from studies.scoreboard.one_device import CONTEXT, agentic, fan_out, figures
from studies.scoreboard.traffic import Load

KINDS = ("cuda", "cpu")
OWN, OTHER = "pointsman auto", "nginx least_conn"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_is_the_same_for_all_routers_and_another_in_each_round(kind: str) -> None:
    for draw in (agentic, fan_out):
        load = Load("any", 5.0, 6)
        assert draw(kind, load, 1) == draw(kind, load, 1)
        ids = [
            {block for turns in draw(kind, load, number).sessions for it in turns for block in it.hash_ids}
            for number in (1, 2)
        ]
        assert draw(kind, load, 1) != draw(kind, load, 2)
        if draw is fan_out:
            assert ids[0].isdisjoint(ids[1])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_fit_the_context_and_sessions_come_in_order(kind: str) -> None:
    for draw in (agentic, fan_out):
        sessions = draw(kind, Load("any", 5.0, 6), 1).sessions
        assert all(turn.input_length + turn.output_length < CONTEXT[kind] for turns in sessions for turn in turns)
        starts = [turns[0].timestamp_ms for turns in sessions]
        assert starts == sorted(starts)


@pytest.mark.parametrize("kind", KINDS)
def test_children_begin_with_their_parent_and_part_then(kind: str) -> None:
    (sessions,) = (fan_out(kind, Load("any", 5.0, 1), 1).sessions,)
    (parent,), *children = sessions
    assert len(children) >= 4
    assert {child.timestamp_ms for (child,) in children} == {children[0][0].timestamp_ms}
    assert children[0][0].timestamp_ms > parent.timestamp_ms
    for (child,) in children:
        assert shared_prefix(child.hash_ids, parent.hash_ids) == len(parent.hash_ids) < len(child.hash_ids)
    for (first,), (second,) in pairwise(children):
        assert shared_prefix(first.hash_ids, second.hash_ids) == len(parent.hash_ids)


def trial(contender: str, number: int, ttft_s: float, failed: int = 0) -> StoredTrial:
    times = {"mean": ttft_s, "p50": ttft_s, "p90": 2 * ttft_s, "p99": 3 * ttft_s}
    measures = Measures(
        requests=10, failed=failed, errors={}, sessions=2, span_s=1.0, ttft_s=times, tpot_s=None, e2e_s=times, session_s=times,
        output_tokens=5, hit_ratio=0.5, cpu_ms={}, beside_cpu_ms=0.0, engines_cpu_s=0.0, rss_mb=0.0, idle=0.5,
    )  # fmt: skip
    return StoredTrial(cell="agentic", contender=contender, version="1", round=number, measures=measures)


def test_each_router_is_shown_beside_pointsman_in_the_same_rounds() -> None:
    trials = [
        trial("pointsman auto", 1, 1.0),
        trial("pointsman auto", 2, 2.0),
        trial(OTHER, 1, 2.0),
        trial(OTHER, 2, 4.0, failed=1),
        trial("pointsman auto", 3, 1.5),
        trial(OTHER, 3, 3.0, failed=1),
    ]
    trials.append(StoredTrial(cell="agentic", contender="b", version="1", round=1, problem="no program"))
    found = {
        figure.metric: figure for figure in figures(Comparison(Cell("agentic", "x", Load("agentic", 1.0)), trials))
    }
    own, other = found[f"agentic / {OWN} / TTFT p90"], found[f"agentic / {OTHER} / TTFT p90"]
    assert (own.value, own.baseline, own.note) == (3.0, None, "")
    assert (other.value, other.note) == (6.0, "2.00 to 2.00")
    assert other.ratio == pytest.approx(2.0)
    assert found[f"agentic / {OTHER} / failed"].value == pytest.approx(20 / 3)
    assert found[f"agentic / {OTHER} / rounds"].value == 3
    assert found[f"agentic / {OTHER} / hit ratio"].value == 50.0
    assert "no program" in found["agentic, b"].note


def test_a_fan_out_has_no_sessions() -> None:
    cell = Cell("fan-out", "x", Load("fan-out", 1.0))
    shown = StoredTrial(
        cell="fan-out", contender="pointsman auto", version="1", round=1, measures=trial("a", 1, 1.0).measures
    )
    assert not [figure for figure in figures(Comparison(cell, [shown])) if "session" in figure.metric]
