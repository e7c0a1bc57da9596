"""What holds for every registered policy, with any settings, on any view with an eligible candidate."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core.kv_load import LoadPrice
from pointsman_router.core.placement_types import (
    NOTHING_UNSEEN,
    Candidate,
    FleetView,
    InstanceState,
    PlacementRequest,
    PolicyResult,
    PoolFacts,
    PrefillBacklog,
    PrefixSource,
    StepKind,
    Transfers,
    Unseen,
)
from pointsman_router.core.policy.auto import Auto
from pointsman_router.core.policy.base import NO_KV_TRANSFER, Policy, decide, lowest, serve, settings_of
from pointsman_router.core.policy.reasons import REASONS
from pointsman_router.core.policy.unified import Unified
from pointsman_router.core.prefill_curve import PrefillCurve, PrefillSums, PrefillWork
from pointsman_router.core.shortlist import DECODE_WEIGHT
from tests.support.policy_docstrings import documented_reasons
from tests.support.router_values import candidate, request, view

# A slow machine must not fail the test.
patient = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
KV_WAYS = ("", "MOONCAKE/16/auto", "MOONCAKE/16/auto", "NIXL/16/auto")
NAMES = ("a", "b", "c", "d", "e", "f")
# Small numbers make ties and thresholds likely; big ones are what a busy fleet has.
TOKENS = st.one_of(st.integers(0, 3), st.integers(0, 300_000), st.integers(0, 10**9))
REQUESTS = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 10**5))
SUMS = st.builds(
    lambda prefills, tokens, cached: PrefillSums(
        prefills, prefills * tokens, prefills * tokens * (2.0 * cached + tokens)
    ),
    st.integers(0, 5_000),
    st.floats(1, 200_000),
    st.floats(0, 200_000),
)
WORK = st.builds(
    PrefillBacklog,
    queue=st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 200_000)), max_size=3).map(tuple),
    advanced_at=st.floats(0, 60),
    remainders=st.lists(
        st.tuples(st.sampled_from(("r", "other")), st.integers(1, 200_000), st.integers(0, 200_000)), max_size=2
    ).map(tuple),
    requests=st.integers(0, 5),
    chunk_limit=st.sampled_from((0, 4_096)),
    block_size=st.sampled_from((16, 32)),
    hardware=st.sampled_from(("", "fast")),
    unlisted=SUMS,
    unlisted_remainders=SUMS,
)

TRANSFERS = st.builds(
    Transfers,
    sending_tokens=st.integers(0, 200_000),
    arriving_tokens=st.integers(0, 200_000),
    arrives_s=st.floats(0, 10),
)

# As a shortlist has them; a policy that sees all of a pool gets them with a record of another one.
UNSEEN = st.just(NOTHING_UNSEEN) | st.builds(
    Unseen,
    instances=st.integers(10, 1_000),
    num_requests=REQUESTS,
    prefilling=st.integers(0, 10),
    ongoing_tokens=TOKENS,
)

FACTS = st.builds(
    PoolFacts,
    instances=st.integers(0, 4),
    exact=st.integers(0, 4),
    learned=st.integers(0, 4),
    mean_cost=st.floats(0, 2),
)


@st.composite
def candidates(
    draw: st.DrawFn,
    name: str,
    input_tokens: int,
    excluded: tuple[str, ...] = ("", "", "draining", "failed_before"),
    produces_only: bool = True,
) -> Candidate:
    cached = draw(st.one_of(st.just(0), st.integers(0, input_tokens)))
    return Candidate(
        instance_id=name,
        incarnation="1",
        state=InstanceState.READY,
        cached_tokens=cached,
        new_tokens=input_tokens - cached,
        num_requests=draw(REQUESTS),
        pending_prefill_tokens=draw(TOKENS),
        ongoing_decode_tokens=draw(TOKENS),
        ongoing_tokens=draw(TOKENS),
        running=draw(st.none() | REQUESTS),
        waiting=draw(st.none() | REQUESTS),
        kv_usage=draw(st.none() | st.floats(0, 1)),
        reported_at=draw(st.none() | st.floats(0, 60)),
        prefix_source=draw(st.sampled_from(PrefixSource)),
        excluded=draw(st.sampled_from(excluded)),
        recent_migrations=draw(st.integers(0, 20)),
        kv_capacity_tokens=draw(st.sampled_from((0, 1, 280_000))),
        kv_gives=draw(st.sampled_from(KV_WAYS)),
        kv_takes=draw(st.sampled_from(KV_WAYS)),
        prefill_backlog=draw(WORK),
        produces_only=draw(st.sampled_from((False, False, produces_only))),
        transfers=draw(st.just(UNSET) | TRANSFERS),
        held_for=draw(st.just(UNSET) | st.integers(1, 40)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[PlacementRequest, FleetView]:
    tokens = draw(st.one_of(st.integers(0, 3), st.integers(0, 200_000)))
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    seen = FleetView(
        tuple(draw(candidates(name, tokens)) for name in names),
        draw(st.sampled_from(("", "gone", *names))),
        draw(st.integers(0, 100)),
        draw(st.floats(0, 60)),
        {"": PrefillCurve(), "fast": PrefillCurve(0.001, 1e-6, 1e-10)},
        draw(st.builds(PrefillWork, st.floats(0, 1e5), st.floats(0, 1e9))),
        draw(UNSEEN),
        facts=draw(FACTS),
        fetch_price=draw(st.just(UNSET) | st.builds(LoadPrice, st.floats(0, 1), st.floats(0, 1e-4))),
    )
    if not seen.eligible():
        seen = replace(
            seen,
            candidates=(*seen.candidates[1:], draw(candidates(seen.candidates[0].instance_id, tokens, ("",), False))),
        )
    sliceable = draw(st.integers(0, tokens))
    return request(tokens=tokens, session_id="s", sliceable_tokens=sliceable), seen


@st.composite
def configured(draw: st.DrawFn, name: str) -> Policy:
    """The policy with some of its settings anywhere within their bounds."""
    chosen: dict[str, Any] = {}
    for field in settings_of(POLICIES[name]):
        if draw(st.booleans()):
            if "options" in field.metadata:
                chosen[field.name] = draw(st.sampled_from(field.metadata["options"]))
            elif "switch" in field.metadata:
                chosen[field.name] = draw(st.booleans())
            else:
                chosen[field.name] = draw(st.floats(field.metadata["low"], field.metadata["high"]))
    return make_policy(name, chosen)


@pytest.mark.parametrize("name", POLICIES)
@patient
@given(data=st.data(), case=cases(), seed=st.integers(0, 1_000))
def test_every_policy_decides_soundly(
    name: str, data: st.DataObject, case: tuple[PlacementRequest, FleetView], seed: int
) -> None:
    asked, seen = case
    policy = data.draw(configured(name))
    decision = decide(policy, asked, "m", seen, random.Random(seed), "d")
    eligible = {candidate.instance_id for candidate in seen.eligible()}
    result = decision.result

    documented = documented_reasons(POLICIES[name])
    assert result.reason in documented, f"{result.reason} is missing in the line Reasons: of {name}'s docstring"
    unexplained = {result.reason, *(step.reason for step in result.steps)} - REASONS.keys()
    assert not unexplained, f"{name}: core/policy/reasons.py has no clause for {unexplained}"
    available = {candidate.instance_id for candidate in seen.available()}
    assert {step.instance_id for step in result.steps} <= available
    assert {step.instance_id for step in result.steps if step.kind is StepKind.SERVE} <= eligible
    assert all(step.reason for step in result.steps)
    assert result.scores.keys() <= eligible
    assert all(math.isfinite(score) for score in (*result.scores.values(), *result.figures.values()))
    assert decide(policy, asked, "m", seen, random.Random(seed), "d") == decision
    if not result.steps:
        assert decision.mode == "HELD"
        return
    if result.steps[-1].kind is StepKind.PREFILL:
        [part] = result.steps
        found = seen.find(part.instance_id)
        assert found is not None
        assert found.cached_tokens < part.prefix_tokens <= asked.sliceable_tokens
        assert part.prefix_tokens < asked.input_tokens
        if part.kv_source:
            source = seen.find(part.kv_source)
            assert source is not None
            assert source.can_give_kv_to(found)
            assert source.present_tokens >= part.prefix_tokens, "it has what it is to send"
        assert decision.mode == "COLOCATED"
        return
    *prefills, serve = result.steps
    assert (serve.kind, serve.prefix_tokens) == (StepKind.SERVE, 0)
    assert len(prefills) <= 1
    for prefill in prefills:
        assert prefill.kind is StepKind.PREFILL
        assert prefill.prefix_tokens == asked.input_tokens > 0
        assert serve.kv_source == prefill.instance_id != serve.instance_id
        source, target = seen.find(serve.kv_source), seen.find(serve.instance_id)
        assert source is not None
        assert target is not None
        assert source.kv_gives == target.kv_takes != ""
    assert bool(serve.kv_source) == (decision.mode == "OFFLOAD")
    assert result.reason != NO_KV_TRANSFER, "a policy of ours plans no transfer that cannot be"
    assert decision.next_owner in {step.instance_id for step in result.steps}

    assert decision.margin is None or math.isfinite(decision.margin)
    assert decision.runner_up in (eligible - {decision.instance_id}) | {""}

    assert decide(policy, asked, "m", seen, random.Random(seed), "d") == decision
    assert make_policy(name, decision.policy.settings) == policy


@pytest.mark.parametrize("name", POLICIES)
@patient
@given(data=st.data(), case=cases(), seed=st.integers(0, 1_000))
def test_excluded_candidates_change_nothing(
    name: str, data: st.DataObject, case: tuple[PlacementRequest, FleetView], seed: int
) -> None:
    asked, seen = case
    policy = data.draw(configured(name))
    without = replace(seen, candidates=seen.available())
    assert policy.choose(asked, seen, random.Random(seed)) == policy.choose(asked, without, random.Random(seed))


def chosen_beside_a_better_twin(
    policy: Policy, asked: PlacementRequest, seen: FleetView, *, cached: bool
) -> tuple[str, str]:
    """Return whom the policy chooses, and whom after one like it has joined with a request and a token to prefill fewer; with
    `cached` it has all of the prompt, too. It has some tokens more in decode, so little that it has less work all the same."""
    busy = tuple(
        replace(member, num_requests=member.num_requests + 1, pending_prefill_tokens=member.pending_prefill_tokens + 1)
        for member in seen.candidates
    )
    seen = replace(seen, candidates=busy, session_owner="")
    chosen = policy.choose(asked, seen, random.Random(0)).steps[-1].instance_id
    before = next(member for member in busy if member.instance_id == chosen)
    prefix = {"cached_tokens": asked.input_tokens, "new_tokens": 0} if cached else {}
    twin = replace(
        before,
        instance_id="twin",
        **prefix,
        num_requests=before.num_requests - 1,
        pending_prefill_tokens=before.pending_prefill_tokens - 1,
        ongoing_decode_tokens=before.ongoing_decode_tokens + int(0.5 / DECODE_WEIGHT),
    )
    after = policy.choose(asked, replace(seen, candidates=(*busy, twin)), random.Random(0))
    return chosen, after.steps[-1].instance_id


# foresight's measure is PrefillBacklog, in seconds; it has tests of its own, and auto takes it.
@pytest.mark.parametrize(
    "name", [name for name, kind in POLICIES.items() if kind.uses_shortlist and name not in ("foresight", "auto")]
)
@pytest.mark.parametrize("cached", [False, True])
@patient
@given(case=cases())
def test_a_policy_with_a_shortlist_prefers_the_less_loaded_of_two_and_wants_no_shorter_prefix(
    name: str, cached: bool, case: tuple[PlacementRequest, FleetView]
) -> None:
    before, after = chosen_beside_a_better_twin(make_policy(name), *case, cached=cached)
    assert after != before, f"{name}: leave uses_shortlist out, or prefer the less loaded, and a longer prefix"


@dataclass(frozen=True)
class MostRequests(Policy):
    """Prefers the busier instance."""

    name: ClassVar[str] = "most_requests"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        scores = {member.instance_id: -float(member.num_requests) for member in view.eligible()}
        return serve(lowest(view.eligible(), scores, view.decision_number), "least_requests", scores)


@dataclass(frozen=True)
class FewestDecodes(Policy):
    """Prefers the instance with the fewest tokens in decode."""

    name: ClassVar[str] = "fewest_decodes"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        scores = {member.instance_id: float(member.ongoing_decode_tokens) for member in view.eligible()}
        chosen = lowest(view.eligible(), scores, view.decision_number, then=lambda member: member.num_requests)
        return serve(chosen, "least_requests", scores)


@dataclass(frozen=True)
class SecondBest(Policy):
    """Takes the second longest prefix; of those that have equally much, the less loaded."""

    name: ClassVar[str] = "second_best"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        lengths = sorted({member.cached_tokens for member in view.eligible()})
        wanted = [member for member in view.eligible() if member.cached_tokens == lengths[-2:][0]]
        scores = {member.instance_id: float(member.num_requests) for member in wanted}
        return serve(lowest(wanted, scores, view.decision_number), "best_cache_hit", scores)


@pytest.mark.parametrize(
    ("policy", "cached"),
    [
        (MostRequests(), False),
        (make_policy("linear"), False),
        (make_policy("round_robin"), False),
        (FewestDecodes(), False),
        (SecondBest(), True),
    ],
)
def test_one_that_does_not_is_found(policy: Policy, cached: bool) -> None:
    assert chosen_beside_a_better_twin(policy, request(tokens=100), view(candidate("a")), cached=cached) == ("a", "a")


@patient
@given(case=cases(), seed=st.integers(0, 1_000))
def test_auto_decides_as_the_policy_that_it_takes(case: tuple[PlacementRequest, FleetView], seed: int) -> None:
    asked, seen = case
    result = Auto().choose(asked, seen, random.Random(seed))
    taken = Auto().taken(seen.facts)
    assert (result.policy, result.policy_reason) == (taken.policy.name, taken.reason)
    assert replace(result, policy="", policy_reason="") == taken.policy.choose(asked, seen, random.Random(seed))
    assert taken.reason in REASONS


@patient
@given(case=cases())
def test_the_ceiling_changes_nothing_while_nobody_is_above_it(case: tuple[PlacementRequest, FleetView]) -> None:
    asked, seen = case
    unified, without = Unified(), Unified(ceiling_min=1e6)
    below = unified.below_ceiling(seen.eligible(), seen.unseen)
    result = unified.choose(asked, seen, random.Random(0))
    if below == seen.eligible():
        assert result == without.choose(asked, seen, random.Random(0))
    assert result.steps[0].instance_id in {candidate.instance_id for candidate in below}


@patient
@given(case=cases(), factor=st.floats(1, 5), minimum=st.integers(0, 30))
def test_the_ceiling_spares_the_least_loaded(
    case: tuple[PlacementRequest, FleetView], factor: float, minimum: int
) -> None:
    _, seen = case
    eligible = seen.eligible()
    below = Unified(ceiling_factor=factor, ceiling_min=minimum).below_ceiling(eligible)
    assert min(eligible, key=lambda candidate: candidate.num_requests) in below
