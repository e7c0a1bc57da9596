"""Fetches of cached prefixes from other instances: when `foresight` fetches, what the router reserves, and what it learns."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.kv_load import LoadPrice
from pointsman_router.core.learning.fetches import AFTER_FAILURE_S, FORGET_S, OVERDUE_FACTOR, Fetches
from pointsman_router.core.learning.load_price_fit import LoadPriceFit
from pointsman_router.core.placement_types import (
    Candidate,
    FleetView,
    KvTransfer,
    PolicyResult,
    PrefillBacklog,
    PrefixSource,
    StepKind,
    Transfers,
)
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.prefill_curve import PrefillCurve, PrefillWork
from pointsman_router.core.router_state import RouterState, StateSettings
from tests.support.router_values import candidate, join, place, request

# A new token takes 1 ms, so the mean request, of 1,000 tokens, takes 1 s. A fetched token takes 0.1 ms, and each fetch 0.1 s.
CURVE, MEAN, PRICE = PrefillCurve(0.0, 1e-3, 0.0), PrefillWork(1_000.0, 0.0), LoadPrice(0.1, 1e-4)
POLICY = Foresight(fetch_min_tokens=512)
NOBODY = frozenset[str]()
KEYS = tuple(range(1, 257))  # 4,096 tokens
TOKENS = 4_100
KV = KvTransfer("MOONCAKE", "http://x")


def instance(name: str, cached: int = 0, waits_s: float = 0.0, decodes: int = 0, **changes: Any) -> Candidate:
    """An instance with `cached` of 10,000 tokens, on which `waits_s` of prefill are open, and `decodes` answers."""
    queue = ((int(waits_s * 1_000), 0),) if waits_s else ()
    work = PrefillBacklog(queue=queue, advanced_at=10.0, requests=len(queue))
    requests = len(queue) + decodes
    made = candidate(name, new=10_000 - cached, cached=cached, num_requests=requests, prefill_backlog=work)
    return replace(made, **{"prefix_source": PrefixSource.EVENTS, **changes})


def decided(*candidates: Candidate, price: Any = PRICE, policy: Foresight = POLICY, **asked: Any) -> PolicyResult:
    view = FleetView(candidates, now=10.0, curves={"": CURVE}, mean_work=MEAN, fetch_price=price)
    whole = request(tokens=10_000, **{"sliceable_tokens": 10_000, **asked})
    return policy.choose(whole, view, random.Random(0))


def test_a_cached_prefix_is_fetched_if_its_owner_has_many_answers_and_computing_takes_long() -> None:
    busy, idle = instance("a", cached=9_600, decodes=200), instance("b")
    result = decided(busy, idle)
    [step] = result.steps
    assert (step.kind, step.instance_id, step.kv_source) == (StepKind.PREFILL, "b", "a")
    assert (step.prefix_tokens, result.reason) == (9_600, "fetch")
    # 0.1 + 0.96 s for the transfer, and 0.4 s for the rest.
    assert result.figures["prefill_s"] == pytest.approx(1.06 + 0.4)
    # The computed seconds alone slow answers down, each by 0.05 of them.
    assert result.scores == pytest.approx({"a": 0.4 * (1 + 0.05 * 200), "b": 1.46 + 0.3 * 1.06})
    assert decided(instance("a", cached=9_600, decodes=20), idle).steps[0].instance_id == "a"


def test_a_fetch_waits_for_the_prefills_at_its_source_and_where_it_goes() -> None:
    result = decided(instance("a", cached=9_600, decodes=2_000, waits_s=0.5), instance("b", waits_s=0.25))
    assert result.figures["prefill_s"] == pytest.approx(0.5 + 0.25 + 1.06 + 0.4)
    # The request itself waits for those where it goes once more, after the KV has come.
    assert result.figures["wait_s"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("source", "price", "asked"),
    [
        ({}, UNSET, {}),
        ({}, LoadPrice(0.1, 2e-3), {}),
        ({}, PRICE, {"sliceable_tokens": 0}),
        ({"kv_gives": ""}, PRICE, {}),
        ({"excluded": "not_answering"}, PRICE, {}),
        ({"prefix_source": PrefixSource.APPROXIMATE}, PRICE, {}),
        ({"kv_engine_id": "e", "kv_gives": "NIXL"}, PRICE, {}),
    ],
)
def test_nothing_is_fetched_that_cannot_or_need_not_be(source: dict[str, Any], price: Any, asked: Any) -> None:
    result = decided(instance("a", cached=9_600, decodes=200, **source), instance("b"), price=price, **asked)
    assert not any(step.kv_source for step in result.steps)


def test_no_fetch_is_begun_that_the_gateway_may_give_up() -> None:
    # 9,600 tokens may take 5 s + 4.8 s; a fetch that is predicted to take half of that is not begun.
    for waits_s, reason in ((3.5, "fetch"), (4.0, "at_once")):
        busy = instance("a", cached=9_600, decodes=20_000, waits_s=waits_s)
        assert decided(busy, instance("b")).reason == reason, waits_s


def test_few_tokens_are_computed_and_not_fetched() -> None:
    a, b = instance("a", cached=9_600, decodes=2_000), instance("b", cached=9_200)
    assert decided(a, b).reason == "at_once"
    assert decided(a, b, price=LoadPrice(0.0, 1e-4)).reason == "at_once"
    assert decided(a, b, price=LoadPrice(0.0, 1e-4), policy=Foresight(fetch_min_tokens=16)).reason == "fetch"


def test_the_prefix_is_of_whole_blocks_and_leaves_a_token_to_compute() -> None:
    idle = instance("b", prefill_backlog=PrefillBacklog(block_size=96))
    [step] = decided(instance("a", cached=9_984, decodes=20_000), idle).steps
    assert step.prefix_tokens == 9_984
    [step] = decided(instance("a", cached=9_999, decodes=2_000_000), idle, sliceable_tokens=9_000).steps
    assert step.prefix_tokens == 8_928


def test_fetches_of_one_source_wait_for_each_other() -> None:
    busy, idle = instance("a", cached=9_600, decodes=4_000), instance("b")
    sending = replace(busy, transfers=Transfers(sending_tokens=20_000))
    assert decided(sending, idle).figures["prefill_s"] == pytest.approx(1.06 + 2.0 + 0.4)


@pytest.mark.parametrize("why", ["draining", "cordoned", "saturated"])
def test_an_instance_that_gets_no_requests_still_sends_what_it_has(why: str) -> None:
    [step] = decided(instance("a", cached=9_600, excluded=why), instance("b")).steps
    assert (step.kind, step.instance_id, step.kv_source) == (StepKind.PREFILL, "b", "a")


def test_of_equal_sources_the_one_with_least_to_send_and_compute_is_taken() -> None:
    sending = [
        instance(name, cached=9_600, decodes=4_000, transfers=Transfers(sending_tokens=20_000)) for name in "acd"
    ]
    result = decided(*sending, instance("e", cached=9_600, decodes=4_000), instance("b"))
    assert [(step.instance_id, step.kv_source) for step in result.steps] == [("b", "e")]
    busy = [instance(name, cached=9_600, decodes=4_000, pending_prefill_tokens=500) for name in "acd"]
    result = decided(*busy, instance("e", cached=9_600, decodes=4_000), instance("b"))
    assert [(step.instance_id, step.kv_source) for step in result.steps] == [("b", "e")]


def test_whoever_needs_the_same_prefix_waits_for_it_and_counts_those_before_him() -> None:
    busy, other = instance("a", cached=9_600, decodes=200), instance("c")
    target = instance("b", transfers=Transfers(arriving_tokens=9_600, arrives_s=0.5))
    result = decided(busy, target, other)
    assert (result.steps, result.reason, result.waits_for) == ((), "awaits_kv", "b")
    assert result.figures["prefill_s"] == pytest.approx(0.5 + 0.4)
    # For the third one the KV would have to be sent once more.
    assert result.scores == pytest.approx({"a": 0.4 * 11, "b": 0.9 + 0.3 * 0.5, "c": 1.46 + 0.3 * 1.06})
    crowded = replace(target, held_for=30)
    assert decided(busy, crowded, other).reason != "awaits_kv"
    without_holds = POLICY.without_holds()
    assert isinstance(without_holds, Foresight)
    assert decided(busy, target, policy=without_holds).steps


def fetched(fetches: Fetches, name: str, seconds: float, now: float = 0.0, *, tokens: int = 16_000) -> None:
    keys = range(1, tokens // 16 + 1)
    price = fetches.price("m", 100_000)
    fetches.opened(name, "m", "a", "b", keys, tokens, tokens, price, now, behind=False)
    fetches.done(name, "b", now + seconds)


def test_the_price_is_learned() -> None:
    fetches = Fetches()
    prior = fetches.price("m", 100_000)
    assert prior.seconds(1_000_000) == pytest.approx(1_000_000 * 100_000 / 1.25e10, rel=0.01)
    for number in range(LoadPriceFit.TRUSTED_AFTER):
        fetched(fetches, f"r{number}", 0.05 + (1 + number) * 1e-5 * 16_000, tokens=16_000 * (1 + number))
    assert fetches.samples("m") == LoadPriceFit.TRUSTED_AFTER
    assert fetches.price("m", 100_000).seconds(32_000) == pytest.approx(0.05 + 0.32, rel=0.2)
    assert fetches.price("other", 100_000) == prior
    fetches.forget_pool("m")
    assert fetches.price("m", 100_000) == prior


def test_a_price_that_keeps_all_from_fetching_is_forgotten() -> None:
    fetches = Fetches()
    prior = fetches.price("m", 100_000)
    for number in range(LoadPriceFit.TRUSTED_AFTER):
        fetched(fetches, f"r{number}", 60.0, 100.0 * number)
    last = 100.0 * number + 60.0
    fetches.expire(last + FORGET_S - 1.0)
    assert fetches.price("m", 100_000).seconds(16_000) > 10.0
    fetches.expire(last + FORGET_S)
    assert fetches.price("m", 100_000) == prior


def test_a_price_is_kept_while_fetches_end_of_which_nothing_is_learned() -> None:
    fetches = Fetches()
    prior = fetches.price("m", 100_000)
    for number in range(LoadPriceFit.TRUSTED_AFTER):
        fetched(fetches, f"r{number}", 0.5, 100.0 * number)
    learned = fetches.price("m", 100_000)
    begun = FORGET_S / 2
    fetches.opened("r", "m", "a", "b", KEYS, 4_096, 4_096, learned, begun, behind=True)
    fetches.done("r", "b", begun + 60.0)
    fetches.expire(begun + FORGET_S)
    assert fetches.price("m", 100_000) == learned != prior


def test_behind_a_prefill_only_a_fast_fetch_says_something() -> None:
    fetches = Fetches()
    price = fetches.price("m", 100_000)
    for seconds, samples in ((30.0, 0), (0.01, 1)):
        fetches.opened("r", "m", "a", "b", range(1, 1_001), 16_000, 16_000, price, 0.0, behind=True)
        fetches.done("r", "b", seconds)
        assert fetches.samples("m") == samples


def both(fetches: Fetches, now: float, seconds: float) -> None:
    """Fetch 16,000 tokens twice at once from one source; the second one takes `seconds`."""
    for name, target in (("r", "b"), ("s", "c")):
        fetches.opened(name, "m", "a", target, range(1, 1_001), 16_000, 16_000, PRICE, now, behind=False)
    fetches.gone("r")
    fetches.done("s", "c", now + seconds)


def test_whether_fetches_of_one_source_wait_for_each_other_is_learned() -> None:
    fetches, alone_s = Fetches(), PRICE.seconds(16_000)
    fetches.opened("w", "m", "a", "d", KEYS, 4_096, 16_000, PRICE, 0.0, behind=False)
    assert fetches.transfers("a", (), 0.0) is None, "until it was seen"
    for number in range(30):
        both(fetches, float(number), alone_s + 1.6 + 1.6)
    waited = fetches.transfers("a", (), 40.0)
    assert waited is not None
    assert waited.sending_tokens == pytest.approx(16_000, rel=0.01)
    for number in range(30):
        both(fetches, 50.0 + number, alone_s)
    assert (fetches.transfers("a", (), 90.0) or Transfers()).sending_tokens < 100
    assert fetches.samples("m") == 0, "of the price they say nothing"
    fetches.forget_pool("m")
    fetches.check_invariants(("w",))


def test_where_tokens_take_no_time_by_the_learned_price_no_wait_is_learned() -> None:
    fetches = Fetches()
    for number in range(LoadPriceFit.TRUSTED_AFTER):
        seconds, tokens = (0.5, 2_048) if number % 2 else (0.4, 32_000)
        fetched(fetches, f"r{number}", seconds, tokens=tokens)
    price = fetches.price("m", 100_000)
    assert price.token_s == 0.0 < price.latency_s
    for name, target in (("r", "b"), ("s", "c")):
        fetches.opened(name, "m", "a", target, range(1, 1_001), 16_000, 16_000, price, 9.0, behind=False)
    fetches.done("s", "c", 10.0)
    fetches.done("r", "b", 10.0)
    fetches.check_invariants(())


def test_after_a_failure_nothing_is_fetched_for_a_while_from_there_and_to_there() -> None:
    fetches = Fetches()
    fetches.opened("r", "m", "a", "b", KEYS, 4_096, 4_096, PRICE, 0.0, behind=False)
    fetches.failed("r", 1.0)
    assert fetches.failing(1.0) == (frozenset("a"), frozenset("b"))
    assert fetches.failing(1.0 + AFTER_FAILURE_S) == (NOBODY, NOBODY)
    fetches.expire(1.0 + AFTER_FAILURE_S)
    fetches.check_invariants(())
    fetches.opened("r", "m", "a", "b", KEYS, 4_096, 4_096, PRICE, 0.0, behind=False)
    fetches.failed("r", 1.0)
    fetched(fetches, "s", 0.2, 2.0)
    assert fetches.failing(3.0) == (NOBODY, NOBODY), "it works again"


@pytest.mark.parametrize("others", [("c", "b"), ("a", "c")])
def test_who_fails_with_several_does_not_take_them_out(others: tuple[str, str]) -> None:
    fetches = Fetches()
    for name, (source, target) in (("r", ("a", "b")), ("s", others)):
        fetches.opened(name, "m", source, target, KEYS, 4_096, 4_096, PRICE, 0.0, behind=False)
        fetches.failed(name, 1.0)
    assert fetches.failing(1.0) == (frozenset("a"), frozenset("b"))


def test_what_is_on_its_way_is_known_to_prompts_that_begin_with_it() -> None:
    fetches = Fetches()
    fetches.opened("r", "m", "a", "b", KEYS, 2_048, 2_000, PRICE, 5.0, behind=False)
    expected_s = PRICE.seconds(2_000)
    found = fetches.transfers("b", KEYS[:200], 5.1)
    assert found is not None
    assert (found.sending_tokens, found.arriving_tokens) == (0, 2_048)
    assert found.arrives_s == pytest.approx(expected_s - 0.1)
    assert fetches.transfers("b", KEYS[:100], 5.1) is None, "a shorter prompt"
    assert fetches.transfers("b", (*KEYS[:127], 9_999, *KEYS[128:]), 5.1) is None, "another prefix"
    late = 5.0 + OVERDUE_FACTOR * expected_s + 0.01
    assert fetches.transfers("b", KEYS, late) is None, "nobody waits for what does not come"
    fetches.gone("r")
    assert fetches.transfers("b", KEYS, 5.1) is None
    fetches.check_invariants(())


# ---- the router ----


def router(**changes: Any) -> RouterState:
    made = RouterState(Foresight(fetch_min_tokens=512), StateSettings(), router_id="t")
    for number, name in enumerate("ab"):
        join(made, name, number, list(KEYS) if name == "a" else [], kv_transfer=KV, **changes)
    # Many answers run on `a`.
    for number in range(200):
        place(made, request(f"w{number}", tokens=1_000, exclude=("b",)))
        made.handle(ev.FirstToken(f"w{number}"), 0.5)
    return made


def fetch(made: RouterState, name: str = "r", now: float = 1.0) -> ev.Placed:
    asked = request(name, tokens=TOKENS, keys=KEYS, sliceable_tokens=TOKENS, session_id="s")
    answer = place(made, asked, now)
    made.check_invariants()
    assert isinstance(answer, ev.Placed)
    return answer


def test_a_fetch_reserves_no_computing_and_the_rest_is_decided_anew() -> None:
    made = router()
    learned = made.prefill_observer.samples("m", "")
    answer = fetch(made)
    step = answer.step
    assert (step.kind, step.instance_id, step.kv_source, answer.last) == (StepKind.PREFILL, "b", "a", False)
    reserved = made.reservations.get("r")
    assert reserved is not None
    assert (reserved.new_tokens, reserved.cached_tokens, reserved.fetching) == (0, 4_096, True)
    assert made.reservations.num_prefills("b") == 1, "no answer runs there yet"
    [remainder] = made.reservations.remainders("b")[0]
    assert remainder == ("r", TOKENS - 4_096, 4_096)
    seen = made.views.view(request("q", tokens=TOKENS, keys=KEYS), "m", 1, 1.1)
    arriving = seen.candidates[1].transfers
    assert isinstance(arriving, Transfers)
    assert arriving.arriving_tokens == 4_096
    effects = made.handle(ev.StepDone("r", 0, ok=True), 1.3)
    made.check_invariants()
    [last] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (last.step.kind, last.step.instance_id, last.step.kv_source) == (StepKind.SERVE, "b", "")
    assert last.decision.cached_tokens == 4_096
    assert made.fetches.samples("m") == 1
    assert made.prefill_observer.samples("m", "") == learned, "of prefills it says nothing"


def test_a_fetch_to_an_instance_that_computes_is_waited_for_and_says_nothing_of_the_price() -> None:
    made = router()
    place(made, request("before", tokens=1_000, exclude=("a",)), 0.9)
    predicted_s = fetch(made).decision.result.figures["fetch_s"]
    price = made.fetches.price("m", 0)
    assert predicted_s > OVERDUE_FACTOR * price.seconds(4_096)
    seen = made.views.view(request("q", tokens=TOKENS, keys=KEYS), "m", 1, 1.0 + predicted_s)
    assert isinstance(seen.candidates[1].transfers, Transfers), "it is not overdue"
    made.handle(ev.StepDone("r", 0, ok=True), 1.0 + predicted_s)
    assert made.fetches.samples("m") == 0
    made.check_invariants()


def test_if_the_fetch_fails_the_instance_computes_and_the_two_fetch_nothing_for_a_while() -> None:
    made = router()
    fetch(made)
    effects = made.handle(ev.StepDone("r", 0, ok=False, error="evicted"), 2.0)
    made.check_invariants()
    [last] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (last.step.kind, last.step.instance_id, last.step.kv_source, last.last) == (StepKind.SERVE, "b", "", True)
    reserved = made.reservations.get("r")
    assert reserved is not None
    assert reserved.new_tokens == TOKENS
    made.handle(ev.Finished("r", "OK"), 3.0)
    again = fetch(made, "again", 4.0)
    assert not again.step.kv_source
    source, target = again.decision.view.candidates
    assert (source.kv_gives, bool(source.kv_takes), bool(target.kv_gives), target.kv_takes) == ("", True, True, "")


def test_a_source_is_not_blamed_for_what_failed_where_the_prefix_goes() -> None:
    made = router()
    fetch(made)
    made.handle(ev.StepDone("r", 0, ok=False, error="no connection", instance_failed=True), 2.0)
    made.check_invariants()
    assert made.fetches.failing(2.0) == (NOBODY, NOBODY)
    made.handle(ev.Finished("r", "CANCELLED"), 3.0)
    assert not made.fetches
    assert fetch(made, "again", 4.0).step.kv_source == "a"


def test_a_request_that_ends_ends_its_fetch() -> None:
    made = router()
    fetch(made)
    made.handle(ev.Finished("r", "CANCELLED"), 1.2)
    made.check_invariants()
    assert not made.fetches


def test_engines_that_cannot_transfer_kv_have_no_price() -> None:
    made = RouterState(Foresight(), StateSettings(), router_id="t")
    join(made, "a", 0, kv_transfer=None)
    seen = made.views.view(request("q", tokens=TOKENS, keys=KEYS, sliceable_tokens=TOKENS), "m", 1, 1.0)
    assert seen.fetch_price is UNSET
