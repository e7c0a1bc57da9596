"""The history of pools and instances: what is in a bucket, what is not known, and that it stays small whatever happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.history import fleet_history
from pointsman_router.core.history.fleet_history import FleetHistory, sorted_rows
from pointsman_router.core.history.fleet_sampler import take_sample
from pointsman_router.core.history.rows import (
    INSTANCE_BUCKETS,
    INSTANCE_STEP_S,
    POOL_BUCKETS,
    POOL_STEP_S,
    WINDOW_S,
    InstanceMeasure,
    InstanceSample,
    PoolMeasure,
    PoolSample,
)
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import Decision, Load
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import info, join, place, request, state

NAN = math.nan


def sampled(state_: RouterState, history: FleetHistory, *moments: float) -> FleetHistory:
    """The history after samples at these moments, in s."""
    for now in moments:
        for _ in take_sample(state_, history, now):
            pass
    return history


def pool(history: FleetHistory, measure: PoolMeasure, now: float, model: str = "m") -> list[float]:
    row = history.pools[model] if model else history.total
    return history.read_pool(row, measure, now)


def instance(history: FleetHistory, measure: InstanceMeasure, now: float, name: str = "a") -> list[float]:
    return history.read_instance(history.instances[name], measure, now)


def same(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted, nan_ok=True, rel=1e-3)


def decision(made: RouterState, request_id: str, tokens: int = 100) -> Decision:
    effects = made.handle(ev.PlaceRequested(request(request_id, tokens), "g"), 0.0)
    [found] = [effect.decision for effect in effects if isinstance(effect, ev.DecisionMade)]
    return found


def finished(first_ms: float | None = None, **changes: Any) -> ev.Finished:
    timings: Mapping[str, float] | None = None if first_ms is None else {"first_token": first_ms}
    return replace(ev.Finished("r", "OK", timings_ms=timings), **changes)


# ---- pools ----


def test_an_idle_pool_has_zeros_where_they_are_known_and_gaps_where_they_are_not() -> None:
    made = state()
    join(made, "a", 1)
    history = sampled(made, FleetHistory(0.0), 0.0, 2.5, 5.0, 7.5)
    for model in ("m", ""):
        for measure in (PoolMeasure.PLACEMENTS, PoolMeasure.REFUSALS, PoolMeasure.HELD_REQUESTS, PoolMeasure.BACKLOG):
            assert pool(history, measure, 10.0, model) == [0.0, 0.0]
        for measure in (PoolMeasure.TTFT_P50, PoolMeasure.PREDICTED_HITS, PoolMeasure.KV_USAGE_MAX):
            same(pool(history, measure, 10.0, model), [NAN, NAN])
    # The bucket that is still open is not reported.
    assert len(pool(history, PoolMeasure.PLACEMENTS, 9.9)) == 1


def test_rates_are_per_second_and_shares_of_tokens() -> None:
    made = state()
    join(made, "a", 1)
    history = sampled(made, FleetHistory(0.0), 0.0)
    decided = replace(decision(made, "r", 1_000), cached_tokens=250)
    for number in range(10):
        history.decided(decided, 1.0)
        history.ended(decided, finished(first_ms=100.0 if number < 5 else 1_000.0, cached_tokens=500), 2.0)
    history.refused(ev.Refused("x", "RESOURCE_EXHAUSTED", "full", pool="m"), 3.0)
    for model in ("m", ""):
        same(pool(history, PoolMeasure.PLACEMENTS, 5.0, model), [2.0])
        same(pool(history, PoolMeasure.REFUSALS, 5.0, model), [0.2])
        same(pool(history, PoolMeasure.PREDICTED_HITS, 5.0, model), [0.25])
        same(pool(history, PoolMeasure.REPORTED_HITS, 5.0, model), [0.5])
        assert pool(history, PoolMeasure.TTFT_P50, 5.0, model) == [pytest.approx(0.1, rel=0.08)]
        assert pool(history, PoolMeasure.TTFT_P90, 5.0, model) == [pytest.approx(1.0, rel=0.08)]
    assert instance(history, InstanceMeasure.TTFT_P50, 15.0) == [pytest.approx(0.1, rel=0.08)]


def test_what_this_router_computed_in_parts_is_no_hit() -> None:
    made = state()
    join(made, "a", 1)
    history = sampled(made, FleetHistory(0.0), 0.0)
    decided = replace(decision(made, "r", 1_000), cached_tokens=900)
    later = replace(decided, previous_id="before")
    [step] = decided.result.steps
    offloaded = replace(decided, result=replace(decided.result, steps=(step, step)))
    history.decided(later, 1.0)
    for ended_decision in (later, offloaded):
        history.ended(ended_decision, finished(cached_tokens=1_000), 1.0)
    history.ended(decided, finished(cached_tokens=None), 1.0)
    same(pool(history, PoolMeasure.PLACEMENTS, 5.0), [0.2])
    same(pool(history, PoolMeasure.PREDICTED_HITS, 5.0), [NAN])
    same(pool(history, PoolMeasure.REPORTED_HITS, 5.0), [NAN])


def test_refusals_that_another_router_may_place_do_not_count() -> None:
    history = sampled(state(), FleetHistory(0.0), 0.0)
    history.refused(ev.Refused("x", "UNAVAILABLE", "another owns it", not_serving=True, pool="m"), 1.0)
    assert history.pools == {}
    history.refused(ev.Refused("x", "NOT_FOUND", "no such model"), 1.0)
    assert history.pools == {}
    same(pool(history, PoolMeasure.REFUSALS, 5.0, ""), [0.2])


def test_a_refusal_for_want_of_room_names_its_pool() -> None:
    made = state(limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=0))
    join(made, "a", 1)
    place(made, request("r1", 100))
    refused = place(made, request("r2", 100))
    assert isinstance(refused, ev.Refused)
    assert refused.pool == "m"
    made.handle(ev.LoadReported(1, "a", Load(0.0, suspended="asleep")), 0.0)
    refused = place(made, request("r3", 100))
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.pool) == ("UNAVAILABLE", "m")


def test_loads_are_means_of_the_samples_and_stale_reports_do_not_count() -> None:
    made = state()
    join(made, "a", 1)
    join(made, "b", 2)
    made.handle(ev.LoadReported(1, "a", Load(0.0, running=1, kv_usage=0.2)), 0.0)
    made.handle(ev.LoadReported(2, "b", Load(0.0, running=3, kv_usage=0.6)), 0.0)
    history = sampled(made, FleetHistory(0.0), 0.0)
    place(made, request("r1", 400))
    place(made, request("r2", 400))
    sampled(made, history, 2.5)
    same(pool(history, PoolMeasure.OPEN_REQUESTS, 5.0), [1.0])
    same(pool(history, PoolMeasure.PENDING_PREFILL_TOKENS, 5.0), [400.0])
    same(pool(history, PoolMeasure.KV_USAGE, 5.0), [0.4])
    same(pool(history, PoolMeasure.KV_USAGE_MAX, 5.0), [0.6])
    assert pool(history, PoolMeasure.BACKLOG, 5.0)[0] > 0.0
    sampled(made, history, 5.0 + made.settings.stale_report_s)
    same(pool(history, PoolMeasure.KV_USAGE, 15.0), [0.4, NAN, NAN])
    same(pool(history, PoolMeasure.OPEN_REQUESTS, 15.0), [1.0, NAN, 2.0])
    same(instance(history, InstanceMeasure.RUNNING_REQUESTS, 15.0, "b"), [3.0])


def test_what_an_engine_does_not_report_is_a_gap_and_not_zero() -> None:
    made = state()
    join(made, "a", 1)
    join(made, "b", 2)
    unknown = Load(0.0, running=None, kv_usage=None, prefix_cache_queries=None)
    made.handle(ev.LoadReported(1, "a", unknown), 0.0)
    made.handle(ev.LoadReported(2, "b", Load(0.0, running=3, kv_usage=0.6)), 0.0)
    history = sampled(made, FleetHistory(0.0), 0.0)
    same(pool(history, PoolMeasure.KV_USAGE, 5.0), [0.6])
    same(instance(history, InstanceMeasure.RUNNING_REQUESTS, 15.0, "a"), [NAN])
    same(instance(history, InstanceMeasure.KV_USAGE, 15.0, "a"), [NAN])


def test_a_pool_of_another_router_has_gaps_and_one_that_is_taken_over_begins() -> None:
    made = state(owns_all=False)
    join(made, "a", 1)
    made.handle(ev.LoadReported(1, "a", Load(0.0, running=1, kv_usage=0.5)), 0.0)
    history = sampled(made, FleetHistory(0.0), 0.0, 2.5)
    assert history.pools["m"].owned_since is None
    made.handle(ev.PoolTaken("m"), 6.0)
    sampled(made, history, 7.5, 10.0, 12.5)
    assert history.pools["m"].owned_since == history.total.owned_since == 7.5
    for model in ("m", ""):
        # It was taken in the middle of the second bucket, whose counts are not those of 5 s.
        same(pool(history, PoolMeasure.PLACEMENTS, 15.0, model), [NAN, NAN, 0.0])
        same(pool(history, PoolMeasure.OPEN_REQUESTS, 15.0, model), [NAN, 0.0, 0.0])
    same(pool(history, PoolMeasure.KV_USAGE, 5.0), [0.5])
    same(instance(history, InstanceMeasure.KV_USAGE, 15.0), [0.5])
    made.handle(ev.PoolLost("m"), 15.0)
    sampled(made, history, 15.0)
    assert history.pools["m"].owned_since is None
    same(pool(history, PoolMeasure.PLACEMENTS, 20.0), [NAN, NAN, 0.0, NAN])


def test_a_router_that_stood_still_has_a_gap() -> None:
    made = state()
    join(made, "a", 1)
    history = sampled(made, FleetHistory(0.0), 0.0, 2.5, 30.0, 32.5)
    same(pool(history, PoolMeasure.PLACEMENTS, 35.0), [0.0, NAN, NAN, NAN, NAN, NAN, 0.0])


# ---- instances ----


def counted(incarnation: str, lookups: int, hits: int) -> InstanceSample:
    return InstanceSample("m", incarnation, 1.0, 2.0, 0.5, lookups, hits)


def test_a_new_incarnation_goes_on_in_the_same_row_and_its_counters_begin_anew() -> None:
    history = FleetHistory(0.0)
    for now, sample in enumerate((counted("1", 1_000, 100), counted("1", 1_200, 200), counted("2", 50, 50))):
        history.sample_instance("a", sample, float(now))
    history.sample_instance("a", counted("2", 150, 50), 16.0)
    assert list(history.instances) == ["a"]
    same(instance(history, InstanceMeasure.PREFIX_HITS, 30.0), [0.5, 0.0])
    same(instance(history, InstanceMeasure.OPEN_REQUESTS, 45.0), [1.0, 1.0, NAN])
    # An engine whose counters were reset without a restart.
    history.sample_instance("a", counted("2", 10, 0), 45.0)
    same(instance(history, InstanceMeasure.PREFIX_HITS, 60.0), [0.5, 0.0, NAN, NAN])


def test_what_is_gone_leaves_after_the_window() -> None:
    made = state()
    join(made, "a", 1)
    join(made, "b", 2, model="n", served_names=("n",))
    history = sampled(made, FleetHistory(0.0), 0.0)
    made.handle(ev.AgentGoodbye(2, "b"), 1.0)
    sampled(made, history, WINDOW_S)
    assert sorted(history.pools) == ["m", "n"]
    assert [name for name, _ in sorted_rows(history.instances, "n", None)] == ["b"]
    assert [name for name, _ in sorted_rows(history.instances, "", "a")] == ["b"]
    sampled(made, history, WINDOW_S + 2.5)
    assert sorted(history.pools) == ["m"]
    assert sorted(history.instances) == ["a"]


def test_rows_are_bounded_and_those_that_are_gone_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_history, "MAX_INSTANCES", 10)
    monkeypatch.setattr(fleet_history, "MAX_POOLS", 3)
    history = FleetHistory(0.0)
    for number in range(20):
        history.sample_instance(f"i{number}", counted("1", 0, 0), 0.0)
        history.sample_pool(f"p{number}", PoolSample(owned=True), 0.0)
    assert (len(history.instances), len(history.pools)) == (10, 3)
    history.forget(1.0)
    assert len(history.instances) == 10
    history.forget(2 * INSTANCE_STEP_S + 1.0)
    assert (len(history.instances), len(history.pools)) == (0, 0)


# ---- anything ----

MOMENTS = st.floats(0.0, 60.0)
ACTS = st.one_of(
    st.tuples(st.just("sample"), st.sampled_from("abc"), st.sampled_from("12"), st.integers(0, 1 << 40)),
    st.tuples(st.just("pool"), st.sampled_from("mn"), st.booleans(), st.floats(0, 1e300)),
    st.tuples(st.just("ended"), st.sampled_from("abc"), st.floats(0, 1e12), st.none() | st.integers(0, 200)),
    st.tuples(st.just("decided")),
    st.tuples(st.just("refused"), st.sampled_from(["", "m"])),
    st.tuples(st.just("forget")),
)


@given(st.lists(st.tuples(MOMENTS, ACTS), max_size=60))
def test_whatever_happens_it_is_bounded_and_tells_figures_that_can_be(acts: list[tuple[float, Any]]) -> None:
    made = state()
    join(made, "a", 1)
    decided = decision(made, "r")
    [step] = decided.result.steps
    history, now, sizes = FleetHistory(3.0), 3.0, set[int]()
    for passed, (kind, *values) in acts:
        now += passed
        match kind:
            case "sample":
                name, incarnation, tokens = values
                history.sample_instance(name, counted(incarnation, tokens, tokens // 2), now)
            case "pool":
                name, owned, figure = values
                sample = PoolSample(owned, 1, 2, 3, figure, figure, figure)
                history.sample_pool(name, sample, now)
                history.total.sample(sample, now)
            case "ended":
                name, first_ms, cached = values
                at = replace(decided, result=replace(decided.result, steps=(replace(step, instance_id=name),)))
                history.ended(at, finished(first_ms=first_ms, cached_tokens=cached), now)
            case "decided":
                history.decided(decided, now)
            case "refused":
                history.refused(ev.Refused("x", "UNAVAILABLE", "", pool=values[0]), now)
            case "forget":
                history.forget(now)
        sizes |= {row.ring.size_bytes for row in (*history.pools.values(), history.total)}
    assert sizes <= {4 * len(PoolMeasure) * POOL_BUCKETS}
    assert {row.ring.size_bytes for row in history.instances.values()} <= {4 * len(InstanceMeasure) * INSTANCE_BUCKETS}
    first, last = history.pool_buckets(now)
    assert last - first < POOL_BUCKETS
    assert (last + 1) * POOL_STEP_S <= now
    shares = (PoolMeasure.PREDICTED_HITS, PoolMeasure.REPORTED_HITS)
    for row in (*history.pools.values(), history.total):
        for measure in PoolMeasure:
            values = history.read_pool(row, measure, now)
            assert len(values) == max(last - first + 1, 0)
            known = [value for value in values if not math.isnan(value)]
            assert all(0.0 <= value < math.inf for value in known)
            assert measure not in shares or all(value <= 1.0 for value in known)
    first, last = history.instance_buckets(now)
    for instance_row in history.instances.values():
        for instance_measure in InstanceMeasure:
            values = history.read_instance(instance_row, instance_measure, now)
            assert len(values) == max(last - first + 1, 0) <= INSTANCE_BUCKETS
            assert all(0.0 <= value < math.inf for value in values if not math.isnan(value))


def test_a_sample_can_pause_after_each_instance() -> None:
    made = state()
    for number in range(50):
        join(made, f"i{number}", number + 1)
    history = FleetHistory(0.0)
    pauses = 0
    for _ in take_sample(made, history, 0.0):
        pauses += 1
        # One leaves and one comes in the middle of it.
        if pauses == 70:
            made.handle(ev.AgentGoodbye(1, "i0"), 0.0)
            made.handle(ev.AgentHello(99, info("new"), "", 1, 0), 0.0)
    assert pauses >= 100
