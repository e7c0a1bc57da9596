"""What operators order for an instance by its id: a cordon, and a share of the new sessions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_orders import (
    MAX_LIFTED,
    MAX_ORDERS,
    InstanceOrder,
    InvalidOrder,
    OrderChange,
    TooManyOrders,
    changed_orders,
    check_change,
)
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.instances.session_shares import SessionShares
from pointsman_router.core.placement_types import Decision, InstanceState, KvRole, KvTransfer, Load, StepKind
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import hello, info, join, place, request, state

CORDONED = InstanceOrder(cordoned=True)


def fleet(count: int, policy: str = "unified", **settings: Any) -> RouterState:
    router = state(policy, **settings)
    for number in range(count):
        join(router, f"i{number}", number)
    return router


def order(router: RouterState, now: float = 0.0, /, **orders: InstanceOrder) -> list[ev.Effect]:
    return router.handle(ev.OrdersChanged(orders), now)


def weights(**weights: float) -> dict[str, InstanceOrder]:
    return {name: InstanceOrder(weight=weight) for name, weight in weights.items()}


def would(router: RouterState, name: str = "asked", **asked: Any) -> Decision:
    decision = router.explain(request(name, **asked), 0.0)
    assert isinstance(decision, Decision)
    return decision


def placed(router: RouterState, name: str, now: float = 0.0, **asked: Any) -> Decision:
    answer = place(router, request(name, **asked), now)
    assert isinstance(answer, ev.Placed), answer
    return answer.decision


def excluded(decision: Decision) -> dict[str, str]:
    return {candidate.instance_id: candidate.excluded for candidate in decision.view.candidates}


# ---- orders ----


def test_a_cordon_and_a_weight_are_changed_apart_and_have_reasons_of_their_own() -> None:
    orders = changed_orders({}, OrderChange("a", 1.0, weight=0.1, reason="canary"))
    orders = changed_orders(orders, OrderChange("a", 2.0, cordoned=True, reason="a new disk"))
    assert orders == {"a": InstanceOrder(True, 0.1, "a new disk", "canary", 2.0, 1.0)}
    orders = changed_orders(orders, OrderChange("a", 3.0, cordoned=True))
    orders = changed_orders(orders, OrderChange("a", 4.0, weight=0.2))
    assert orders == {"a": InstanceOrder(True, 0.2, "a new disk", "canary", 3.0, 4.0)}, "each keeps its reason"
    orders = changed_orders(orders, OrderChange("a", 5.0, cordoned=False))
    assert orders == {"a": InstanceOrder(False, 0.2, "", "canary", 5.0, 4.0)}
    orders = changed_orders(orders, OrderChange("a", 6.0, weight=1.0))
    assert orders == {"a": InstanceOrder(cordon_set_at=5.0, weight_set_at=6.0)}
    assert not orders["a"].in_force


def test_a_change_is_later_than_what_it_replaces_whatever_the_clocks_say() -> None:
    ahead = changed_orders({}, OrderChange("a", 1e9, cordoned=True))
    assert changed_orders(ahead, OrderChange("a", 5.0, cordoned=False))["a"].cordon_set_at > 1e9


def test_orders_are_bounded() -> None:
    full = {str(number): CORDONED for number in range(MAX_ORDERS)}
    with pytest.raises(TooManyOrders):
        changed_orders(full, OrderChange("one more", 1.0, cordoned=True))
    assert len(changed_orders(full, OrderChange("7", 1.0, weight=0.0))) == MAX_ORDERS
    less = changed_orders(full, OrderChange("7", 1.0, cordoned=False))
    assert changed_orders(less, OrderChange("one more", 2.0, cordoned=True))["one more"].cordoned
    for number in range(MAX_LIFTED + 5):
        less = changed_orders(less, OrderChange(f"lifted{number}", 3.0 + number, cordoned=False))
    assert len(less) == MAX_ORDERS - 1 + MAX_LIFTED, "of those that are lifted the oldest are forgotten"
    assert f"lifted{MAX_LIFTED + 4}" in less


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (OrderChange("", 0.0, cordoned=True), "instance_id"),
        (OrderChange("a" * 257, 0.0, cordoned=True), "instance_id"),
        (OrderChange("a", 0.0, reason="why"), "cordoned"),
        (OrderChange("a", 0.0, weight=math.nan), "weight"),
        (OrderChange("a", 0.0, weight=-0.1), "weight"),
        (OrderChange("a", 0.0, weight=1.1), "weight"),
        (OrderChange("a", 0.0, weight=math.inf), "weight"),
        (OrderChange("a", 0.0, cordoned=True, reason="a" * 301), "reason"),
    ],
)
def test_what_no_order_can_have_is_refused(change: OrderChange, field: str) -> None:
    with pytest.raises(InvalidOrder) as refused:
        check_change(change)
    assert refused.value.field == field


# ---- cordons ----


def test_a_cordon_keeps_new_work_away_over_restarts_of_the_engine_until_it_is_lifted() -> None:
    router = fleet(2)
    assert placed(router, "r", session_id="s", exclude=("i1",)).instance_id == "i0"
    assert order(router, i0=CORDONED) == [ev.FleetChanged()]
    assert order(router, i0=CORDONED) == []
    decision = placed(router, "r2", session_id="s")
    assert (decision.instance_id, excluded(decision)["i0"]) == ("i1", "cordoned")
    assert decision.notes == ("owner_cordoned",)
    assert [*router.instances.pools()[0].instances] == ["i1"], "as gateways are told"
    hello(router, "i0", 7, incarnation="2")
    record = router.instances.get("i0")
    assert record is not None
    assert record.state is InstanceState.CORDONED
    router.handle(ev.AgentGoodbye(7, "i0"), 0.0)
    join(router, "i0", 8, incarnation="3")
    assert excluded(would(router))["i0"] == "cordoned"
    order(router)
    assert excluded(would(router)) == {"i0": "", "i1": ""}
    router.check_invariants()


def test_a_cordon_does_not_hide_what_the_engine_is() -> None:
    router = fleet(2)
    router.handle(ev.LoadReported(0, "i0", Load(0.0, healthy=False)), 0.0)
    order(router, i0=CORDONED, i1=CORDONED)
    seen = [(record.state.value, record.underlying_state.value) for record in router.instances.records()]
    assert seen == [("CORDONED", "UNHEALTHY"), ("CORDONED", "READY")]


def test_an_order_for_an_id_that_is_not_known_waits_for_it() -> None:
    router = fleet(1)
    assert order(router, late=CORDONED) == []
    join(router, "late", 9)
    assert excluded(would(router)) == {"i0": "", "late": "cordoned"}


def test_all_cordoned_is_as_all_draining() -> None:
    answers = []
    for event in (ev.OrdersChanged({"i0": CORDONED, "i1": CORDONED}), ev.DrainsChanged({"i0": "1", "i1": "1"})):
        router = fleet(2)
        router.handle(event, 0.0)
        answers.append((place(router, request("r")), router.instances.pools()[0].instances))
    assert answers[0] == answers[1]
    assert isinstance(answers[0][0], ev.Refused)


def test_a_cordoned_instance_takes_no_prefill_for_another() -> None:
    router = fleet(3, "adaptive_offload")
    made = placed(router, "r", tokens=40_000)
    assert [step.kind for step in made.result.steps] == [StepKind.PREFILL, StepKind.SERVE]
    order(router, i0=CORDONED)
    for number in range(8):
        steps = placed(router, f"r{number}", tokens=40_000).result.steps
        assert "i0" not in {step.instance_id for step in steps}


def test_a_held_request_goes_where_a_cordon_is_lifted() -> None:
    router = fleet(2, limits=SaturationLimits(max_requests=1))
    order(router, i0=CORDONED)
    assert placed(router, "r").instance_id == "i1"
    assert router.handle(ev.PlaceRequested(request("waits"), "g"), 0.0) == []
    effects = order(router, 1.0)
    [answer] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (answer.request_id, answer.step.instance_id) == ("waits", "i0")


def test_the_shortlist_of_a_large_pool_is_of_those_that_are_left() -> None:
    router = fleet(300)
    order(router, **{f"i{number}": CORDONED for number in range(250)})
    left = {f"i{number}" for number in range(250, 300)}
    used = set()
    for number in range(50):
        decision = placed(router, f"r{number}", tokens=100)
        assert {candidate.instance_id for candidate in decision.view.candidates} <= left
        used.add(decision.instance_id)
    assert used == left
    router.check_invariants()


# ---- weights ----


@pytest.mark.parametrize(
    ("policy", "weight", "sessions"),
    [("unified", 0.1, 10_000), ("unified", 0.0, 500), ("round_robin", 0.5, 500), ("foresight", 0.5, 500)],
)
def test_a_weighted_instance_gets_its_part_of_its_fair_share(policy: str, weight: float, sessions: int) -> None:
    """Whatever the policy, and also where it is idle and the others are not."""
    router = fleet(10, policy)
    names = [f"i{number}" for number in range(10)]
    order(router, **weights(i3=weight))
    for name in names:
        if name != "i3":
            placed(router, f"busy-{name}", tokens=50, exclude=tuple(other for other in names if other != name))
    found = Counter(would(router, "r", session_id=f"s{number}").instance_id for number in range(sessions))
    assert found["i3"] == pytest.approx(sessions * weight / 10, rel=0.3)


def test_shares_are_exact_over_many_sessions_and_do_not_overlap() -> None:
    members = [(f"i{number}", 0.2 * number if number < 4 else 1.0, False) for number in range(10)]
    shares = SessionShares(members)
    drawn = Counter(name for number in range(50_000) for name in shares.drawn("m", f"t/s{number}"))
    for name, weight in (("i1", 0.2), ("i2", 0.4), ("i3", 0.6)):
        assert drawn[name] == pytest.approx(50_000 * weight / 10, rel=0.06)
    assert set(drawn) == {"i1", "i2", "i3"}
    assert [shares.drawn("m", f"t/s{number}") for number in range(50)] == [
        SessionShares(members).drawn("m", f"t/s{number}") for number in range(50)
    ]
    both = sum(bool(shares.drawn("m", f"s{number}") and shares.drawn("n", f"s{number}")) for number in range(10_000))
    assert both == pytest.approx(10_000 * 0.12**2, rel=0.3), "the draws of two pools are independent"


def test_the_same_session_and_seed_give_the_same_and_nothing_but_new_sessions_counts() -> None:
    first, second = fleet(10), fleet(10)
    for router in (first, second):
        order(router, **weights(i3=0.4, i7=0.2))
    for number in range(200):
        asked: dict[str, Any] = {"session_id": f"s{number % 60}", "tokens": 10 * number}
        one, other = placed(first, f"r{number}", **asked), placed(second, f"r{number}", **asked)
        assert one == other
        assert first.what_if(one, first.policy).result == one.result
        for router in (first, second):
            router.handle(ev.Finished(f"r{number}", "OK"), 0.0)
    for number in range(60):
        owner = first.affinity.owner("m", f"/s{number}", 0.0)
        again = would(first, "again", session_id=f"s{number}")
        assert excluded(again)[owner or ""] == ""
        withheld = {name for name, why in excluded(again).items() if why == "canary"}
        assert withheld == {"i3", "i7"} - {owner}


def test_a_session_stays_on_an_instance_that_takes_no_new_ones() -> None:
    router = fleet(2)
    assert placed(router, "r", prompt=list(range(160)), session_id="s", exclude=("i1",)).instance_id == "i0"
    router.handle(ev.FirstToken("r"), 0.0)
    router.handle(ev.Finished("r", "OK", 160, 0, 1), 0.0)
    order(router, **weights(i0=0.0))
    again = placed(router, "r2", prompt=list(range(160)), session_id="s")
    assert (again.instance_id, excluded(again)) == ("i0", {"i0": "", "i1": ""})
    other = placed(router, "r3", prompt=list(range(160)), session_id="t")
    assert (other.instance_id, excluded(other)) == ("i1", {"i0": "canary", "i1": ""})
    nobodys = placed(router, "r4", prompt=list(range(160)))
    assert nobodys.instance_id == "i1", "a request without a session counts as a new one"


def test_a_session_whose_owner_cannot_take_it_is_a_new_one() -> None:
    router = fleet(4)
    order(router, i0=CORDONED, **weights(i1=1 / 3))
    found: Counter[str] = Counter()
    for number in range(900):
        router.handle(ev.SessionsRead("m", {f"/s{number}": "i0"}), 0.0)
        found[would(router, session_id=f"s{number}").instance_id] += 1
    assert found["i1"] == pytest.approx(100, abs=30)
    assert found["i0"] == 0


def test_where_nobody_of_full_weight_is_left_the_others_take_it() -> None:
    router = fleet(3)
    order(router, **weights(i0=0.0, i1=0.3, i2=0.3))
    assert {would(router, f"r{number}").instance_id for number in range(100)} == {"i1", "i2"}
    order(router, **weights(i0=0.0, i1=0.0, i2=0.0))
    assert excluded(would(router)) == {"i0": "", "i1": "", "i2": ""}
    order(router, i1=CORDONED, i2=CORDONED, **weights(i0=0.0))
    assert would(router).instance_id == "i0"


def test_a_weight_has_no_request_wait() -> None:
    router = fleet(2, limits=SaturationLimits(max_requests=1))
    order(router, **weights(i0=0.0))
    assert placed(router, "r").instance_id == "i1"
    assert placed(router, "r2").instance_id == "i0"


def test_of_a_large_pool_a_weighted_instance_gets_its_part_too() -> None:
    router = fleet(100)
    order(router, **weights(**{f"i{number}": 0.0 for number in range(60)}, i60=0.5, i61=0.5))
    found: Counter[str] = Counter()
    for number in range(600):
        decision = would(router, session_id=f"s{number}")
        assert {name for name, why in excluded(decision).items() if not why} <= {f"i{n}" for n in range(60, 100)}
        found[decision.instance_id] += 1
    assert found["i60"] + found["i61"] == pytest.approx(6, abs=5)
    order(router, **weights(**{f"i{number}": 0.0 for number in range(99)}), i99=CORDONED)
    assert not set(excluded(would(router)).values()) & {"canary"}
    router.check_invariants()


def test_those_that_only_prefill_have_shares_of_their_own() -> None:
    router = state("adaptive_offload")
    for number, (name, role) in enumerate(
        [("p0", KvRole.PRODUCER), ("p1", KvRole.PRODUCER), ("d0", KvRole.CONSUMER), ("d1", KvRole.CONSUMER)]
    ):
        join(router, name, number, kv_transfer=KvTransfer("NIXL", role=role))
    order(router, **weights(p0=0.5, d0=0.5))
    pairs: Counter[tuple[str, ...]] = Counter()
    for number in range(400):
        seen = excluded(would(router, session_id=f"s{number}", tokens=40_000))
        pairs[tuple(name for name, why in sorted(seen.items()) if not why)] += 1
    # A quarter of the sessions each, drawn apart from each other.
    assert pairs["d0", "p0"] == pytest.approx(25, abs=15)
    assert pairs["d0", "p1"] == pytest.approx(75, abs=25)
    assert pairs["d1", "p0"] == pytest.approx(75, abs=25)
    assert pairs["d1", "p1"] == pytest.approx(225, abs=35)
    assert sum(pairs.values()) == 400


def test_an_adapters_share_is_among_the_instances_that_have_it() -> None:
    router = state()
    for number in range(10):
        join(router, f"i{number}", number, lora_names=("adapter",) if number < 2 else ())
    order(router, **weights(i0=0.5))
    found = Counter(would(router, session_id=f"s{number}", model="adapter").instance_id for number in range(1_000))
    assert found["i0"] == pytest.approx(250, abs=60)


def test_a_pool_without_orders_is_asked_nothing() -> None:
    router = fleet(3)
    assert router.instances.shares("m", "m") is None
    order(router, elsewhere=InstanceOrder(weight=0.5), i0=CORDONED)
    assert router.instances.shares("m", "m") is None
    router.instances.add(info("elsewhere", model="other"), 9, 0.0)
    assert router.instances.shares("m", "m") is None
    assert router.instances.shares("other", "other") is not None


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 8),
    st.integers(0, 100),
)
def test_somebody_is_always_admitted(members: list[tuple[float, bool, bool]], owner: int, session: int) -> None:
    router = state()
    for number, (_, _, drains) in enumerate(members):
        join(router, f"i{number}", number, incarnation="2" if drains else "1")
    router.handle(ev.DrainsChanged({f"i{number}": "2" for number in range(len(members))}), 0.0)
    order(
        router,
        **{f"i{number}": InstanceOrder(cordoned, weight) for number, (weight, cordoned, _) in enumerate(members)},
    )
    router.handle(ev.SessionsRead("m", {f"/s{session}": f"i{owner}"}), 0.0)
    placeable = {f"i{n}" for n, (_, cordoned, drains) in enumerate(members) if not cordoned and not drains}
    answer = router.explain(request("r", session_id=f"s{session}"), 0.0)
    if not placeable:
        assert isinstance(answer, ev.Refused)
        return
    assert isinstance(answer, Decision)
    admitted = {name for name, why in excluded(answer).items() if not why}
    assert admitted
    assert admitted <= placeable
    if f"i{owner}" in placeable:
        assert f"i{owner}" in admitted
    router.check_invariants()
