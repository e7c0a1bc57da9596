"""Tests of who may wait and who gives up a place for it: shares of tenants and classes in places and keys, leaving in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from pointsman_router.core.priority import PRIORITIES, Priority
from pointsman_router.core.requests.hold_queue import HeldRequest, QueueSettings
from pointsman_router.core.requests.shares import Shares
from pointsman_router.core.requests.waiting_room import WaitingRoom
from tests.support.router_values import request

BATCH, STANDARD, INTERACTIVE = PRIORITIES


def waits(
    name: str,
    priority: Priority = STANDARD,
    tenant: str = "",
    *,
    keys: int = 0,
    weight: float = 1.0,
    new: int = 100,
    **changes: Any,
) -> HeldRequest:
    asked = request(name, tokens=new, tenant=tenant, priority=priority, weight=weight, keys=tuple(range(keys)))
    values: dict[str, Any] = {"gateway_id": "g", "pool": "m", "since": 0.0, "answer_by": 30.0, "for_room": True}
    return HeldRequest(asked, reason="saturated", new_tokens=new, **{**values, **changes})


def room(size: int = 4, tenant_share: float = 1.0, *, keys: int = 1_000, **changes: Any) -> WaitingRoom:
    return WaitingRoom(QueueSettings(size=size, tenant_share=tenant_share, **changes), QueueSettings(size=size), keys)


def enter(made: WaitingRoom, *waiting: HeldRequest) -> list[str] | str:
    """Let the requests wait, each in the place of those that it displaces; return these, or why the last one may not wait."""
    left: list[str] = []
    for held in waiting:
        displaced, why_not = made.displaced_by(held)
        if why_not:
            assert not displaced
            return why_not
        for gone in displaced:
            assert made.remove(gone.request.request_id) is gone
            left.append(gone.request.request_id)
        made.enter(held)
        made.check_invariants()
    return left


def test_a_tenant_may_have_all_places_until_another_one_wants_some() -> None:
    made = room(4, tenant_share=0.5)
    assert enter(made, *(waits(f"a{number}", tenant="a", new=number) for number in range(4))) == []
    assert enter(made, waits("a4", tenant="a")) == "4 requests wait already"
    assert enter(made, waits("b0", tenant="b")) == ["a3"]
    assert enter(made, waits("b1", tenant="b")) == ["a2"]
    assert enter(made, waits("b2", tenant="b")) == "4 requests wait already"
    # A third tenant takes from one that has more than it would have.
    assert enter(made, waits("c0", tenant="c")) in (["a1"], ["b1"])
    assert enter(made, waits("n0", tenant="a", pool="n")) == []
    assert enter(room(0), waits("x")) == "no queue"


def test_a_lower_class_of_one_tenant_does_not_lock_out_a_higher_class_of_another() -> None:
    made = room(10, tenant_share=0.25)
    enter(made, *(waits(f"b{number}", BATCH, "b") for number in range(10)))
    entered = [enter(made, waits(f"i{number}", INTERACTIVE, "i")) for number in range(10)]
    assert all(isinstance(left, list) and left[0].startswith("b") for left in entered[:5])
    assert Counter(held.request.priority for held in made) == {INTERACTIVE: 5, BATCH: 5}
    assert entered[5:] == ["10 requests wait already"] * 5
    # Of one tenant, the higher class has all but a tenth of its share.
    made = room(10)
    enter(made, *(waits(f"b{number}", BATCH, "t") for number in range(10)))
    for number in range(10):
        enter(made, waits(f"i{number}", INTERACTIVE, "t"))
    assert Counter(held.request.priority for held in made) == {INTERACTIVE: 9, BATCH: 1}


def test_the_tenant_with_most_for_its_weight_gives_up_the_place() -> None:
    made = room(4)
    for name, tenant, weight in (("a0", "a", 2.0), ("a1", "a", 2.0), ("b0", "b", 1.0), ("b1", "b", 1.0)):
        enter(made, waits(name, BATCH, tenant, weight=weight))
    assert enter(made, waits("i", INTERACTIVE, "a", weight=2.0)) == ["b1"]


def test_a_tenant_beyond_its_share_displaces_its_own_requests_alone() -> None:
    made = room(4, tenant_share=0.5)
    enter(made, waits("a0", STANDARD, "a"), waits("a1", BATCH, "a"), waits("b0", BATCH, "b"), waits("b1", BATCH, "b"))
    assert enter(made, waits("a2", INTERACTIVE, "a")) == ["a1"]
    assert enter(made, waits("a3", STANDARD, "a")) == "4 requests wait already"


def test_what_has_computed_a_part_of_its_prompt_keeps_its_place() -> None:
    made = room(2)
    enter(made, waits("b0", BATCH, new=10), waits("b1", BATCH, new=5_000, previous_id="d1"))
    assert enter(made, waits("s0", STANDARD)) == ["b0"]
    enter(made, waits("i0", INTERACTIVE))
    assert made.get("b1") is not None


def test_keys_are_shared_by_tenants_and_by_both_stages() -> None:
    made = room(100, keys=1_000)
    enter(made, *(waits(f"a{number}", tenant="a", keys=100, new=number, parked=True) for number in range(10)))
    assert enter(made, waits("a10", tenant="a", keys=1, parked=True)).startswith("the prompts that wait")  # type: ignore[union-attr]
    # The last ones of the order leave, as many as are needed.
    assert enter(made, waits("b0", tenant="b", keys=250)) == ["a9", "a8", "a7"]
    assert enter(made, waits("b1", INTERACTIVE, tenant="b", keys=1_000)) != []
    assert enter(made, waits("none", tenant="b")) == []


def test_a_class_that_gives_up_memory_costs_no_look_at_all_its_tenants() -> None:
    made = room(3_000, keys=2_000)
    enter_at_once = [waits(f"b{number}", BATCH, f"t{number}", keys=1) for number in range(2_000)]
    for held in enter_at_once:
        made.enter(held)
    looked_at: list[str] = []
    last = made.held.last
    made.held.last = lambda pool, level, party: looked_at.append(party) or last(pool, level, party)  # type: ignore[method-assign, func-returns-value]
    displaced, why_not = made.displaced_by(waits("i", INTERACTIVE, "i", keys=1))
    assert (len(displaced), why_not, len(looked_at)) == (1, "", 1)


def test_requests_leave_in_parts_and_one_whose_gateway_asks_again_stays() -> None:
    made = room(100)
    enter(made, *(waits(f"r{number}") for number in range(10)), waits("other", gateway_id="h"))
    made.drop_gateway("g", keep={"r3"})
    assert made.leaves("m")
    made.stays("r5")
    first = made.next_to_leave(4)
    assert [(held.request.request_id, why) for held, why in first] == [("r0", ""), ("r1", ""), ("r2", ""), ("r4", "")]
    made.drop_pool("m", "lost")
    for held, _ in first:
        made.remove(held.request.request_id)
    assert {why for _, why in made.next_to_leave(100)} == {"lost"}
    made.stays("r7")
    assert len(made.next_to_leave(100)) == 7, "those that are to be answered leave, whoever asks again"
    for held, _ in made.next_to_leave(100):
        made.remove(held.request.request_id)
        made.check_invariants()
    assert not made.leaving
    assert not made.leaves("m")


PLACES, KEYS = 9, 60


class RoomMachine(RuleBasedStateMachine):
    """A room under any order of arrivals, answers and ends, whose limits hold always. Whoever is displaced had more than a share
    of something that the arrival wanted, or was of a lower class. Nobody who is within every share of his tenant and class is
    refused while somebody has more than a share."""

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom(
            QueueSettings(size=PLACES, tenant_share=0.4, lower_class_share=0.25),
            QueueSettings(size=PLACES, tenant_share=0.4, lower_class_share=0.25),
            KEYS,
        )
        self.count = 0

    def of(self, waiting: Sequence[HeldRequest], tenant: str) -> int:
        return sum(held.request.tenant == tenant for held in waiting)

    @rule(
        priority=st.sampled_from(PRIORITIES),
        tenant=st.sampled_from("abc"),
        new=st.integers(0, 9_000),
        keys=st.integers(0, 12),
        between=st.booleans(),
        parked=st.booleans(),
    )
    def arrive(self, priority: Priority, tenant: str, new: int, keys: int, between: bool, parked: bool) -> None:
        self.count += 1
        held = waits(
            f"r{self.count}",
            priority,
            tenant,
            new=new,
            keys=keys,
            previous_id="d" * (between and not parked),
            parked=parked,
        )
        queue = self.room.parked if parked else self.room.held
        here = list(queue)
        full, used = len(here) >= PLACES, sum(len(other.request.keys) for other in self.room)
        displaced, why_not = self.room.displaced_by(held)
        if why_not:
            assert not displaced
            assert full or used + keys > KEYS
            within = self.of(here, tenant) + 1 <= int(0.4 * PLACES) and used + keys <= KEYS
            if within and not any(other.previous_id for other in here):
                assert max(Counter(other.request.tenant for other in here).values()) <= int(0.4 * PLACES)
            return
        assert bool(displaced) == (full or used + keys > KEYS)
        assert len({gone.request.request_id for gone in displaced}) == len(displaced)
        for gone in displaced:
            assert not gone.previous_id
            assert self.room.remove(gone.request.request_id) is gone
        self.room.enter(held)

    @precondition(lambda self: len(self.room) > 0)
    @rule(place=st.integers(0, 18), new=st.integers(0, 9_000), how=st.sampled_from(["serve", "end", "judge", "leave"]))
    def change(self, place: int, new: int, how: str) -> None:
        waiting = list(self.room)
        held = waiting[min(place, len(waiting) - 1)]
        if how == "serve":
            self.room.served(held.request.request_id, new)
        elif how == "end":
            assert self.room.remove(held.request.request_id) == held
        elif how == "leave":
            self.room.leave_soon([held.request.request_id])
        else:
            self.room.change(replace(held, new_tokens=new, for_room=bool(new % 2)))

    @invariant()
    def consistent(self) -> None:
        self.room.check_invariants()


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_two_arrivals_never_displace_each_other_in_turn() -> None:
    shares: Shares[str] = Shares(5, 1.0, 0.0)
    shares.add(1, "a", 3)
    shares.add(1, "b", 2)
    assert shares.givers(1, "b", 1) is None
    assert shares.givers(1, "a", 1) is None
    shares.check_invariants()
