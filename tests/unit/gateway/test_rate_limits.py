"""Limits hold over any schedule, never starve, and count what is open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.rate_limits import KeyCharge, RateLimited, RateLimiter, RateLimits

KEY = b"k"
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5_000)), min_size=1, max_size=60)


@given(st.integers(1, 50), STEPS)
def test_requests_stay_below_the_rate(limit: int, steps: list[tuple[float, int]]) -> None:
    limiter, limits, now, admitted = RateLimiter(), RateLimits(requests_per_minute=limit), 1e6, 0
    began = now
    for pause, _ in steps:
        now += pause / 10
        try:
            limiter.admit(KEY, limits, now).close()
            admitted += 1
        except RateLimited as refused:
            now += refused.retry_after_s
            limiter.admit(KEY, limits, now).close()
            admitted += 1
        assert admitted <= limit + limit * (now - began) / 60 + 1e-3


@given(st.integers(1, 10_000), STEPS)
def test_tokens_stay_below_the_rate_but_for_the_last_request(limit: int, steps: list[tuple[float, int]]) -> None:
    limiter, limits, now, used, most = RateLimiter(), RateLimits(tokens_per_minute=limit), 1e6, 0, 0
    began = now
    for pause, tokens in steps:
        now += pause
        try:
            admission = limiter.admit(KEY, limits, now)
        except RateLimited as refused:
            now += refused.retry_after_s
            admission = limiter.admit(KEY, limits, now)
        admission.charge(tokens // 2, now)
        admission.charge(tokens, now)
        admission.close()
        assert used <= limit + limit * (now - began) / 60 + 1e-2
        used, most = used + tokens, max(most, tokens)


@given(st.integers(1, 5), st.lists(st.integers(-1, 9), max_size=60))
def test_what_is_open_never_exceeds_the_limit_and_comes_back(limit: int, moves: list[int]) -> None:
    limiter, limits = RateLimiter(), RateLimits(in_flight=limit)
    grants: list[KeyCharge] = []
    for move in moves:
        if move < 0:
            if len(grants) < limit:
                grants.append(limiter.admit(KEY, limits, 0.0))
            else:
                with pytest.raises(RateLimited):
                    limiter.admit(KEY, limits, 0.0)
        elif grants:
            done = grants.pop(move % len(grants))
            done.close()
            done.close()
        assert limiter.in_flight(KEY) == len(grants)
    for admission in grants:
        admission.close()
    assert limiter.in_flight(KEY) == 0


def test_a_prompt_longer_than_a_minutes_worth_passes_and_is_paid_for() -> None:
    limiter, limits = RateLimiter(), RateLimits(tokens_per_minute=600)
    limiter.admit(KEY, limits, 0.0).charge(1_800, 0.0)
    with pytest.raises(RateLimited) as refused:
        limiter.admit(KEY, limits, 0.0)
    assert refused.value.retry_after_s == pytest.approx(120.1, abs=0.01)
    limiter.admit(KEY, limits, refused.value.retry_after_s)


def test_a_better_count_replaces_the_estimate() -> None:
    limiter, limits = RateLimiter(), RateLimits(tokens_per_minute=100)
    admission = limiter.admit(KEY, limits, 0.0)
    admission.charge(500, 0.0)
    admission.charge(10, 0.0)
    limiter.admit(KEY, limits, 0.0)


def test_keys_do_not_share_and_no_limit_is_none() -> None:
    limiter = RateLimiter()
    limiter.admit(b"a", RateLimits(requests_per_minute=1), 0.0)
    limiter.admit(b"b", RateLimits(requests_per_minute=1), 0.0)
    for _ in range(1_000):
        limiter.admit(b"c", RateLimits(), 0.0).charge(10**9, 0.0)


def test_new_limits_hold_at_once_and_open_requests_stay_counted() -> None:
    limiter = RateLimiter()
    admission = limiter.admit(KEY, RateLimits(tokens_per_minute=60), 0.0)
    admission.charge(120, 0.0)
    with pytest.raises(RateLimited):
        limiter.admit(KEY, RateLimits(tokens_per_minute=600), 0.0)  # the debt is not forgiven
    limiter.admit(KEY, RateLimits(in_flight=2), 0.0)
    with pytest.raises(RateLimited):
        limiter.admit(KEY, RateLimits(in_flight=2), 0.0)
    admission.close()
    limiter.admit(KEY, RateLimits(in_flight=2), 0.0)
    limiter.keep(set())
    assert limiter.in_flight(KEY) == 0
