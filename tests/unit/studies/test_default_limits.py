"""When a policy counts as no worse than the default one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.report.measures import measure
from pointsman_lab.report.request_record import RequestRecord
from studies.default.limits import (
    FAIL,
    FAILED,
    LIMITS,
    OPEN,
    PASS,
    SEEDS,
    SESSION,
    changes,
    failed_more,
    figures,
    seeds_needed,
    table,
    verdict,
)

Figures = dict[int, Mapping[str, float]]


def trials(factors: list[float], metric: str = "ttft_p90_s") -> tuple[Figures, Figures]:
    """Trials of a policy and of the default one that differ in one metric, by a factor in each seed."""
    base: Figures = {seed: dict.fromkeys((*LIMITS, FAILED), 1.0 + seed) for seed in range(len(factors))}
    ours: Figures = {seed: {**base[seed], metric: base[seed][metric] * factor} for seed, factor in enumerate(factors)}
    return ours, base


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.0] * 5, PASS),
        ([1.04, 1.03, 1.04, 1.05, 1.04], PASS),
        ([0.5, 0.4, 0.6, 0.5, 0.5], PASS),
        ([0.8, 1.3, 0.7, 1.4, 0.9], OPEN),
        ([1.2, 1.3, 1.2, 1.4, 1.3], FAIL),
        ([1.0], OPEN),
        ([0.8, 1.3, 0.7, 1.4] * 5, FAIL),
    ],
)
def test_a_limit_is_kept_if_the_upper_end_of_the_interval_is_within_it(factors: list[float], expected: str) -> None:
    found = changes(*trials(factors))
    assert next(change for change in found if change.metric == "ttft_p90_s").verdict == expected
    assert verdict(found, more_failed=False) == expected
    assert {change.verdict for change in found if change.metric != "ttft_p90_s"} <= {PASS, OPEN}


def test_each_metric_has_its_own_limit() -> None:
    factors = [1.1, 1.1, 1.1, 1.1, 1.1]
    verdicts = {metric: verdict(changes(*trials(factors, metric)), more_failed=False) for metric in LIMITS}
    assert verdicts == {metric: PASS if metric in ("ttft_p99_s", "tpot_p90_s") else FAIL for metric in LIMITS}


def test_a_cell_fails_if_more_requests_failed() -> None:
    ours, base = trials([1.0] * 5)
    assert not failed_more(ours, base)
    ours[2] = {**ours[2], FAILED: 9.0}
    assert failed_more(ours, base)
    assert verdict(changes(ours, base), more_failed=True) == FAIL


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=25))
def test_the_interval_holds_the_geometric_mean_and_does_not_depend_on_the_scale(factors: list[float]) -> None:
    ours, base = trials(factors)
    found = {change.metric: change for change in changes(ours, base)}["ttft_p90_s"]
    kept = factors[: SEEDS[-1]]
    assert found.trials == len(kept)
    assert found.mean == pytest.approx(math.prod(kept) ** (1 / len(kept)) - 1)
    assert found.low <= found.mean + 1e-12
    assert found.mean <= found.high + 1e-12
    if found.trials == SEEDS[-1]:
        assert found.verdict != OPEN


def test_seeds_are_added_until_a_cell_is_decided() -> None:
    undecided = [0.8, 1.3, 0.7, 1.4] * 5
    for done, expected in ((0, 5), (1, 5), (5, 10), (10, 20), (20, 20)):
        found = changes(*trials(undecided[:done]))
        assert seeds_needed(found, more_failed=False) == expected
    assert seeds_needed(changes(*trials([1.0] * 5)), more_failed=False) == 5
    assert seeds_needed(changes(*trials([1.3, 1.31, 1.3, 1.3, 1.3])), more_failed=False) == 5


def test_the_table_has_every_cell_and_marks_what_is_not_kept() -> None:
    text = table(
        {
            "good": (changes(*trials([1.0] * 5)), False),
            "bad": (changes(*trials([1.3, 1.31, 1.3, 1.3, 1.3])), False),
            "not run": ([], False),
        }
    )
    good, bad, missing = text.splitlines()[2:]
    assert good.startswith("| good | 5 | +0.0% (to +0.0%) |")
    assert good.endswith("| pass |")
    assert "**" not in good
    assert "**+30.2% (to +30.8%)**" in bad
    assert bad.endswith("| FAIL |")
    assert missing == f"| not run | 0 |{' - |' * len(LIMITS)} open |"


def test_a_session_lasts_from_its_first_request_to_the_end_of_its_last_answer() -> None:
    def answer(session: str, turn: int, sent: float, took: float) -> RequestRecord:
        return RequestRecord(
            session=session, turn=turn, status=200, t_send=sent, ttft_s=1.0, e2e_s=took, output_tokens=3
        )

    records = [answer("a", 2, 10.0, 4.0), answer("a", 1, 2.0, 5.0), answer("b", 1, 3.0, 2.0)]
    measured = figures(records, measure(records, {}))
    assert measured[SESSION] == pytest.approx((12.0 + 2.0) / 2)
    assert measured[FAILED] == 0.0
    assert measured.keys() == {*LIMITS, FAILED}
