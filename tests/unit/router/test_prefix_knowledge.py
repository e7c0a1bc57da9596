"""Reports and answers in the router, by example: progress, provisional and approximate keys, prediction audit, ages, bounds."""

from __future__ import annotations

import itertools

import pytest

from pointsman_common.core.block_keys import KEY_SCHEME, digest_of, prompt_keys
from pointsman_common.core.key_report_types import Delta, KeyMessage, SnapshotBegin, SnapshotChunk, SnapshotEnd
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.core.placement_types import Candidate, Decision, InstanceState, Load, Phase, PrefixSource
from pointsman_router.core.prefix import exact_index
from pointsman_router.core.prefix.computed_prompts import ComputedPrompts
from pointsman_router.core.prefix.exact_index import IndexFull, PrefixIndex
from pointsman_router.core.prefix.provisional_blocks import PROVISIONAL_S, ProvisionalBlocks
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import hello, info, join, place, request, state

PROMPT = list(range(200))
KEYS = prompt_keys(PROMPT, "m")
OTHER = list(range(1_000, 1_200))


def report(router: RouterState, message: KeyMessage, now: float = 0.0, name: str = "a") -> list[ev.Effect]:
    return router.handle(ev.KeysReported(router_stream(router, name), name, message), now)


def router_stream(router: RouterState, name: str) -> int:
    return record_of(router, name).stream_id


def record_of(router: RouterState, name: str = "a") -> InstanceRecord:
    record = router.instances.get(name)
    assert record is not None
    return record


def pending(router: RouterState, name: str = "a") -> int:
    router.check_invariants()
    return router.reservations.counters(name).pending_prefill_tokens


def seen(router: RouterState, prompt: list[int] = PROMPT, now: float = 0.0, name: str = "a") -> Candidate:
    """How a decision on `prompt` would see an instance."""
    decision = router.explain(request(f"dry-{now}", prompt=prompt), now)
    assert isinstance(decision, Decision)
    return next(candidate for candidate in decision.view.candidates if candidate.instance_id == name)


def answer(
    router: RouterState, request_id: str, *, cached: int | None = None, now: float = 0.0, prompt: list[int] = PROMPT
) -> list[ev.Effect]:
    """One request from its placement to its end; returns what its end brings."""
    assert isinstance(place(router, request(request_id, prompt=prompt), now), ev.Placed)
    router.handle(ev.FirstToken(request_id), now)
    effects = router.handle(ev.Finished(request_id, "OK", cached_tokens=cached), now)
    router.check_invariants()
    return effects


# ---- progress ----


def test_a_prefill_is_pending_only_as_far_as_its_keys_have_not_come() -> None:
    router = state()
    join(router, "a", 1, KEYS[:2])
    place(router, request("r", prompt=PROMPT))
    assert pending(router) == 200 - 32
    report(router, Delta(1, 1, added=KEYS[2:6]))
    assert pending(router) == 200 - 96
    reservation = router.reservations.get("r")
    assert reservation is not None
    assert (reservation.new_tokens, reservation.prefilled_tokens) == (168, 64)
    report(router, Delta(2, 1, added=KEYS[6:]))
    assert pending(router) == 200 - 192
    router.handle(ev.FirstToken("r"), 1.0)
    assert pending(router) == 0
    report(router, Delta(3, 1, removed=KEYS[6:]))
    report(router, Delta(4, 1, added=KEYS[6:]))
    assert pending(router) == 0
    router.handle(ev.Finished("r", "OK"), 2.0)
    assert len(router.prefix_knowledge.prefill_progress) == 0


def test_one_prompts_keys_move_all_that_share_them_and_nobody_elses() -> None:
    router = state()
    join(router, "a", 1)
    for name in ("r1", "r2"):
        place(router, request(name, prompt=PROMPT))
    place(router, request("other", prompt=OTHER))
    report(router, Delta(1, 1, added=[7, *KEYS[:6], 9]))
    report(router, Delta(1, 1, added=[7, *KEYS[:8], 9]))  # The same seq with other content is ignored.
    assert pending(router) == 200 + 2 * (200 - 96)
    router.handle(ev.Finished("r1", "CANCELLED"), 1.0)
    assert pending(router) == 200 + 200 - 96


def test_keys_that_are_held_but_computed_again_are_no_progress() -> None:
    """An engine computes the last token itself, and with it the block that it already has."""
    router = state()
    join(router, "a", 1, KEYS[:8], block_size=64)
    place(router, request("r", prompt=PROMPT[:128]))
    assert pending(router) == 64
    place(router, request("longer", prompt=PROMPT[:127] + OTHER))
    assert pending(router) == 64 + 327 - 64
    report(router, Delta(0, 1, added=prompt_keys(PROMPT[:127] + OTHER, "m")))  # By its seq it is already applied.
    assert pending(router) == 64 + 327 - 64


def test_a_hole_in_what_comes_stops_the_progress_until_it_is_filled() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT))
    report(router, Delta(1, 1, added=[*KEYS[:2], *KEYS[3:6]]))
    assert pending(router) == 200 - 32
    report(router, Delta(2, 1, added=KEYS[2:3]))
    assert pending(router) == 200 - 96


def test_a_snapshot_during_a_prefill_counts_and_a_lost_copy_takes_nothing_back() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT))
    report(router, Delta(1, 1, added=KEYS[:3]))
    assert any(isinstance(effect, ev.Resync) for effect in report(router, Delta(9, 1, added=[5])))
    assert pending(router) == 200 - 48
    join(router, "a", 1, KEYS[:8])
    assert pending(router) == 200 - 128


def test_other_tiers_are_no_progress() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT))
    report(router, Delta(1, 2, added=KEYS[:6]))
    assert pending(router) == 200


def test_an_instance_without_events_keeps_the_whole_until_the_first_token() -> None:
    router = state()
    hello(router, "a", 1, exact_prefix=False)
    place(router, request("r", prompt=PROMPT))
    report(router, Delta(1, 1, added=KEYS[:6]))
    assert pending(router) == 200
    router.handle(ev.FirstToken("r"), 1.0)
    assert pending(router) == 0


def test_a_gateway_that_returns_keeps_the_progress_of_its_open_requests() -> None:
    router = state()
    join(router, "a", 1)
    for name in ("r", "s"):
        place(router, request(name, prompt=PROMPT))
    report(router, Delta(1, 1, added=KEYS[:3]))
    known = [ev.OpenStream(request(name, tokens=200), "a", Phase.PREFILL, 0) for name in ("r", "s")]
    router.handle(ev.GatewayHello("g", tuple(known)), 1.0)
    assert pending(router) == 2 * (200 - 48)
    report(router, Delta(2, 1, added=KEYS[3:4]))
    assert pending(router) == 2 * (200 - 64)
    router.handle(ev.GatewayHello("g", (ev.OpenStream(known[0].request, "b", Phase.PREFILL, 0),)), 2.0)
    assert (pending(router, "a"), pending(router, "b")) == (0, 200)


# ---- sparse prefixes ----


def test_a_sparse_instance_has_what_ends_with_the_last_of_its_keys() -> None:
    router = state()
    join(router, "a", 1, [KEYS[4], KEYS[8]], sparse_prefixes=True)
    join(router, "b", 2, [KEYS[4], KEYS[8]])
    assert seen(router).cached_tokens == 144
    assert seen(router, PROMPT[:143]).cached_tokens == 80
    assert seen(router, PROMPT[:64]).cached_tokens == 0
    assert seen(router, name="b").cached_tokens == 0
    report(router, Delta(1, 1, removed=[KEYS[8]]))
    assert seen(router).cached_tokens == 80
    router.check_invariants()


def test_the_last_token_of_a_prompt_is_computed_although_a_sparse_instance_has_its_block() -> None:
    """The block before is no hit, so the prompt falls back to an earlier one."""
    router = state()
    join(router, "a", 1, [KEYS[2], KEYS[5]], sparse_prefixes=True)
    assert seen(router, PROMPT[:96]).cached_tokens == 48
    assert seen(router, PROMPT[:97]).cached_tokens == 96


def test_an_instance_becomes_sparse_with_its_next_hello_and_stays_so_without_keys() -> None:
    router = state()
    join(router, "a", 1, [KEYS[4]])
    assert seen(router).cached_tokens == 0
    hello(router, "a", 2, sparse_prefixes=True)
    assert seen(router).cached_tokens == 80
    report(router, Delta(1, 1, added=[KEYS[6]], cleared=True))
    assert seen(router).cached_tokens == 112
    router.handle(ev.AgentGoodbye(2, "a"), 0.0)
    join(router, "a", 3, [KEYS[4]])
    assert seen(router).cached_tokens == 0


def test_an_answer_of_a_sparse_instance_credits_nothing() -> None:
    router = state()
    join(router, "a", 1, [KEYS[4]], sparse_prefixes=True)
    answer(router, "r", now=1.0)
    one = seen(router, now=1.5)
    assert (one.cached_tokens, one.provisional_tokens) == (80, 0)


def test_the_prefill_of_a_sparse_instance_is_followed_by_its_keys() -> None:
    router = state()
    join(router, "a", 1, [KEYS[4]], sparse_prefixes=True)
    place(router, request("r", prompt=PROMPT))
    assert pending(router) == 200 - 80
    report(router, Delta(1, 1, added=KEYS[5:8]))
    assert pending(router) == 200 - 128


# ---- provisional keys ----


def test_an_answer_credits_its_prompt_at_once_until_events_speak() -> None:
    router = state()
    join(router, "a", 1, KEYS[:3])
    answer(router, "r", now=1.0)
    one = seen(router, now=1.5)
    assert (one.cached_tokens, one.provisional_tokens, one.exact) == (192, 192 - 48, True)
    report(router, Delta(1, 1, added=KEYS[3:10]), 1.6)
    one = seen(router, now=1.6)
    assert (one.cached_tokens, one.provisional_tokens) == (192, 32)
    assert router.prefix_knowledge.provisional.count("a") == 2
    later = 1.0 + PROVISIONAL_S
    router.handle(ev.Tick(), later)
    assert seen(router, now=later).cached_tokens == 160
    assert router.prefix_knowledge.provisional.count("a") == 0


def test_only_an_engines_own_whole_blocks_are_credited() -> None:
    router = state()
    join(router, "a", 1, block_size=64)
    answer(router, "r", prompt=PROMPT[:170])
    assert seen(router).cached_tokens == 128
    assert router.prefix_knowledge.provisional.count("a") == 8


def test_a_request_that_never_began_credits_nothing() -> None:
    router = state()
    join(router, "a", 1)
    for outcome in ("FAILED", "CANCELLED", "REJECTED"):
        place(router, request(outcome, prompt=PROMPT))
        router.handle(ev.Finished(outcome, outcome), 0.0)
    assert seen(router).cached_tokens == 0


def test_what_other_tiers_hold_settles_no_credit() -> None:
    router = state()
    join(router, "a", 1)
    answer(router, "r")
    report(router, Delta(1, 2, added=KEYS))
    assert seen(router).cached_tokens == 192


@pytest.mark.parametrize("how", ["removed", "cleared", "gap", "reconnect", "incarnation", "gone"])
def test_credit_ends_when_events_contradict_it(how: str) -> None:
    router = state()
    join(router, "a", 1)
    answer(router, "r")
    assert seen(router).cached_tokens == 192
    match how:
        case "removed":
            report(router, Delta(1, 1, added=KEYS[:1]))
            report(router, Delta(2, 1, removed=KEYS[:1]))
        case "cleared":
            report(router, Delta(1, 1, cleared=True))
        case "gap":
            report(router, Delta(5, 1))
            for message in (SnapshotBegin(0), SnapshotEnd(0, 0, 0)):
                report(router, message)
        case "reconnect":
            router.handle(ev.AgentLost(1, "a"), 0.0)
            router.handle(ev.AgentHello(2, info("a"), KEY_SCHEME, 7, 9), 0.0)
            for message in (SnapshotBegin(9), SnapshotEnd(9, 0, 0)):
                report(router, message)
        case "incarnation":
            join(router, "a", 2, incarnation="2")
        case "gone":
            router.handle(ev.AgentGoodbye(1, "a"), 0.0)
            join(router, "a", 2)
    assert seen(router).cached_tokens == 0
    router.check_invariants()


def test_credit_is_bounded_and_the_oldest_goes_first() -> None:
    provisional = ProvisionalBlocks(seconds=5.0, max_keys=10)
    provisional.add("a", list(range(6)), 0.0)
    provisional.add("b", list(range(6)), 1.0)
    assert (provisional.count("a"), provisional.count("b")) == (0, 6)
    provisional.add("a", list(range(11)), 1.0)
    assert provisional.count("a") == 0
    provisional.check_invariants()


@pytest.mark.parametrize("has", [{"a": 0, "b": 3, "c": 0}, {"a": 2, "b": 0}, {"b": 9, "c": 10}, {"d": 1}, {}])
@pytest.mark.parametrize("keys", [list(range(10)), list(range(20, 30)), []])
def test_provisional_keys_extend_only_the_run_that_an_instance_has(has: dict[str, int], keys: list[int]) -> None:
    provisional = ProvisionalBlocks()
    held = {"a": keys[2:5], "b": keys[3:], "e": keys, "f": [99]}
    for name, added in held.items():
        provisional.add(name, added, 0.0)
    has = {name: min(blocks, len(keys)) for name, blocks in has.items()}

    def further(name: str) -> int:
        return len(list(itertools.takewhile(held.get(name, []).__contains__, keys[has[name] :])))

    assert provisional.reach(keys, has) == {name: has[name] + further(name) for name in has if further(name)}


# ---- approximate ----


def test_without_events_a_placement_is_remembered_and_a_lower_report_forgets_it() -> None:
    router = state()
    hello(router, "a", 1, exact_prefix=False, prefix_reason="no KV events")
    before = seen(router)
    assert (before.cached_tokens, before.exact, before.prefix_source) == (0, False, PrefixSource.APPROXIMATE)
    place(router, request("r", prompt=PROMPT))
    assert seen(router).cached_tokens == 0
    router.handle(ev.FirstToken("r"), 0.0)
    assert (seen(router).cached_tokens, seen(router).exact) == (192, False)
    router.handle(ev.Finished("r", "OK", cached_tokens=0), 0.0)
    assert seen(router).cached_tokens == 192
    answer(router, "r2", cached=64)
    assert seen(router).cached_tokens == 64
    assert router.prefix_knowledge.computed_prompts.count("a") == 4
    hello(router, "a", 2, exact_prefix=False, incarnation="2")
    assert seen(router).cached_tokens == 0


def test_approximate_keys_keep_to_the_capacity_and_lose_tails_first() -> None:
    router = state()
    hello(router, "a", 1, exact_prefix=False, kv_capacity_tokens=20 * 16)
    answer(router, "r")
    answer(router, "s", prompt=OTHER)
    assert router.prefix_knowledge.computed_prompts.count("a") == 20
    assert seen(router).cached_tokens == 8 * 16
    assert seen(router, OTHER).cached_tokens == 192


def test_use_renews_an_approximate_belief() -> None:
    known = ComputedPrompts()
    known.learn("a", [1, 2, 3], 6, counts=True)
    known.learn("a", [11, 12, 13], 6, counts=True)
    known.learn("a", [1, 2, 3], 6, counts=True)
    known.learn("a", [21, 22], 6, counts=True)
    assert known.index.leading_blocks([1, 2, 3], ["a"]) == {"a": 3}
    assert known.index.leading_blocks([11, 12, 13], ["a"]) == {"a": 1}
    known.learn("a", list(range(100, 110)), 6, counts=True)
    assert known.index.leading_blocks(list(range(100, 110)), ["a"]) == {"a": 6}
    known.check_invariants()


def test_an_engine_that_caches_nothing_is_believed_to_for_a_while_only() -> None:
    router = state()
    hello(router, "a", 1, exact_prefix=False)
    predicted = []
    for number in range(20):
        predicted.append(seen(router).cached_tokens)
        answer(router, f"r{number}", cached=0)
    assert predicted.count(192) == 5
    assert record_of(router).audit_failures == 1
    assert seen(router, now=59.0).prefix_source is PrefixSource.NONE


# ---- prediction audit ----


def shortfalls(router: RouterState, count: int, name: str = "r", now: float = 0.0) -> list[ev.Effect]:
    """Run `count` requests whose answers report no cached tokens, and then a report of the agent; return the effects of both."""
    ended = itertools.chain.from_iterable(answer(router, f"{name}{n}", cached=0, now=now) for n in range(count))
    return [*ended, *speaks(router, now)]


def speaks(router: RouterState, now: float) -> list[ev.Effect]:
    effects = router.handle(ev.LoadReported(record_of(router).stream_id, "a", Load(now)), now)
    router.check_invariants()
    return effects


def test_persistent_shortfalls_fail_the_audit_until_the_next_snapshot() -> None:
    router = state()
    join(router, "a", 1, KEYS)
    assert not any(isinstance(effect, ev.Resync) for effect in shortfalls(router, 4))
    place(router, request("early", prompt=PROMPT))
    answer(router, "last", cached=0)
    assert seen(router).cached_tokens == 192
    effects = speaks(router, 0.0)
    [resync] = [effect for effect in effects if isinstance(effect, ev.Resync)]
    assert "5 of the last 5 answers" in resync.reason
    assert [effect.instance_id for effect in effects if isinstance(effect, ev.PredictionAuditFailed)] == ["a"]
    assert ev.FleetChanged() in effects
    record = record_of(router)
    assert (record.state, router.index.count("a"), record.prediction_audit.failures) == (InstanceState.SYNCING, 0, 1)
    # What was placed counts on: the prompt was just computed.
    assert (seen(router).cached_tokens, seen(router).prefix_source) == (192, PrefixSource.APPROXIMATE)
    join(router, "a", 1, KEYS, now=1.0)
    assert "fewer cached tokens" in record.prefix_reason
    # Placed on the old index: no evidence against the new one.
    router.handle(ev.Finished("early", "OK", cached_tokens=0), 1.0)
    shortfalls(router, 4, "s", 1.0)
    assert record.prediction_audit.failures == 1


def test_occasional_and_small_shortfalls_are_no_reason() -> None:
    router = state()
    join(router, "a", 1, KEYS)
    for number in range(30):
        answer(router, f"r{number}", cached=0 if number % 2 else 192)
        answer(router, f"s{number}", cached=160)
        answer(router, f"t{number}")
        speaks(router, 0.0)
    assert record_of(router).prediction_audit.failures == 0


def test_what_the_engine_evicted_meanwhile_is_no_evidence() -> None:
    router = state()
    join(router, "a", 1, KEYS)
    for number in range(10):
        place(router, request(f"r{number}", prompt=PROMPT))
        report(router, Delta(2 * number + 1, 1, removed=KEYS[4:]))
        report(router, Delta(2 * number + 2, 1, added=KEYS[4:]))
        router.handle(ev.FirstToken(f"r{number}"), 0.0)
        router.handle(ev.Finished(f"r{number}", "OK", cached_tokens=64), 0.0)
    assert record_of(router).prediction_audit.failures == 0
    router.check_invariants()


@pytest.mark.parametrize(
    ("interval_s", "until", "fails"),
    [(0.25, 1.9, True), (0.25, 2.1, False), (1.0, 1.9, True), (1.0, 2.1, False), (4.0, 7.9, True), (4.0, 8.1, False)],
)
def test_what_an_engine_evicts_while_its_agent_is_silent_is_no_evidence(
    interval_s: float, until: float, fails: bool
) -> None:
    router = state()
    join(router, "a", 1, KEYS, report_interval_s=interval_s)
    for number in range(8):
        answer(router, f"r{number}", cached=0, now=until * number / 8)
    place(router, request("ends later", prompt=PROMPT), until - 0.01)
    effects = speaks(router, until)
    audit = record_of(router).prediction_audit
    assert any(isinstance(effect, ev.Resync) for effect in effects) is fails is (audit.failures == 1)
    router.handle(ev.Finished("ends later", "OK", cached_tokens=0), until)
    shortfalls(router, 4, "s", until)
    assert audit.failures == fails


def test_what_ends_before_a_lost_agent_returns_is_no_evidence() -> None:
    router = state()
    join(router, "a", 1, KEYS)
    for number in range(8):
        place(router, request(f"r{number}", prompt=PROMPT))
    router.handle(ev.AgentLost(1, "a"), 0.1)
    hello(router, "a", 2, 0.2)
    for number in range(8):
        router.handle(ev.Finished(f"r{number}", "OK", cached_tokens=0), 0.3)
    shortfalls(router, 4, "s", 0.3)
    assert record_of(router).prediction_audit.failures == 0


def test_events_that_failed_the_audit_count_again_after_answers_that_agree() -> None:
    router = state()
    join(router, "a", 1, KEYS)
    shortfalls(router, 5)
    record = record_of(router)
    join(router, "a", 1, KEYS, now=1.0)
    assert (record.state, router.index.count("a")) == (InstanceState.READY, 12)
    assert seen(router, now=1.0).prefix_source is PrefixSource.APPROXIMATE
    for number in range(16):
        assert not record.exact
        answer(router, f"s{number}", cached=192, now=1.0)
        speaks(router, 1.0)
    assert (record.exact, record.prefix_reason) == (True, "")
    assert seen(router, now=1.0).exact


# ---- ages ----


def test_old_figures_are_marked_stale_and_old_keys_earn_nothing() -> None:
    router = state(stale_report_s=5.0, stale_keys_s=10.0)
    join(router, "a", 1, KEYS)
    assert (seen(router).stale, seen(router).reported_at) == (True, None)
    router.handle(ev.LoadReported(1, "a", Load(sampled_at=0.0, running=3)), 1.0)
    assert [seen(router, now=at).stale for at in (1.0, 5.0, 5.1)] == [False, False, True]
    assert seen(router, now=11.0).cached_tokens == 192
    late = seen(router, now=11.1)
    assert (late.cached_tokens, late.exact, late.prefix_source) == (0, False, PrefixSource.NONE)
    report(router, Delta(1, 1), 12.0)
    assert seen(router, now=12.0).exact


# ---- reservations that nobody claims ----


def idle_reports(router: RouterState, *times: float, running: int = 0) -> list[ev.Effect]:
    return [
        effect
        for at in times
        for effect in router.handle(ev.LoadReported(1, "a", Load(sampled_at=at, running=running)), at)
    ]


def decoding(router: RouterState) -> None:
    join(router, "a", 1)
    place(router, request("r", tokens=10))
    router.handle(ev.FirstToken("r"), 0.0)


def test_an_idle_engines_word_releases_what_no_gateway_claims() -> None:
    router = state(gateway_lease_s=1_000.0)
    decoding(router)
    router.handle(ev.GatewayLost("g"), 5.0)
    assert idle_reports(router, 31.0, 32.0, running=1) == []
    assert idle_reports(router, 33.0, 34.0) == []
    [_, closed] = idle_reports(router, 35.0)
    assert isinstance(closed, ev.DecisionClosed)
    assert "no gateway claims it" in closed.finished.error
    assert len(router.reservations) == 0
    router.check_invariants()


@pytest.mark.parametrize(
    "doubt",
    ["young", "older idleness", "claimed", "prefill", "stale", "repeated", "unhealthy", "suspended", "busy since"],
)
def test_in_doubt_a_reservation_stays(doubt: str) -> None:
    router = state(gateway_lease_s=1_000.0)
    decoding(router)
    if doubt != "claimed":
        router.handle(ev.GatewayLost("g"), 5.0)
    match doubt:
        case "young":
            idle_reports(router, 27.0, 28.0, 29.0)
        case "older idleness":
            assert idle_reports(router, -9.0, -8.0, 40.0, 41.0) == []
        case "claimed":
            idle_reports(router, 31.0, 32.0, 33.0)
        case "prefill":
            place(router, request("s", tokens=10), gateway="g")
            router.handle(ev.FirstToken("s"), 30.0)
            place(router, request("t", tokens=10), gateway="g")
            router.handle(ev.GatewayLost("g"), 30.0)
            idle_reports(router, 61.0, 62.0, 63.0)
            assert router.reservations.get("t") is not None
            assert router.reservations.get("s") is None
            return
        case "stale":
            for at in (40.0, 41.0, 42.0):
                router.handle(ev.LoadReported(1, "a", Load(sampled_at=at - 6.0)), at)
        case "repeated":
            for at in (40.0, 40.5, 41.0):
                router.handle(ev.LoadReported(1, "a", Load(sampled_at=39.0)), at)
        case "unhealthy":
            for at in (40.0, 41.0, 42.0):
                router.handle(ev.LoadReported(1, "a", Load(sampled_at=at, healthy=False)), at)
        case "suspended":
            for at in (40.0, 41.0, 42.0):
                router.handle(ev.LoadReported(1, "a", Load(sampled_at=at, suspended="paused")), at)
        case "busy since":
            idle_reports(router, 40.0, 41.0)
            idle_reports(router, 42.0, running=1)
            idle_reports(router, 43.0, 44.0)
    assert router.reservations.get("r") is not None


# ---- bounds ----


def test_an_index_refuses_what_does_not_fit_and_is_unchanged() -> None:
    index = PrefixIndex(max_keys=4)
    index.add("a", [1, 2, 3])
    index.add("b", [1, 2, 3, 4])
    with pytest.raises(IndexFull):
        index.add("a", [4, 5])
    assert (index.keys_of("a"), len(index)) == ({1, 2, 3}, 4)
    index.drop("b")
    assert index.add("a", [5]) == 1
    index.check_invariants()


def test_an_instance_beyond_the_index_is_approximated_until_there_is_room() -> None:
    router = state(max_keys=20)
    join(router, "a", 1, KEYS)
    others = prompt_keys(OTHER, "m")
    join(router, "b", 2, others)
    record = record_of(router, "b")
    assert (record.state, record.prefix_reason) == (InstanceState.READY, "the router's index is full")
    assert router.index.count("b") == 0
    one = seen(router, OTHER, name="b")
    assert (one.exact, one.prefix_source) == (False, PrefixSource.APPROXIMATE)
    assert all(isinstance(effect, ev.Pace) for effect in router.handle(ev.Tick(), 0.5))
    assert router.handle(ev.Tick(), 1.0) == []
    router.handle(ev.AgentGoodbye(1, "a"), 1.0)
    effects = router.handle(ev.Tick(), 1.0)
    assert ev.Resync(2, "b", "the index has room again") in effects
    join(router, "b", 2, others, now=1.0)
    assert seen(router, OTHER, name="b", now=1.0).exact
    # The index can become full by a delta, too.
    effects = report(router, Delta(1, 1, added=list(range(9))), 1.0, "b")
    assert effects == [ev.FleetChanged()] or effects == []
    assert record.sync.full
    router.check_invariants()


def test_of_instances_that_fill_the_index_together_as_many_are_exact_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_index, "TURNS_FOR_ROOM", 0)  # as if the index was too large to be swept by an addition
    router = state(max_keys=1_000)
    keys = {f"i{at:02}": list(range(50 * at + 1, 50 * at + 51)) for at in range(30)}
    for at, name in enumerate(keys):
        hello(router, name, at)
    asked, live = list(keys), list[int]()
    for now in (1.0, 2.0, 3.0, 4.0):
        for name in asked:
            report(router, SnapshotBegin(0), now, name)
        for first in range(0, 50, 10):
            for name in asked:
                report(router, SnapshotChunk(1, keys[name][first : first + 10]), now, name)
        for name in asked:
            report(router, SnapshotEnd(0, 50, digest_of(1, keys[name])), now, name)
        live.append(sum(record_of(router, name).sync.live for name in keys))
        asked = [effect.instance_id for effect in router.handle(ev.Tick(), now) if isinstance(effect, ev.Resync)]
        # A tick before the snapshots have come does not ask for more than fits with them.
        assert not any(isinstance(effect, ev.Resync) for effect in router.handle(ev.Tick(), now))
    # An instance is asked if there is room for its keys and a quarter more.
    assert live == [0, 16, 19, 19]
    assert not asked
    router.check_invariants()


def test_a_restarted_engine_is_known_by_nothing_of_its_former_life() -> None:
    router = state()
    join(router, "a", 1, KEYS[:2])
    place(router, request("r", prompt=PROMPT))
    join(router, "a", 2, KEYS, incarnation="2")
    assert pending(router) == 200 - 32


def test_answers_of_a_former_incarnation_say_nothing_about_the_next() -> None:
    router = state()
    hello(router, "a", 1, exact_prefix=False)
    answer(router, "first")
    for number in range(5):
        place(router, request(f"r{number}", prompt=PROMPT))
    hello(router, "a", 2, exact_prefix=False, incarnation="2")
    for number in range(5):
        router.handle(ev.Finished(f"r{number}", "FAILED", cached_tokens=0), 1.0)
    assert record_of(router).prediction_audit.failures == 0


def test_credit_counts_from_the_first_token_not_from_the_end() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT))
    router.handle(ev.FirstToken("r"), 0.0)
    router.handle(ev.Finished("r", "OK"), 1.5)
    router.handle(ev.Tick(), PROVISIONAL_S)
    assert seen(router, now=PROVISIONAL_S).cached_tokens == 0


def test_a_gateway_that_counts_less_work_than_was_done_leaves_nothing_pending() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT))
    report(router, Delta(1, 1, added=KEYS[:6]))
    stream = ev.OpenStream(request("r", tokens=200), "a", Phase.PREFILL, 150)
    router.handle(ev.GatewayHello("g", (stream,)), 1.0)
    assert pending(router) == 0
    report(router, Delta(2, 1, added=KEYS[6:9]))
    assert pending(router) == 0
