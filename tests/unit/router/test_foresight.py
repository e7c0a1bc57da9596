"""`foresight` on hand-made views: what it costs, where it goes, what is sliced, what is held."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman_router.core.placement_types import (
    Candidate,
    FleetView,
    PlacementRequest,
    PolicyResult,
    PrefillBacklog,
    StepKind,
)
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.prefill_curve import PrefillCurve, PrefillSums, PrefillWork
from tests.support.router_values import candidate, request

# Each new token takes 1 ms, whatever is cached before it. So u, the mean cost of a request of 1,000 tokens, is 1 s.
CURVE = PrefillCurve(0.0, 1e-3, 0.0)
RNG = random.Random(0)
SLICES = Foresight(slice_factor=1.5, slice_min_tokens=16, light_wait_factor=0.8, heavy_wait_factor=0.8)


def seen(
    *candidates: Candidate, now: float = 10.0, curve: PrefillCurve = CURVE, mean_work: float = 1_000.0
) -> FleetView:
    return FleetView(candidates, now=now, curves={"": curve}, mean_work=PrefillWork(mean_work, 0.0))


def one(name: str, tokens: int, cached: int = 0, open_tokens: int = 0, decodes: int = 0, **work: Any) -> Candidate:
    queue = ((open_tokens, 0),) if open_tokens else ()
    requests = len(work.get("queue", queue)) + len(work.get("remainders", ()))
    prefill_backlog = PrefillBacklog(**{"queue": queue, "advanced_at": 10.0, "requests": requests, **work})
    return candidate(
        name,
        new=tokens - cached,
        cached=cached,
        num_requests=requests + decodes,
        prefill_backlog=prefill_backlog,
    )


def rule(tokens: int, *candidates: Candidate, policy: Foresight | None = None, **changes: Any) -> PolicyResult:
    asked: PlacementRequest = request(
        tokens=tokens,
        sliceable_tokens=changes.pop("sliceable_tokens", tokens),
        age_s=changes.pop("age_s", 0.0),
    )
    return (policy or SLICES).choose(asked, seen(*candidates, **changes), RNG)


def test_scores_are_predicted_seconds() -> None:
    result = rule(1_000, one("a", 1_000), one("b", 1_000, cached=800, open_tokens=500, decodes=2))
    # a: 1 s of prefill, and 0.3 of the 0.8 s by which this exceeds b's. b: 0.5 s of wait, 0.2 s of prefill, and interference
    # with its two decodes, 0.05 + 0.3 / 2 of the 0.2 s for each (half of the instances have prefills).
    assert result.scores == pytest.approx({"a": 1.0 + 0.3 * 0.8, "b": 0.7 + 0.2 * 0.2 * 2})
    assert (result.steps[0].instance_id, result.reason) == ("b", "at_once")
    assert result.figures == pytest.approx({"mean_cost_s": 1.0, "wait_s": 0.5, "prefill_s": 0.2})


def test_what_costs_more_than_the_second_best_is_not_weighed() -> None:
    far = [one(name, 10_000, decodes=1) for name in "cd"]
    result = rule(10_000, *far, one("b", 10_000, cached=9_800, open_tokens=500), one("a", 10_000, cached=9_000))
    assert result.scores == pytest.approx({"a": 1.0 + 0.3 * 0.8, "b": 0.7})


def test_attention_counts_what_is_cached() -> None:
    curve = PrefillCurve(0.0, 1e-3, 1e-6)
    result = rule(2_000, one("a", 2_000, cached=1_000), curve=curve)
    assert result.scores["a"] == pytest.approx(1.0 + 1e-6 * 1_000 * (2 * 1_000 + 1_000))


def test_a_light_one_waits_in_the_router_where_its_engine_is_busy() -> None:
    assert rule(1_400, one("a", 1_400, open_tokens=1_600)).reason == "at_once", "it is the next one there"
    held = rule(1_400, one("a", 1_400, queue=((800, 0), (800, 0))))
    assert (held.steps, held.reason, held.waits_for) == ((), "held", "a")
    assert held.queue_penalty_s == pytest.approx(1.4)
    short = one("a", 1_400, queue=((40, 0),) * 10)
    assert rule(1_400, short).reason == "at_once", "all of them take less than what may be ahead"


def test_requests_that_are_held_for_an_instance_go_before() -> None:
    crowded = replace(one("a", 1_400, cached=1_000), held_for=3)
    assert rule(1_400, crowded, one("b", 1_400)).scores == pytest.approx({"a": 0.4 + 3 * 0.4, "b": 1.4 + 0.3 * 1.0})
    heavy = replace(one("a", 9_000, cached=1_000), held_for=3)
    assert rule(9_000, heavy).scores == pytest.approx({"a": 8.0 + 3 * 1.0}), "the mean request, if that is shorter"


def test_it_waits_for_its_own_cache_rather_than_compute_all_elsewhere() -> None:
    result = rule(10_000, one("a", 10_000, cached=9_800, queue=((1_000, 0), (1_000, 0))), one("b", 10_000))
    assert result.reason == "held"
    assert min(result.scores, key=lambda name: result.scores[name]) == "a"


def test_what_a_prefill_has_done_since_it_moved_is_no_wait() -> None:
    busy = one("a", 1_000, open_tokens=4_000, advanced_at=7.0)
    assert rule(1_000, busy).figures["wait_s"] == pytest.approx(1.0)
    # A prefill may be slower than predicted: a tenth of it counts as open until its end is reported.
    assert rule(1_000, busy, now=60.0).figures["wait_s"] == pytest.approx(0.4)


def test_a_heavy_prompt_goes_in_slices_of_so_many_usual_requests() -> None:
    result = rule(10_000, one("a", 10_000))
    [step] = result.steps
    assert (step.kind, step.prefix_tokens, step.reason) == (StepKind.PREFILL, 1_488, "slice")
    [step] = rule(10_000, one("a", 10_000, cached=4_000, block_size=64)).steps
    assert step.prefix_tokens == 4_000 + 1_472, "whole blocks of the engine's own"
    [step] = rule(10_000, one("a", 10_000), policy=Foresight(slice_min_tokens=16)).steps
    assert step.prefix_tokens == 288
    [step] = rule(10_000, one("a", 10_000), policy=Foresight()).steps
    assert step.prefix_tokens == 1_024, "the minimum length of a slice"
    assert rule(90_000, one("a", 90_000, chunk_limit=4_096)).reason == "slice", "also if the engine cuts prompts"


def test_the_last_part_of_a_heavy_prompt_goes_whole() -> None:
    [step] = rule(10_000, one("a", 10_000, cached=7_900)).steps
    assert (step.kind, step.reason) == (StepKind.PREFILL, "slice")
    [step] = rule(10_000, one("a", 10_000, cached=8_000)).steps
    assert (step.kind, step.reason) == (StepKind.SERVE, "at_once"), "it is light now"
    always = Foresight(slice_factor=1.5, slice_min_tokens=16, light_factor=0)
    [step] = rule(10_000, one("a", 10_000, cached=8_200), policy=always).steps
    assert (step.kind, step.reason) == (StepKind.SERVE, "last_part"), "a small rest joins the slice before it"


def test_slices_end_where_the_gateway_knows_the_tokens() -> None:
    """The rest may be a picture and what follows it."""
    [step] = rule(10_000, one("a", 10_000, cached=4_000), sliceable_tokens=4_900).steps
    assert (step.kind, step.prefix_tokens) == (StepKind.PREFILL, 4_000 + 896)
    [step] = rule(10_000, one("a", 10_000, cached=4_896), sliceable_tokens=4_900).steps
    assert step.kind is StepKind.SERVE


@pytest.mark.parametrize("why", ["the gateway cannot", "switched off"])
def test_what_is_not_sliced(why: str) -> None:
    policy = Foresight(slice_factor=0.0) if why == "switched off" else None
    known = 0 if why == "the gateway cannot" else 90_000
    result = rule(90_000, one("a", 90_000), policy=policy, sliceable_tokens=known)
    assert [step.kind for step in result.steps] == [StepKind.SERVE]


def test_a_heavy_one_starts_where_little_is_open() -> None:
    assert rule(10_000, one("a", 10_000, open_tokens=700)).reason == "slice"
    assert rule(10_000, one("a", 10_000, open_tokens=900)).reason == "held"


def test_heavy_prompts_do_not_take_turns() -> None:
    """Of those begun on an instance the one with the least left goes on until it is through."""

    def go_on(mine: int, others: int, cached: int = 1_000) -> PolicyResult:
        begun = (("r", mine, 1_000), ("other", others, 5_000))
        return rule(10_000, one("a", 10_000, cached=cached, remainders=begun))

    assert go_on(9_000, 8_999).reason == "held"
    assert go_on(9_000, 9_000).reason == "slice", "one of them must"
    assert go_on(9_000, 9_001).reason == "slice"
    assert go_on(9_000, 800).reason == "slice", "what is little is not worth a pause"
    assert go_on(9_000, 9_500, cached=0).reason == "slice", "evicted blocks do not count as left to compute"
    # Light ones pass.
    assert rule(1_400, one("a", 1_400, remainders=(("other", 1_000, 5_000),))).reason == "at_once"


@pytest.mark.parametrize("tokens", [3_000, 6_000, 8_000])
def test_no_heavy_prompt_overtakes_one_that_has_begun(tokens: int) -> None:
    """Else the longest prompts would wait for all that come, however little each of these has left."""
    begun = one("a", tokens, remainders=(("other", 7_000, 5_000),))
    assert rule(tokens, begun).reason == "held"
    assert rule(tokens, begun, one("b", tokens)).steps[0].instance_id == "b"


def test_a_prompt_that_has_begun_stays_where_answers_slow_it_down() -> None:
    begun = one("a", 10_000, cached=2_000, decodes=9, remainders=(("r", 8_000, 2_000),))
    result = rule(10_000, begun, one("b", 10_000))
    assert result.scores == pytest.approx({"a": 8.0, "b": 10.0 + 0.3 * 2.0})
    # Before it has begun it goes where it harms nobody.
    assert rule(10_000, one("a", 10_000, cached=2_000, decodes=9), one("b", 10_000)).steps[0].instance_id == "b"


def test_a_new_answer_has_time_before_the_next_slice() -> None:
    def next_slice(began: float, decodes: int = 1, tokens: int = 10_000, **more: Any) -> str:
        work: dict[str, Any] = {"remainders": (("r", tokens - 2_000, 2_000),), "answer_began_at": began}
        return rule(tokens, one("a", tokens, cached=2_000, decodes=decodes, **work), **more).reason

    # A slice waits for 0.6 of the mean cost, which is 1 s, from when the newest answer began.
    assert next_slice(9.41) == "held"
    assert next_slice(9.39) == "slice"
    assert next_slice(9.41, decodes=0) == "slice", "it has ended"
    assert next_slice(9.41, policy=dataclasses.replace(SLICES, answer_factor=0.0)) == "slice"
    assert next_slice(9.41, policy=SLICES.without_holds()) == "slice"
    # Not of a prompt that is through soon, nor if the prompt would take more than 1.15 times what it takes alone.
    assert next_slice(9.41, tokens=6_001) == "held"
    assert next_slice(9.41, tokens=6_000) == "slice"
    assert next_slice(9.41, age_s=3.4) == "held"
    assert next_slice(9.41, age_s=3.6) == "slice"


def test_behind_an_engine_that_cuts_long_prompts_a_small_one_waits_for_a_chunk() -> None:
    result = rule(500, one("a", 500, open_tokens=50_000, chunk_limit=1_000))
    assert result.reason == "at_once"
    assert result.figures["wait_s"] == pytest.approx(1.0)
    assert rule(1_200, one("a", 1_200, open_tokens=1_500, chunk_limit=1_000)).figures["wait_s"] == pytest.approx(1.5)


def test_light_ones_of_several_chunks_are_not_computed_side_by_side() -> None:
    """Each would be through only when both are."""
    cuts = {"chunk_limit": 1_000}
    assert rule(1_000, one("a", 1_000, open_tokens=900, **cuts)).reason == "at_once"
    assert rule(1_001, one("a", 1_001, open_tokens=900, **cuts)).reason == "held"
    [step] = rule(1_900, one("a", 1_900, open_tokens=700, **cuts)).steps
    assert (step.kind, step.reason) == (StepKind.SERVE, "last_part")


def test_an_answer_beside_the_rest_of_a_heavy_prompt_has_its_price() -> None:
    paused = one("a", 1_000, remainders=(("heavy", 4_000, 3_000), ("other", 1_000, 500)))
    result = rule(1_000, paused, one("b", 1_000))
    # 5 s are left of others, and half of the instances have no prefill.
    assert result.scores == pytest.approx({"a": 1.0 + 0.3 * 0.5 * 5.0, "b": 1.0})
    assert result.steps[0].instance_id == "b"
    # If all instances have prefills, the penalty is 0: to leave the cached instance would only add work.
    assert rule(1_000, paused, one("b", 1_000, open_tokens=100)).scores["a"] == pytest.approx(1.0)
    # A request's own remainder is no penalty for it.
    assert rule(1_000, one("a", 1_000, remainders=(("r", 1_000, 500),))).scores == pytest.approx({"a": 1.0})


def test_crowds_of_decodes_are_left_alone_where_no_instance_is_idle() -> None:
    crowd = one("a", 1_000, decodes=4)
    # No instance prefills: 0.05 s for each decode, per second of prefill. If half of them do, 0.3 / 2 s more for each.
    assert rule(1_000, crowd).scores == pytest.approx({"a": 1.0 + 0.05 * 4})
    result = rule(1_000, crowd, one("b", 1_000, open_tokens=2_000))
    assert result.scores == pytest.approx({"a": 1.0 + 0.2 * 4, "b": 3.0})
    result = rule(1_000, one("a", 1_000, open_tokens=100, decodes=4), one("b", 1_000, open_tokens=2_000))
    assert result.scores == pytest.approx({"a": 1.1 + 0.35 * 4, "b": 3.0})


def test_full_kv_has_its_price() -> None:
    full = candidate(
        "a", new=100, num_requests=1, ongoing_tokens=950, kv_capacity_tokens=1_000, prefill_backlog=PrefillBacklog()
    )
    result = rule(100, full, one("b", 100, decodes=1))
    assert result.scores["a"] == pytest.approx(result.scores["b"] + 1.0)
    own = PrefillBacklog(remainders=(("r", 100, 50),), requests=1)
    its_own = candidate("a", new=100, num_requests=2, ongoing_tokens=950, kv_capacity_tokens=1_000, prefill_backlog=own)
    assert rule(150, its_own).scores["a"] == pytest.approx(0.1), "what is open is not counted twice"


def test_the_first_request_of_all_is_placed_at_once() -> None:
    assert rule(90_000, one("a", 90_000, open_tokens=10**6), mean_work=0.0).reason == "at_once"


def test_eager_holds_nobody_and_slices_all_the_same() -> None:
    without_holds = Foresight(slice_min_tokens=16).without_holds()
    assert isinstance(without_holds, Foresight)
    assert rule(1_400, one("a", 1_400, open_tokens=90_000), policy=without_holds).reason == "at_once"
    assert rule(10_000, one("a", 10_000, open_tokens=90_000), policy=without_holds).reason == "slice"
    begun = one("a", 10_000, remainders=(("other", 7_000, 5_000),))
    assert rule(10_000, begun, policy=without_holds).reason == "slice"


OTHERS = [(1_000 + 10 * number, 64 * number) for number in range(40)]
BENT = PrefillCurve(1e-3, 1e-3, 1e-7)


def sums(prefills: list[tuple[int, int]]) -> PrefillSums:
    return PrefillSums(
        len(prefills),
        float(sum(left for left, _ in prefills)),
        float(sum(left * (2 * there + left) for left, there in prefills)),
    )


@pytest.mark.parametrize(("others", "chunk_limit"), [(OTHERS, 0), ([(5_000, 128)] * 40, 512), ([(100, 0)] * 40, 512)])
def test_prefills_that_are_not_listed_count_as_those_that_are(others: list[tuple[int, int]], chunk_limit: int) -> None:
    listed = one("a", 900, queue=tuple(others), chunk_limit=chunk_limit, advanced_at=9.5)
    summed = one(
        "a", 900, queue=tuple(others[:16]), chunk_limit=chunk_limit, advanced_at=9.5, unlisted=sums(others[16:])
    )
    summed = replace(
        summed, num_requests=listed.num_requests, prefill_backlog=replace(summed.prefill_backlog, requests=40)
    )
    for tokens in (900, 9_000):
        one_by_one, in_sums = rule(tokens, listed, curve=BENT), rule(tokens, summed, curve=BENT)
        assert in_sums.scores == pytest.approx(one_by_one.scores)
        assert in_sums.figures == pytest.approx(one_by_one.figures)
        assert in_sums.reason == one_by_one.reason


def test_where_prompts_are_cut_those_not_listed_keep_a_prompt_waiting_no_longer_than_they_take() -> None:
    work: dict[str, Any] = {
        "queue": ((100, 0),) * 16,
        "chunk_limit": 512,
        "unlisted": PrefillSums(10, 8_000.0, 8_000.0 * 800),
    }
    # An unlisted prompt has 800 tokens, the mean. A prompt of two chunks waits for all of them, and one of one chunk for 512.
    assert rule(900, one("a", 900, **work)).figures["wait_s"] == pytest.approx(1.6 + 8.0)
    assert rule(500, one("a", 500, **work)).figures["wait_s"] == pytest.approx(1.6 + 5.12)


@pytest.mark.parametrize("length", [500, 3_000, 50_000])
def test_remainders_that_are_not_listed_count_as_those_that_are(length: int) -> None:
    rests = [(f"r{number}", 5_000, 512) for number in range(40)]
    listed = one("a", length, remainders=tuple(rests))
    others = sums([(left, there) for _, left, there in rests[16:]])
    summed = one("a", length, remainders=tuple(rests[:16]), unlisted_remainders=others)
    summed = replace(summed, num_requests=40, prefill_backlog=replace(summed.prefill_backlog, requests=40))
    free = one("b", length)
    one_by_one, in_sums = rule(length, listed, free, curve=BENT), rule(length, summed, free, curve=BENT)
    assert in_sums.scores == pytest.approx(one_by_one.scores)
    assert in_sums.reason == one_by_one.reason
    alone = [rule(length, only, curve=BENT) for only in (listed, summed)]
    assert alone[0].reason == alone[1].reason
