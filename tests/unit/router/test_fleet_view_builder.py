"""What is kept of instances between decisions, and when it is looked at anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_common.core.key_report_types import Delta
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.instance_registry import CandidateSnapshot
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load import reservations
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import (
    LISTED_PREFILLS,
    Candidate,
    Decision,
    KvRole,
    KvTransfer,
    Load,
    StepKind,
    WrongKv,
)
from pointsman_router.core.prefill_curve import PrefillSums
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import info, join, place, request, state

KEYS = [*range(100, 112)]


def fleet() -> RouterState:
    """Instances a and b, both with fresh reports and the prompt's keys."""
    router = state(stale_report_s=5.0, stale_keys_s=10.0)
    for number, name in enumerate("ab"):
        join(router, name, number, KEYS)
        router.handle(ev.LoadReported(number, name, Load(0.0, running=1)), 0.0)
    return router


def seen(router: RouterState, now: float = 1.0, model: str = "m") -> dict[str, Candidate]:
    decision = router.explain(request("?", tokens=200, keys=tuple(KEYS), model=model), now)
    assert isinstance(decision, Decision)
    router.check_invariants()
    return {candidate.instance_id: candidate for candidate in decision.view.candidates}


def sight(router: RouterState, name: str) -> CandidateSnapshot | None:
    record = router.instances.get(name)
    assert record is not None
    return record.candidate_snapshot


def test_what_has_not_changed_is_not_looked_at_again() -> None:
    router = fleet()
    assert sight(router, "a") is None
    seen(router)
    kept = {name: sight(router, name) for name in "ab"}
    answer = place(router, request("r", tokens=64), 1.0)
    assert isinstance(answer, ev.Placed)
    chosen, other = answer.step.instance_id, "ab".replace(answer.step.instance_id, "")
    assert seen(router)[chosen].num_requests == 1
    assert sight(router, chosen) is not kept[chosen] is not None
    assert sight(router, other) is kept[other] is not None


def placed_on(router: RouterState, name: str) -> None:
    other = "ab".replace(name, "")
    place(router, request("r", tokens=512, keys=tuple(range(32)), exclude=(other,)), 1.0)


CHANGES: dict[str, tuple[Callable[[RouterState], object], str, object]] = {
    "load": (lambda router: router.handle(ev.LoadReported(0, "a", Load(1.0, running=7)), 1.0), "running", 7),
    "unhealthy": (
        lambda router: router.handle(ev.LoadReported(0, "a", Load(1.0, healthy=False)), 1.0),
        "excluded",
        "unhealthy",
    ),
    "suspended": (
        lambda router: router.handle(ev.LoadReported(0, "a", Load(1.0, suspended="paused")), 1.0),
        "excluded",
        "suspended",
    ),
    "drained": (lambda router: router.handle(ev.DrainsChanged({"a": "1"}), 1.0), "excluded", "draining"),
    "cordoned": (
        lambda router: router.handle(ev.OrdersChanged({"a": InstanceOrder(cordoned=True)}), 1.0),
        "excluded",
        "cordoned",
    ),
    "given a weight": (
        lambda router: router.handle(ev.OrdersChanged({"a": InstanceOrder(weight=0.0)}), 1.0),
        "excluded",
        "canary",
    ),
    "lost": (lambda router: router.handle(ev.AgentLost(0, "a"), 1.0), "exact", False),
    "a gap in its keys": (
        lambda router: router.handle(ev.KeysReported(0, "a", Delta(7, 1)), 1.0),
        "cached_tokens",
        0,
    ),
    "evicted keys": (
        lambda router: router.handle(ev.KeysReported(0, "a", Delta(1, 1, [], KEYS[6:])), 1.0),
        "cached_tokens",
        96,
    ),
    "another capacity": (
        lambda router: router.handle(
            ev.AgentHello(9, info("a", kv_capacity_tokens=64), "xxh3-64/16/1", 1, 0),
            1.0,
        ),
        "kv_capacity_tokens",
        64,
    ),
    "placed on": (lambda router: placed_on(router, "a"), "num_requests", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is(change: str) -> None:
    apply, name, expected = CHANGES[change]
    router = fleet()
    before = seen(router)
    assert getattr(before["a"], name) != expected
    apply(router)
    after = seen(router)
    assert getattr(after["a"], name) == expected
    assert getattr(after["b"], name) == getattr(before["b"], name)


def test_progress_moves_and_ends_are_seen() -> None:
    router = fleet()
    placed_on(router, "a")
    assert seen(router)["a"].pending_prefill_tokens == 512
    router.handle(ev.KeysReported(0, "a", Delta(1, 1, [*range(16)])), 1.0)
    assert seen(router)["a"].pending_prefill_tokens == 256
    router.handle(ev.FirstToken("r"), 1.0)
    assert (seen(router)["a"].pending_prefill_tokens, seen(router)["a"].ongoing_decode_tokens) == (0, 512)
    router.handle(ev.Finished("r", "FAILED"), 1.0)
    assert seen(router)["a"].ongoing_tokens == 0


def test_time_alone_changes_what_is_seen_and_not_only_forwards() -> None:
    router = fleet()
    for _ in range(2):
        assert [seen(router, now)["a"].stale for now in (1.0, 5.0, 5.1)] == [False, False, True]
        assert [seen(router, now)["a"].cached_tokens for now in (10.0, 10.1, 1.0)] == [192, 0, 192]


def test_an_instance_that_failed_the_request_is_excluded_for_it_alone() -> None:
    router = fleet()
    answer = place(router, request("r", tokens=64, exclude=("a",)), 1.0)
    assert isinstance(answer, ev.Placed)
    assert {candidate.instance_id: candidate.excluded for candidate in answer.decision.view.candidates} == {
        "a": "failed_before",
        "b": "",
    }
    assert seen(router)["a"].excluded == ""


def test_an_open_request_keeps_of_what_it_was_decided_on_its_own_instances_alone() -> None:
    """All of it would be 250 kB for each open request of 1,000 instances."""
    router = state()
    for number in range(40):
        join(router, f"i{number}", number)
    for number in range(10):
        place(router, request(f"r{number}", tokens=64), 1.0)
    open_ones = list(router.requests.decisions())
    assert len(open_ones) == 10
    for decision in open_ones:
        assert [candidate.instance_id for candidate in decision.view.candidates] == [decision.instance_id]
        assert not decision.result.scores


def test_an_ended_request_is_known_still_and_weighs_little() -> None:
    router = fleet()
    assert isinstance(place(router, request("r", tokens=64, session_id="s"), 1.0), ev.Placed)
    router.handle(ev.Finished("r", "OK"), 2.0)
    assert isinstance(place(router, request("r", tokens=64, session_id="s"), 3.0), ev.Refused)
    [kept] = router.requests.decisions()
    assert (kept.view.candidates, kept.result.scores) == ((), {})


def kv(name: str, role: KvRole) -> KvTransfer:
    own = info(name).kv_transfer
    assert own is not None
    return replace(own, role=role)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_only_produces_kv_answers_nobody(policy: str) -> None:
    """Though it is idle, and has the prompt's keys."""
    router = state(policy)
    join(router, "p", 1, KEYS, kv_transfer=kv("p", KvRole.PRODUCER))
    join(router, "d", 2, kv_transfer=kv("d", KvRole.CONSUMER))
    for number in range(6):
        asked = request(f"r{number}", tokens=50_000, keys=tuple(KEYS), session_id="s")
        for effect in router.handle(ev.PlaceRequested(asked, "g"), 1.0):
            if isinstance(effect, ev.Placed):
                serving = [step for step in effect.decision.result.steps if step.kind is StepKind.SERVE]
                assert {step.instance_id for step in serving} <= {"d"}
    assert len(router.reservations)
    router.check_invariants()


def test_where_all_only_produce_kv_they_answer() -> None:
    router = state()
    join(router, "p", 1, kv_transfer=kv("p", KvRole.PRODUCER))
    answer = place(router, request("r", tokens=100), 1.0)
    assert isinstance(answer, ev.Placed)
    assert answer.step.instance_id == "p"


def test_a_request_waits_for_an_engine_that_answers() -> None:
    router = state(limits=SaturationLimits(1))
    join(router, "p", 1, kv_transfer=kv("p", KvRole.PRODUCER))
    join(router, "d", 2, kv_transfer=kv("d", KvRole.CONSUMER))
    place(router, request("first", tokens=100), 1.0)
    assert router.handle(ev.PlaceRequested(request("second", tokens=100), "g"), 1.0) == []
    [placed] = [effect for effect in router.handle(ev.Finished("first", "OK"), 2.0) if isinstance(effect, ev.Placed)]
    assert (placed.request_id, placed.step.instance_id) == ("second", "d")


def slice_on(name: str, request_id: str, prefix: int, computed: int = 0) -> Reservation:
    return Reservation(request_id, "g", name, "d", 1_000, prefix, prefilled_tokens=computed, pool="m")


@given(
    st.lists(
        st.tuples(st.sampled_from("pmfr"), st.integers(0, 7), st.sampled_from((16, 160, 1_000)), st.integers(0, 200)),
        max_size=30,
    )
)
def test_some_of_the_open_prefills_are_listed_and_all_are_counted(events: list[tuple[str, int, int, int]]) -> None:
    open_ = Reservations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reservations, "LISTED_PREFILLS", 3)
        for kind, number, prefix, computed in events:
            name = f"r{number}"
            if kind == "p":
                open_.put(slice_on("ab"[number % 3 % 2], name, prefix))
            elif kind == "m":
                open_.prefilled(name, computed)
            elif kind == "f":
                open_.first_token(name, 1.0)
            else:
                open_.release(name)
            open_.check_invariants()
            for instance_id in "ab":
                prefills = open_.open_prefills(instance_id)
                left = [
                    (prefill.pending_tokens, prefill.prefilled_tokens) for prefill in prefills if prefill.pending_tokens
                ]
                rests = [(prefill.request_id, 1_000 - prefill.new_tokens, prefill.new_tokens) for prefill in prefills]
                rests = [rest for rest in rests if rest[1]]
                assert open_.num_prefills(instance_id) == len(prefills)
                assert open_.queue(instance_id) == (tuple(left[:3]), sums_of(left[3:]))
                assert open_.remainders(instance_id) == (tuple(rests[-3:]), sums_of([rest[1:] for rest in rests[:-3]]))


def sums_of(prefills: list[tuple[int, int]]) -> PrefillSums:
    tokens = sum(left for left, _ in prefills)
    return PrefillSums(len(prefills), tokens, sum(left * (2 * there + left) for left, there in prefills))


def test_a_request_finds_its_own_remainder_listed_among_however_many() -> None:
    router = fleet()
    for number in range(LISTED_PREFILLS + 2):
        router.reservations.put(slice_on("a", f"r{number}", 16 * (number + 1)))
    for number, others in ((0, 1), (1, 1), (2, 2)):
        view = router.views.view(request(f"r{number}", tokens=1_000), "m", 0, 1.0)
        found = view.find("a")
        assert found is not None
        backlog = found.prefill_backlog
        assert f"r{number}" in [who for who, *_ in backlog.remainders]
        assert backlog.unlisted_remainders.prefills == others
        assert len(backlog.remainders) + others == LISTED_PREFILLS + 2
        listed = sums_of([(left, there) for _, left, there in backlog.remainders])
        everything = sums_of([(1_000 - 16 * n, 16 * n) for n in range(1, LISTED_PREFILLS + 3)])
        assert listed.tokens + backlog.unlisted_remainders.tokens == everything.tokens
        assert listed.pairs + backlog.unlisted_remainders.pairs == everything.pairs
    # A request whose slice is on another instance, and a request without a slice.
    router.reservations.put(slice_on("b", "other", 16))
    for name in ("other", "new"):
        found = router.views.view(request(name, tokens=1_000), "m", 0, 1.0).find("a")
        assert found is not None
        assert found.prefill_backlog.unlisted_remainders.prefills == 2
    router.views.check_invariants()


def test_views_share_what_they_tell_of_a_prefill_that_does_not_move() -> None:
    router = fleet()
    queues = []
    for number in range(3):
        router.reservations.put(slice_on("a", f"r{number}", 160))
        found = router.views.view(request("new", tokens=1_000), "m", 0, 1.0).find("a")
        assert found is not None
        queues.append(found.prefill_backlog.queue)
    assert [id(entry) for entry in queues[2][:2]] == [id(entry) for entry in queues[1]]


def described(name: str, engine_id: str, *wrong: WrongKv) -> KvTransfer:
    return KvTransfer("MOONCAKE", f"http://{name}:8998", wrong_from=wrong, engine_id=engine_id)


def senders(router: RouterState, receiver: str, now: float) -> set[str]:
    candidates = seen(router, now)
    return {name for name, candidate in candidates.items() if candidate.can_give_kv_to(candidates[receiver])}


def test_kv_passes_between_engines_of_one_version() -> None:
    """NIXL refuses any other version, and Mooncake's messages change between minor ones."""
    router = fleet()
    for number, (name, version) in enumerate({"a": "0.32.0", "b": "0.32.1+cpu", "c": "0.22.1"}.items()):
        join(router, name, number, KEYS, kv_transfer=described(name, name), engine_version=version)
    assert senders(router, "b", 1.0) == {"a"}
    for number, (name, version) in enumerate({"a": "0.32.0", "b": "0.32.1", "c": "0.32.1"}.items()):
        join(router, name, number, KEYS, 2.0, kv_transfer=KvTransfer("NIXL"), engine_version=version)
    assert senders(router, "b", 2.1) == {"c"}


def test_an_engine_that_sent_wrong_kv_sends_no_more_as_long_as_it_runs() -> None:
    router = fleet()
    join(router, "a", 0, KEYS, kv_transfer=described("a", "a1"))
    join(router, "c", 2, KEYS, kv_transfer=described("c", "c1"))
    assert senders(router, "b", 1.0) == {"a", "c"}
    wrong = WrongKv("http://a:8998", "a1", 1)
    join(router, "b", 1, KEYS, kv_transfer=described("b", "b1", wrong))
    assert senders(router, "b", 1.1) == {"c"}
    assert senders(router, "c", 1.1) == {"a", "b"}, "the pair alone is refused"
    assert senders(router, "a", 1.1) == {"b", "c"}, "in one direction"
    join(router, "a", 0, KEYS, 1.2, incarnation="1-other", kv_transfer=described("a", "a1"))
    assert senders(router, "b", 1.3) == {"c"}, "a new incarnation of the same process is still refused"
    join(router, "a", 0, KEYS, 1.4, incarnation="2", kv_transfer=described("a", "a2"))
    assert senders(router, "b", 1.5) == {"a", "c"}, "a restarted engine may be mended"
    join(router, "b", 1, KEYS, 1.6, kv_transfer=described("b", "b1", wrong, WrongKv("http://a:8998", "a2", 1)))
    assert senders(router, "b", 1.7) == {"c"}, "it is not"
    join(router, "b", 1, KEYS, 1.8, incarnation="2", kv_transfer=described("b", "b2"))
    assert senders(router, "b", 1.9) == {"a", "c"}, "a restarted receiver asks again"


def test_a_restart_ends_a_refusal_however_the_router_learns_of_it() -> None:
    wrong = described("b", "b1", WrongKv("http://a:8998", "a1", 1))
    router = fleet()
    join(router, "a", 0, KEYS, kv_transfer=described("a", "a1"))
    join(router, "b", 1, KEYS, kv_transfer=wrong)
    assert senders(router, "b", 1.1) == set()
    router.handle(ev.AgentGoodbye(0, "a"), 1.2)
    join(router, "a", 7, KEYS, 1.3, incarnation="1-other", kv_transfer=described("a", "a1"))
    assert senders(router, "b", 1.4) == set(), "only its agent was restarted"
    router.handle(ev.AgentGoodbye(7, "a"), 1.5)
    join(router, "a", 8, KEYS, 1.6, incarnation="2", kv_transfer=described("a", "a2"))
    assert senders(router, "b", 1.7) == {"a"}
    for engine_id, expected in (("a1", set()), ("a2", {"a"})):
        # A router that was restarted knows what agents say, in any order.
        for order in ("ab", "ba"):
            router = state(stale_report_s=5.0, stale_keys_s=10.0)
            for number, name in enumerate(order):
                support = wrong if name == "b" else described("a", engine_id)
                join(router, name, number, KEYS, kv_transfer=support)
            assert senders(router, "b", 1.0) == expected


def test_of_data_parallel_ranks_with_one_bootstrap_server_the_wrong_one_is_refused() -> None:
    router = fleet()
    for rank, name in enumerate("ac"):
        join(router, name, 2 + rank, KEYS, data_parallel_rank=rank, kv_transfer=described("p", f"p_dp{rank}"))
    join(router, "b", 1, KEYS, kv_transfer=described("b", "b1", WrongKv("http://p:8998", "p_dp1", 1)))
    assert senders(router, "b", 1.0) == {"a"}


@pytest.mark.parametrize(("reported_id", "own"), [("a1", ""), ("", "a1"), ("", "")])
def test_without_an_engine_id_every_engine_at_the_url_is_refused(reported_id: str, own: str) -> None:
    router = fleet()
    join(router, "a", 0, KEYS, kv_transfer=described("a", own))
    join(router, "c", 2, KEYS, kv_transfer=described("c", own and "c1"))
    join(router, "b", 1, KEYS, kv_transfer=described("b", "b1", WrongKv("http://a:8998", reported_id, 1)))
    assert senders(router, "b", 1.0) == {"c"}
