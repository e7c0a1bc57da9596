"""Which instances of a large pool a decision looks at."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core import fleet_view_builder, shortlist
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.placement_types import (
    Candidate,
    Decision,
    FleetView,
    KvRole,
    KvTransfer,
    Load,
    PlacementRequest,
    StepKind,
    Unseen,
)
from pointsman_router.core.policy.linear import Additive
from pointsman_router.core.policy.unified import Unified
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurveFit
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.router_state import RouterState
from tests.support.interpreter_steps import Steps
from tests.support.router_values import candidate, join, place, request, state

NAMES = [f"i{number:02d}" for number in range(16)]
USE_SHORTLIST = [name for name in POLICIES if make_policy(name).uses_shortlist]


@pytest.fixture(autouse=True, scope="module")
def a_large_pool_is_small() -> Iterator[None]:
    """Lower the limits, so that a pool of few instances counts as a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_view_builder, "MAX_FULL_VIEW", 8)
        patch.setattr(shortlist, "MOST_CACHED", 3)
        patch.setattr(shortlist, "LEAST_LOADED", 2)
        yield


def fleet(policy: str = "unified", names: list[str] = NAMES) -> RouterState:
    router = state(policy)
    for number, name in enumerate(names):
        join(router, name, number)
    return router


def decision_of(router: RouterState, name: str = "asked", **asked: Any) -> Decision:
    answer = place(router, request(name, **asked))
    assert isinstance(answer, ev.Placed)
    return answer.decision


def load(router: RouterState, rng: random.Random, steps: int) -> None:
    """Requests come, answer and go."""
    for number in range(steps):
        name = f"o{number}"
        here = rng.choice(NAMES)
        others = tuple(name for name in NAMES if name != here)
        place(router, request(name, tokens=rng.choice((0, 16, 5_000, 40_000)), exclude=others))
        if rng.random() < 0.6:
            router.handle(ev.FirstToken(name), 0.0)
        if rng.random() < 0.3:
            router.handle(ev.Finished(name, "OK"), 0.0)


def weight(one: Candidate) -> tuple[int, float]:
    return one.num_requests, one.pending_prefill_tokens + 0.01 * one.ongoing_decode_tokens


def less_load(one: Candidate, other: Candidate) -> bool:
    """Whether `one` has less to do than `other` by one measure, and no more by any."""
    (requests, work), (other_requests, other_work) = weight(one), weight(other)
    return requests <= other_requests and work <= other_work and weight(one) != weight(other)


def no_more_load(one: Candidate, other: Candidate) -> bool:
    """Whether `one` has at most as much to do as `other` by any measure that a policy takes."""
    measures = ("num_requests", "pending_prefill_tokens", "ongoing_decode_tokens", "ongoing_tokens")
    return all(getattr(one, name) <= getattr(other, name) for name in measures)


def busy_fleet(rng: random.Random, prompt: list[int], steps: int) -> RouterState:
    """Some instances hold parts of the prompt, and all may have something to do."""
    router = fleet()
    for name in NAMES:
        if rng.random() < 0.5:
            held = prompt[: 16 * rng.choice((1, 1, 4, 10))]
            place(router, request("cached", prompt=held, exclude=tuple(other for other in NAMES if other != name)))
            router.handle(ev.FirstToken("cached"), 0.0)
            router.handle(ev.Finished("cached", "OK", 1, 0, 1), 0.0)
    load(router, rng, steps)
    router.check_invariants()
    return router


def views(router: RouterState, asked: PlacementRequest) -> tuple[FleetView, FleetView]:
    """Of all instances, and of those that are looked at."""
    return router.views.view(asked, "m", 0, 0.0), router.views.view(asked, "m", 0, 0.0, shortlisted=True)


@given(st.integers(0, 1_000_000), st.integers(0, 60))
def test_of_instances_with_equally_much_of_a_prompt_none_with_less_load_is_passed_over(seed: int, steps: int) -> None:
    prompt = list(range(160))
    router = busy_fleet(random.Random(seed), prompt, steps)
    asked = request("asked", prompt=prompt)
    everything = router.views.view(asked, "m", 0, 0.0)
    decision = decision_of(router, prompt=prompt)
    assert 0 < len(decision.view.candidates) <= 7
    assert set(decision.view.candidates) <= set(everything.candidates)
    if decision.result.reason == "least_load_x_work":
        chosen = everything.find(decision.instance_id)
        assert chosen is not None
        for other in everything.eligible():
            if other.cached_tokens == chosen.cached_tokens:
                assert not less_load(other, chosen)
    router.check_invariants()


@given(st.integers(0, 1_000_000), st.integers(0, 60))
def test_with_an_instance_all_that_have_as_much_of_a_prompt_and_less_load_are_shown(seed: int, steps: int) -> None:
    prompt = list(range(160))
    router = busy_fleet(random.Random(seed), prompt, steps)
    everything, short = views(router, request("asked", prompt=prompt))
    shown = {candidate.instance_id for candidate in short.candidates}
    for listed in short.candidates:
        for other in everything.eligible():
            if other.cached_tokens == listed.cached_tokens and less_load(other, listed):
                assert other.instance_id in shown


@pytest.mark.parametrize("policy", [name for name in USE_SHORTLIST if name not in ("foresight", "auto")])
@given(st.integers(0, 1_000_000), st.integers(0, 60))
def test_none_of_them_has_a_better_score_than_the_chosen_one(policy: str, seed: int, steps: int) -> None:
    prompt = list(range(160))
    asked = request("asked", prompt=prompt)
    everything, short = views(busy_fleet(random.Random(seed), prompt, steps), asked)
    result = make_policy(policy).choose(asked, short, random.Random(0))
    chosen = short.find(result.steps[0].instance_id)
    assert chosen is not None
    if result.reason != "ceiling_changed_choice":
        equal = tuple(
            other
            for other in everything.eligible()
            if other.cached_tokens == chosen.cached_tokens and no_more_load(other, chosen)
        )
        # A policy may leave out the scores of those that have less of the prompt.
        scores = make_policy(policy).choose(asked, replace(everything, candidates=equal), random.Random(0)).scores
        assert scores.keys() == {other.instance_id for other in equal}
        assert min(scores.values()) >= scores[chosen.instance_id]


def test_a_faster_engine_with_a_request_is_looked_at_beside_many_slow_idle_ones() -> None:
    router = state("foresight")
    for number, name in enumerate(NAMES):
        join(router, name, number, hardware="fast" if number < 4 else "slow")
    for hardware, factor in (("fast", 1.0), ("slow", 10.0)):
        fit = router.prefill_observer._fits["m", hardware] = PrefillCurveFit()
        for tokens in 10 * (1_000, 8_000, 64_000):
            fit.learn(tokens, 0, factor * DEFAULT_CURVE.cost_s(tokens, 0))
    for name in NAMES[:4]:
        place(router, request(name, tokens=100, exclude=tuple(other for other in NAMES if other != name)))
        router.handle(ev.FirstToken(name), 0.0)
    asked = request("asked", tokens=20_000)
    view = router.views.view(asked, "m", 0, 0.0, shortlisted=True)
    scores = make_policy("foresight").choose(asked, view, random.Random(0)).scores
    assert min(scores, key=scores.__getitem__) in NAMES[:4]
    assert 4 <= len(view.candidates) <= 8
    router.check_invariants()


@pytest.mark.parametrize("policy", ["least_requests", "sticky"])
@given(st.integers(0, 1_000_000), st.integers(0, 60))
def test_the_fewest_requests_of_all_are_those_of_an_instance_looked_at(policy: str, seed: int, steps: int) -> None:
    prompt = list(range(160))
    asked = request("asked", prompt=prompt)
    everything, short = views(busy_fleet(random.Random(seed), prompt, steps), asked)
    chosen = short.find(make_policy(policy).choose(asked, short, random.Random(0)).steps[0].instance_id)
    assert chosen is not None
    assert chosen.num_requests == min(candidate.num_requests for candidate in everything.eligible())


@given(st.integers(0, 1_000_000), st.integers(0, 60))
def test_what_is_not_looked_at_is_given_in_sums(seed: int, steps: int) -> None:
    router = fleet()
    load(router, random.Random(seed), steps)
    everything = router.views.view(request(), "m", 0, 0.0)
    view = decision_of(router).view
    seen = {candidate.instance_id for candidate in view.candidates}
    others = [candidate for candidate in everything.candidates if candidate.instance_id not in seen]
    assert view.unseen.instances == len(others) > 0
    assert view.unseen.num_requests == sum(candidate.num_requests for candidate in others)
    assert view.unseen.prefilling == sum(candidate.prefill_backlog.requests > 0 for candidate in others)
    assert view.unseen.ongoing_tokens == sum(candidate.ongoing_tokens for candidate in others)


@pytest.mark.parametrize("why", ["cordoned", "draining", "suspended", "out", "producers"])
def test_instances_that_are_to_get_no_requests_are_in_no_sum(why: str) -> None:
    router = fleet()
    load(router, random.Random(3), 60)
    left, now = NAMES[6:], 1.0
    match why:
        case "cordoned":
            router.handle(ev.OrdersChanged({name: InstanceOrder(cordoned=True) for name in left}), now)
        case "draining":
            router.handle(ev.DrainsChanged(dict.fromkeys(left, "1")), now)
        case "out":
            for number, name in enumerate(3 * left):
                place(router, request(f"fails{number}", exclude=tuple(other for other in NAMES if other != name)))
                router.handle(ev.Finished(f"fails{number}", "FAILED"), 0.0)
        case "producers":
            for name in left:
                producer = KvTransfer("MOONCAKE", role=KvRole.PRODUCER)
                join(router, name, 100 + NAMES.index(name), incarnation="2", kv_transfer=producer)
        case _:
            for name in left:
                router.handle(ev.LoadReported(NAMES.index(name), name, Load(now, suspended="asleep")), now)
    everything = router.views.view(request(), "m", 0, 0.0)
    view = decision_of(router).view
    answering = [one for one in everything.candidates if not one.excluded and not one.produces_only]
    others = [one for one in answering if view.find(one.instance_id) is None]
    assert view.unseen.instances == len(others) > 0
    assert view.unseen.num_requests == sum(one.num_requests for one in others)
    assert view.unseen.prefilling == sum(one.prefill_backlog.requests > 0 for one in others)
    assert view.unseen.ongoing_tokens == sum(one.ongoing_tokens for one in others)


def test_a_session_stays_with_its_owner_while_most_of_a_large_pool_is_cordoned() -> None:
    router = fleet()
    owner = decision_of(router, "first", prompt=list(range(160)), session_id="s").instance_id
    router.handle(ev.FirstToken("first"), 0.0)
    kept = [owner, *(name for name in NAMES if name != owner)][:3]
    router.handle(ev.OrdersChanged({name: InstanceOrder(cordoned=True) for name in NAMES if name not in kept}), 0.0)
    for number in range(2 * len(kept)):
        others = tuple(name for name in kept if name != kept[number % len(kept)])
        place(router, request(f"o{number}", tokens=5, exclude=others))
    again = decision_of(router, "again", prompt=list(range(170)), session_id="s")
    assert (again.instance_id, again.result.reason) == (owner, "session_affinity")


def test_a_policy_that_compares_with_all_is_shown_all() -> None:
    for policy in POLICIES:
        shortlisted = len(decision_of(fleet(policy)).view.candidates) < len(NAMES)
        assert shortlisted == (policy in USE_SHORTLIST)
    assert {"elastic", "migrate", "round_robin", "preble"}.isdisjoint(USE_SHORTLIST)
    assert len(decision_of(fleet(names=NAMES[:8])).view.candidates) == 8


def test_an_idle_fleet_is_used_in_full() -> None:
    router = fleet()
    used = set()
    for number in range(len(NAMES)):
        used.add(decision_of(router, f"r{number}", tokens=5).instance_id)
        router.handle(ev.Finished(f"r{number}", "OK"), 0.0)
    assert used == set(NAMES)


def test_a_sessions_owner_is_looked_at_and_those_that_failed_or_drain_are_not() -> None:
    router = fleet()
    owner = decision_of(router, "first", tokens=5, session_id="s").instance_id
    router.handle(ev.FirstToken("first"), 0.0)
    load(router, random.Random(1), 40)
    again = decision_of(router, "second", tokens=5, session_id="s")
    assert again.view.session_owner == owner
    assert again.view.find(owner) is not None
    idle = min(router.views.view(request(), "m", 0, 0.0).candidates, key=weight).instance_id
    assert decision_of(router, "third", tokens=5, exclude=(idle,)).view.find(idle) is None
    router.handle(ev.DrainsChanged({idle: "1"}), 0.0)
    assert decision_of(router, "fourth", tokens=5).view.find(idle) is None


def test_who_holds_a_prefix_and_gets_no_requests_is_looked_at_if_it_can_send_it() -> None:
    keys = tuple(range(1, 257))
    for can_send in (True, False):
        router = state("foresight")
        for number, name in enumerate(NAMES):
            transfer = KvTransfer("MOONCAKE", "http://x") if can_send or name != "i00" else None
            join(router, name, number, list(keys) if name == "i00" else [], kv_transfer=transfer)
        router.handle(ev.DrainsChanged({"i00": "1"}), 0.0)
        asked = request(tokens=4_100, keys=keys, sliceable_tokens=4_100)
        seen = router.views.view(asked, "m", 0, 0.0, shortlisted=True)
        assert (seen.find("i00") is not None) is can_send
        assert len(seen.candidates) < len(NAMES)
        if can_send:
            [step] = make_policy("foresight").choose(asked, seen, random.Random(0)).steps
            assert step.kv_source == "i00"


def test_where_nobody_may_be_chosen_all_are_looked_at() -> None:
    router = fleet()
    failed = tuple(NAMES)
    answer = place(router, request(tokens=5, exclude=failed))
    assert isinstance(answer, ev.Refused)
    assert answer.code == "UNAVAILABLE"


def test_members_that_come_and_go_are_followed() -> None:
    router = fleet()
    decision_of(router, "r1", tokens=5)
    join(router, "late", 99)
    assert {decision_of(router, f"l{number}", tokens=5).instance_id for number in range(17)} >= {"late"}
    router.check_invariants()


def test_policies_weigh_the_unseen_with_the_seen() -> None:
    seen = tuple(candidate(name, num_requests=requests) for name, requests in (("a", 10), ("b", 6)))
    every = (*seen, *(candidate(name, num_requests=2) for name in "cdefgh"))
    unified = Unified(ceiling_min=1.0)
    assert unified.below_ceiling(seen) == seen
    unseen = Unseen(instances=6, num_requests=12)
    below = tuple(candidate for candidate in unified.below_ceiling(every) if candidate in seen)
    assert unified.below_ceiling(seen, unseen) == below == seen[1:]


def test_idle_instances_that_get_no_requests_do_not_put_all_others_above_the_ceiling() -> None:
    router = fleet()
    for number in range(60):
        placed = decision_of(router, f"r{number}", tokens=5, exclude=tuple(NAMES[2:]))
        assert placed.instance_id in NAMES[:2]
    busy = tuple(candidate(name, num_requests=requests) for name, requests in (("a", 60), ("b", 20), ("c", 21)))
    assert Unified().below_ceiling(busy, Unseen(instances=90)) == busy[1:]


def test_a_session_leaves_an_owner_with_more_tokens_than_the_mean_of_all() -> None:
    busy = tuple(candidate(name, ongoing_tokens=tokens) for name, tokens in (("a", 9_000), ("b", 1_000)))
    for unseen_tokens, reason in ((100, "least_cost"), (100_000, "session_affinity")):
        unseen = Unseen(instances=8, ongoing_tokens=unseen_tokens)
        view = FleetView(busy, session_owner="a", unseen=unseen)
        assert Additive().choose(request(), view, random.Random(0)).reason == reason


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_runs_come_the_longest_first(held: list[int]) -> None:
    index, keys = PrefixIndex(), list(range(1, 41))
    for number, count in enumerate(held):
        index.add(str(number), keys[:count])
    for number in range(0, len(held), 3):
        # A sparse owner may lack keys before the last one.
        index.set_sparse(str(number), True)
        index.remove(str(number), keys[: held[number] - 1])
    merged: dict[int, list[str]] = {}
    order = []
    for count, mask in index.runs(keys, index.mask(map(str, range(99)))):
        order.append(count)
        merged.setdefault(count, []).extend(index.owners(mask))
    assert order == sorted(order, reverse=True)
    runs = [(count, sorted(names)) for count, names in merged.items()]
    counts = sorted({count for count in held if count}, reverse=True)
    assert runs == [
        (count, sorted(str(number) for number, held_blocks in enumerate(held) if held_blocks == count))
        for count in counts
    ]


def test_the_bits_of_owners_change_with_the_generation_only() -> None:
    index = PrefixIndex()
    index.add("a", [1])
    before = index.generation, index.mask("ab")
    index.add("a", [2])
    assert (index.generation, index.mask("ab")) == before
    index.add("b", [2])
    assert index.generation != before[0]
    between = index.generation
    index.drop("a")
    assert index.generation != between
    assert index.owners(index.mask("ab")) == ["b"]
    assert make_policy("unified").uses_shortlist


ADAPTERS = tuple(f"adapter{number}" for number in range(6))


@given(
    st.lists(st.sets(st.sampled_from(ADAPTERS), min_size=4), min_size=len(NAMES), max_size=len(NAMES)),
    st.lists(st.tuples(st.sampled_from("pppprfj"), st.integers(0, 30), st.sampled_from(("m", *ADAPTERS))), max_size=60),
    st.integers(0, 60),
    st.integers(0, 6),
)
def test_what_is_kept_for_names_shows_what_would_be_shown_anew(
    loaded: list[set[str]], events: list[tuple[str, int, str]], places: int, changes: int
) -> None:
    router = state()
    for number, (name, adapters) in enumerate(zip(NAMES, loaded, strict=True)):
        join(router, name, number, lora_names=tuple(sorted(adapters)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortlist, "MAX_PLACES", places)
        patch.setattr(shortlist, "MAX_CHANGES", changes)
        for kind, number, model in events:
            if kind == "p":
                asked = request(f"r{number}", tokens=100 * number, model=model)
                shown = router.views.view(asked, "m", number, 0.0, shortlisted=True)
                kept, router.views._loads = router.views._loads, shortlist.KeptLoads(router.reservations)
                assert router.views.view(asked, "m", number, 0.0, shortlisted=True) == shown
                router.views._loads = kept
                place(router, asked)
            elif kind == "f":
                router.handle(ev.FirstToken(f"r{number}"), 0.0)
            elif kind == "r":
                router.handle(ev.Finished(f"r{number}", "OK"), 0.0)
            else:
                join(router, NAMES[number % len(NAMES)], 100 + number, lora_names=(model,), incarnation=str(number))
            router.check_invariants()


def test_names_of_the_same_instances_share_a_list_and_what_is_kept_for_it() -> None:
    router = state()
    for number, name in enumerate(NAMES):
        join(router, name, number, lora_names=("all", "also all", *(("some",) if number % 4 else ())))
    members = {name: router.instances.members("m", name) for name in ("m", "alias", "all", "also all", "some", "none")}
    assert len({id(records) for records in members.values()}) == 3
    assert [record.info.instance_id for record in members["all"]] == NAMES
    assert [record.info.instance_id for record in members["some"]] == [name for n, name in enumerate(NAMES) if n % 4]
    assert members["none"] == []
    join(router, "i00", 99, incarnation="2", lora_names=("all",))
    assert [record.info.instance_id for record in router.instances.members("m", "also all")] == NAMES[1:]
    router.check_invariants()


def test_a_placement_costs_the_same_however_many_names_were_asked_for() -> None:
    adapters = tuple(f"adapter{number}" for number in range(100))
    router = state()
    for number, name in enumerate(NAMES):
        join(router, name, number, lora_names=adapters)
    steps = []
    for asked_for in (adapters[:2], adapters):
        for name in asked_for:
            decision_of(router, f"first-{name}", tokens=5, model=name)
        with Steps() as taken:
            for number in range(20):
                decision_of(router, f"r{number}-{len(asked_for)}", tokens=5, model=adapters[number % 2])
        steps.append(taken.count)
    assert steps[1] < 1.1 * steps[0]


def test_the_end_of_a_slice_costs_the_same_however_many_instances_a_pool_has() -> None:
    steps = []
    for instances in (20, 80):
        router = state("foresight")
        for number in range(instances):
            join(router, f"i{number:02d}", number)
        for number in range(20):
            decision_of(router, f"short{number}", tokens=100)
            router.handle(ev.Finished(f"short{number}", "OK"), 0.0)
        keys = tuple(range(1, 6_251))
        decision_of(router, "long", tokens=100_000, keys=keys, sliceable_tokens=100_000, session_id="s")
        with Steps() as taken:
            [next_one] = [
                effect
                for effect in router.handle(ev.StepDone("long", 0, ok=True), 0.0)
                if isinstance(effect, ev.Placed)
            ]
        assert (next_one.step.kind, next_one.step_index) == (StepKind.PREFILL, 1)
        steps.append(taken.count)
    assert steps[1] < 1.5 * steps[0]


def test_no_more_is_kept_than_is_bounded_and_what_was_not_asked_for_long_goes_first() -> None:
    router = state()
    names = [f"all-but-{name}" for name in NAMES]
    for number, name in enumerate(NAMES):
        join(router, name, number, lora_names=tuple(other for other in names if other != f"all-but-{name}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortlist, "MAX_PLACES", 50)
        made: list[object] = []
        patch.setattr(shortlist.PoolLoads, "__init__", counted(made, shortlist.PoolLoads.__init__))
        for which, expected in zip([0, 1, 2, 0, 1, 2, 3, 1, 2, 0], [1, 2, 3, 3, 3, 3, 4, 4, 4, 5], strict=True):
            decision_of(router, f"r{len(made)}-{which}", tokens=5, model=names[which])
            assert len(made) == expected
            router.check_invariants()


def counted(made: list[object], init: Callable[..., None]) -> Callable[..., None]:
    def count(one: object, *arguments: object) -> None:
        made.append(one)
        init(one, *arguments)

    return count


def test_an_instance_that_restarts_as_it_was_has_no_list_made_anew() -> None:
    """Otherwise, if a thousand instances restart, the next placement after each restart would sort all instances."""
    router = fleet()
    decision_of(router, "before")
    lists, members = router.instances.lists("m"), router.instances.members("m", "m")
    join(router, "i03", 99, incarnation="another", kv_capacity_tokens=64)
    assert router.instances.lists("m") is lists
    assert router.instances.members("m", "m") is members
    router.check_invariants()
    found = decision_of(router, "after", exclude=tuple(name for name in NAMES if name != "i03")).view.find("i03")
    assert found is not None
    assert (found.incarnation, found.kv_capacity_tokens) == ("another", 64)
    # A restart that changes the served names makes a new list.
    join(router, "i04", 100, incarnation="another", lora_names=("adapter",))
    assert router.instances.lists("m") is not lists
    assert [record.info.instance_id for record in router.instances.members("m", "adapter")] == ["i04"]
    router.check_invariants()
