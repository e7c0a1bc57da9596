"""What a prefill costs, and how the router learns it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.prefill_curve import DEFAULT_CURVE, MeanWork, PrefillCurve, PrefillCurveFit, PrefillWork

LENGTHS = st.integers(1, 200_000)


@given(LENGTHS, LENGTHS, st.integers(0, 200_000))
def test_a_prompt_costs_the_same_however_it_is_cut(first: int, second: int, cached: int) -> None:
    curve = PrefillCurve(0.0, 5e-5, 3e-9)
    cut = curve.cost_s(first, cached) + curve.cost_s(second, cached + first)
    assert cut == pytest.approx(curve.cost_s(first + second, cached))


@given(st.floats(0.01, 100), st.integers(0, 200_000), st.sampled_from([0.0, 3e-9]))
def test_tokens_in_is_the_inverse(seconds: float, cached: int, pair: float) -> None:
    curve = PrefillCurve(0.005, 5e-5, pair)
    assert curve.cost_s(curve.tokens_in(seconds, cached), cached) == pytest.approx(seconds)


def test_nothing_costs_nothing() -> None:
    assert DEFAULT_CURVE.cost_s(0, 1_000) == 0.0
    assert DEFAULT_CURVE.tokens_in(DEFAULT_CURVE.base_s / 2, 0) == 0.0


@pytest.mark.parametrize("scale", [0.05, 1.0, 300.0])
def test_an_engine_of_any_speed_is_learned_from_few_prefills(scale: float) -> None:
    truth = PrefillCurve(0.02 * scale, 3e-5 * scale, 6e-9 * scale)
    rng, fit = random.Random(1), PrefillCurveFit()
    for _ in range(40):
        new, cached = rng.randint(200, 60_000), rng.choice((0, rng.randint(0, 60_000)))
        fit.learn(new, cached, truth.cost_s(new, cached) * rng.uniform(0.95, 1.05))
    for new, cached in ((4_096, 60_000), (30_000, 0), (100_000, 0)):
        assert fit.curve.cost_s(new, cached) == pytest.approx(truth.cost_s(new, cached), rel=0.15)
    assert fit.curve.cost_s(500, 0) == pytest.approx(truth.cost_s(500, 0), rel=0.4)


def test_what_samples_do_not_tell_keeps_the_shape_it_had() -> None:
    fit = PrefillCurveFit()
    for _ in range(500):
        fit.learn(1_000, 0, DEFAULT_CURVE.cost_s(1_000, 0) * 10)
    assert fit.curve.cost_s(1_000, 0) == pytest.approx(DEFAULT_CURVE.cost_s(1_000, 0) * 10, rel=0.02)
    assert fit.curve.cost_s(60_000, 0) == pytest.approx(DEFAULT_CURVE.cost_s(60_000, 0) * 10, rel=0.5)


def test_one_stall_is_no_new_curve_but_a_slower_engine_is() -> None:
    fit = PrefillCurveFit()
    for _ in range(50):
        fit.learn(8_000, 0, 1.0)
    fit.learn(8_000, 0, 60.0)
    assert fit.curve.cost_s(8_000, 0) == pytest.approx(1.0, rel=0.1)
    for _ in range(200):
        fit.learn(8_000, 0, 4.0)
    assert fit.curve.cost_s(8_000, 0) == pytest.approx(4.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(-5, 10**9), st.integers(0, 10**9), st.floats(allow_nan=True)), max_size=30))
def test_whatever_is_learned_a_cost_is_a_positive_number(samples: list[tuple[int, int, float]]) -> None:
    fit = PrefillCurveFit()
    for sample in samples:
        fit.learn(*sample)
    assert 0.0 < fit.curve.cost_s(1, 0) < fit.curve.cost_s(1_000, 0) < fit.curve.cost_s(1_000, 50_000) < float("inf")


def test_usual_work_is_a_mean_that_forgets() -> None:
    mean_work = MeanWork().after(100, 0, 100).after(300, 1_000, 1_300)
    assert mean_work == MeanWork(PrefillWork(200.0, (100 * 100 + 300 * 2_300) / 2), 2)
    for _ in range(1_000):
        mean_work = mean_work.after(50, 0, 50)
    assert mean_work.work.tokens == pytest.approx(50, abs=1)


def test_usual_work_is_news_when_it_has_moved_or_rests_on_far_more() -> None:
    mean_work, sent = MeanWork(), [MeanWork()]
    for tokens in [100] * 1_000 + [200] * 1_000:
        mean_work = mean_work.after(tokens, 0, tokens)
        if mean_work.differs_from(sent[-1]):
            sent.append(mean_work)
    alike = [mean.requests for mean in sent if mean.requests <= 1_000]
    assert alike == [0, 1, 2, 4, 8, 16, 32, 64, 128]
    changed = [mean.work.pairs for mean in sent[len(alike) - 1 :]]
    assert all(1.1 < after / before < 1.2 for before, after in pairwise(changed))
    assert changed[-1] == pytest.approx(200**2, rel=0.1)
