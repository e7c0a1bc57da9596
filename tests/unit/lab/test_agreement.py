"""The comparison of live and simulated runs: the plan of the runs, their measures, and what is said of means and differences."""

from __future__ import annotations

import pytest

from pointsman_lab.live.agreement import (
    LIVE,
    SIMULATED,
    Case,
    Kind,
    StoredRun,
    compare_means,
    compare_signs,
    page,
    rounds,
    run_measures,
)
from pointsman_lab.live.paired_runs import Draws, Variant
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.traces import TINY_TRACE


def stored(kind: Kind, policy: str, seed: int, ttft: float, rate: float = 1.0) -> StoredRun:
    return StoredRun(kind, policy, rate, seed, {"ttft_mean_s": ttft, "failed": 0.0}, 1, 0.001)


def runs(live: list[float], live_base: list[float], simulated: list[float], base: list[float]) -> list[StoredRun]:
    """Runs of the policies "base" and "new", one seed for each value."""
    given: list[tuple[Kind, str, list[float]]] = [
        (LIVE, "base", live_base),
        (LIVE, "new", live),
        (SIMULATED, "base", base),
        (SIMULATED, "new", simulated),
    ]
    return [stored(kind, name, seed, value) for kind, name, values in given for seed, value in enumerate(values)]


def answered(session: str, turn: int, t_send: float, e2e_s: float, status: int = 200) -> RequestRecord:
    return RequestRecord(
        session=session, turn=turn, status=status, t_send=t_send, ttft_s=0.5, e2e_s=e2e_s, prompt_tokens=10
    )


def test_the_order_of_the_policies_is_reversed_from_one_draw_to_the_next() -> None:
    first, second = rounds(["a", "b"], [0.5, 1.0], [7, 8])
    assert [(case.policy, case.rate) for case in first] == [("a", 0.5), ("b", 0.5), ("a", 1.0), ("b", 1.0)]
    assert [case.policy for case in second] == ["b", "a", "b", "a"]
    assert {case.seed for case in second} == {8}


def test_a_session_lasts_from_its_first_request_to_its_last_answer_and_counts_only_if_all_were_answered() -> None:
    records = [
        answered("whole", 1, 1.0, 2.0),
        answered("whole", 2, 5.0, 4.0),
        answered("short", 1, 0.0, 2.0),
        answered("refused", 1, 0.0, 1.0),
        answered("refused", 2, 9.0, 1.0, status=429),
    ]
    measures = run_measures(records)
    assert measures["session_mean_s"] == pytest.approx((8.0 + 2.0) / 2)
    assert (measures["sessions"], measures["sessions_failed"], measures["failed"]) == (2, 1, 1)


def test_means_are_compared_over_the_draws_that_were_served_both_live_and_simulated() -> None:
    # The third live draw is not simulated yet.
    compared = compare_means(runs([1.0, 2.0, 90.0], [1.0, 1.0, 1.0], [1.2, 2.4], [1.0, 1.0]))
    (new,) = [comparison for comparison in compared if comparison.policy == "new"]
    assert (new.live, new.simulated, new.trials) == pytest.approx((1.5, 1.8, 2))
    assert new.error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("simulated", "verdict"),
    [([0.6, 0.7, 0.65], "one sign"), ([1.6, 1.7, 1.65], "signs differ")],
)
def test_a_difference_that_is_seen_live_must_have_the_same_sign_simulated(simulated: list[float], verdict: str) -> None:
    (difference,) = compare_signs(runs([0.5, 0.6, 0.55], [1.0, 1.1, 1.05], simulated, [1.0, 1.1, 1.05]))
    assert (difference.policy, difference.baseline) == ("new", "base")
    assert difference.live.mean == pytest.approx(-0.5)
    assert difference.verdict == verdict


def test_a_difference_whose_live_interval_contains_0_decides_nothing() -> None:
    (difference,) = compare_signs(runs([0.5, 1.6, 0.9], [1.0, 1.0, 1.1], [1.6, 1.7, 1.6], [1.0, 1.1, 1.0]))
    assert difference.verdict == "no difference live"


def test_the_page_names_the_largest_error_and_how_many_signs_agree() -> None:
    text = page(runs([0.5, 0.6, 0.55], [1.0, 1.1, 1.05], [0.6, 0.7, 0.65], [1.0, 1.1, 1.05]))
    assert "| 1 | new | TTFT mean | 550 ms | 650 ms | +18.2% |" in text
    assert "| 1 | new - base | TTFT mean | -500 ms ± " in text
    assert "excludes 0 for 1 of 1 differences; of these, live and simulated difference have one sign for 1." in text
    assert "The greatest error of a mean TTFT or session time is 18.2% (goal: 15%)." in text


def test_no_two_cases_share_a_prompt_or_a_session() -> None:
    cases = [Case(policy, rate, seed) for policy in ("a", "b") for rate in (0.5, 1.0) for seed in (1, 2)]
    for trace in (None, TINY_TRACE):
        draws = [Draws(trace, 4, 10.0).draw(case.seed, case.rate, case.number) for case in cases]
        blocks = [{block for request in drawn for block in request.hash_ids} for drawn in draws]
        assert sum(map(len, blocks)) == len(set.union(*blocks))
        sessions = [{request.session for request in drawn} for drawn in draws]
        assert sum(map(len, sessions)) == len(set.union(*sessions))
        # Policies see one draw, apart from the names.
        half = len(cases) // 2
        for one, other in zip(draws[:half], draws[half:], strict=True):
            assert [(at.timestamp_ms, at.input_length, at.think_ms) for at in one] == [
                (at.timestamp_ms, at.input_length, at.think_ms) for at in other
            ]


def test_a_policy_with_admission_parks_new_sessions_live_and_simulated() -> None:
    plain, admitting = Variant.of("foresight", 12.5), Variant.of("foresight+admission", 12.5)
    assert (plain.policy, plain.environment, plain.state.admission.on) == (
        "foresight",
        {"POINTSMAN_ROUTER_POLICY": "foresight"},
        False,
    )
    assert admitting.environment == {
        "POINTSMAN_ROUTER_POLICY": "foresight",
        "POINTSMAN_ROUTER_SESSION_ADMISSION": "true",
        "POINTSMAN_ROUTER_ADMISSION_STANDARD_S": "12.5",
    }
    assert (admitting.policy, admitting.state.admission.on, admitting.state.admission.standard_s) == (
        "foresight",
        True,
        12.5,
    )
