"""WaitingForOwner: a pool without an owner has one clock, and its requests are asked again, placed at a pace, or refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman_gateway.core.request.local_pace import (
    BURST_UNITS,
    FAILURES,
    MAX_WAITING,
    UNIT_TOKENS,
    UNITS_PER_S,
    LocalPace,
)
from pointsman_gateway.core.waiting_for_owner import (
    MAX_AT_ONCE,
    RETRY_S,
    ROUND_S,
    Ask,
    End,
    PlaceAt,
    RefuseWaiting,
    WaitingForOwner,
    WaitingRequest,
)

LIMIT_S = 5.0
POOL = "m"
INSTANCES = ("a", "b")


class Pool:
    """A pool in virtual time, whose requests end up in `ends`, each with its time."""

    def __init__(self, instances: tuple[str, ...] = INSTANCES) -> None:
        self.now, self.instances = 100.0, instances
        self.pace = LocalPace()
        self.waiting = WaitingForOwner(self.pace)
        self.ends: list[tuple[float, End]] = []

    def lose(self) -> None:
        self.waiting.disconnected(POOL, self.now, LIMIT_S)

    def find(self, *, changed: bool = False) -> None:
        self.waiting.connected(POOL, self.now, changed=changed)

    def refuse(self, request: WaitingRequest) -> None:
        self.waiting.refused(POOL, self.now, LIMIT_S)
        self.waiting.add(POOL, request)

    def run(self, until: float) -> list[End]:
        """Let time pass; return what happened meanwhile."""
        before = len(self.ends)
        while (at := self.waiting.wake_at(POOL, self.now, LIMIT_S)) is not None and at <= until:
            self.now = max(self.now, at)
            ends = self.waiting.due(self.now, LIMIT_S, lambda _: self.instances)
            self.ends += [(self.now, end) for end in ends]
        self.now = until
        return [end for _, end in self.ends[before:]]


def one(name: str, asked_at: float = 100.0, **fields: object) -> WaitingRequest:
    return WaitingRequest(name, asked_at, **fields)  # type: ignore[arg-type]


def test_all_requests_have_the_pools_clock() -> None:
    """Those that waited at the lost router, and those that come at any time later."""
    pool = Pool()
    pool.lose()
    pool.waiting.add(POOL, one("at the router"))
    assert pool.run(104.0) == []
    pool.waiting.add(POOL, one("later", 104.0))
    assert pool.run(104.9) == []
    assert pool.run(105.0) == [PlaceAt("at the router", "b"), PlaceAt("later", "a")]
    pool.waiting.add(POOL, one("much later", 120.0))
    pool.run(120.0)
    assert [at for at, _ in pool.ends] == pytest.approx([105.0, 105.0, 105.0 + ROUND_S])


def test_a_crowd_is_placed_at_the_pace_of_each_instance() -> None:
    pool = Pool()
    pool.lose()
    for number in range(16_000):
        pool.waiting.add(POOL, one(f"{number:05}", 100.0 + number / 1e6))
    seconds = 3.0
    pool.run(105.0)
    assert len(pool.ends) == 2 * BURST_UNITS
    while pool.now < 105.0 + seconds:
        for _, end in pool.ends[-2 * MAX_WAITING :]:
            if isinstance(end, PlaceAt) and pool.pace.open.get(end.instance_id, 0) > MAX_WAITING // 2:
                pool.pace.began(end.instance_id)
                pool.pace.closed(end.instance_id, began=True)
        pool.run(pool.now + 0.1)
    placed = [end for _, end in pool.ends if isinstance(end, PlaceAt)]
    # The oldest first, and shared by the instances.
    assert [end.request_id for end in placed] == [f"{number:05}" for number in range(len(placed))]
    for name in INSTANCES:
        count = sum(end.instance_id == name for end in placed)
        assert count == pytest.approx(BURST_UNITS + seconds * UNITS_PER_S, abs=UNITS_PER_S / 5)
    # A router that appears is asked for the others at once, in parts. None is placed without it any more.
    pool.now += 1.0
    pool.find()
    ends = pool.waiting.due(pool.now, LIMIT_S, lambda _: INSTANCES)
    assert ends == [Ask(f"{number:05}") for number in range(len(placed), len(placed) + MAX_AT_ONCE)]
    assert len(pool.run(pool.now)) == 16_000 - len(placed) - MAX_AT_ONCE


def test_a_long_prompt_costs_as_much_as_many_short_ones() -> None:
    pool = Pool(("a",))
    pool.lose()
    pool.waiting.add(POOL, one("long", tokens=131_072))
    pool.waiting.add(POOL, one("short"))
    pool.run(110.0)
    # The bucket was overdrawn.
    due = 105.0 + (131_072 / UNIT_TOKENS - BURST_UNITS) / UNITS_PER_S
    assert [at for at, _ in pool.ends] == pytest.approx([105.0, due], abs=2 * ROUND_S)


def test_an_instance_that_answers_none_gets_no_more() -> None:
    pool = Pool(("a",))
    for _ in range(MAX_WAITING - 3):
        pool.pace.opened("a")
    pool.lose()
    for number in range(9):
        pool.waiting.add(POOL, one(str(number)))
    assert len(pool.run(150.0)) == 3
    pool.pace.began("a")
    assert pool.run(151.0) == [PlaceAt("3", "a")]


def test_an_instance_that_fails_comes_last_for_a_while() -> None:
    pool = Pool()
    for _ in range(FAILURES):
        pool.pace.failed("a", 105.0)
    pool.lose()
    for number in range(4):
        pool.waiting.add(POOL, one(str(number)))
    pool.waiting.add(POOL, one("excluded", exclude=("b",)))
    assert [end.instance_id for end in pool.run(105.5) if isinstance(end, PlaceAt)] == ["b"] * 4 + ["a"]
    pool.pace.answered("a")
    assert not pool.pace.fails("a", 105.5)


def test_excluded_instances_are_passed_over_and_the_one_with_the_prefix_is_waited_for() -> None:
    pool = Pool()
    pool.lose()
    for _ in range(MAX_WAITING):
        pool.pace.opened("a")
    pool.waiting.add(POOL, one("all", exclude=("a", "b")))
    pool.waiting.add(POOL, one("only a", 100.1, exclude=("b",)))
    pool.waiting.add(POOL, one("prefix", 100.2, computed_at="a"))
    pool.waiting.add(POOL, one("any", 100.3))
    pool.waiting.add(POOL, one("gone", 100.4, computed_at="c"))
    assert pool.run(106.0) == [
        RefuseWaiting("all", parked=False),
        PlaceAt("any", "b"),
        PlaceAt("gone", "b"),
    ]
    for _ in range(MAX_WAITING):
        pool.pace.began("a")
    assert pool.run(107.0) == [PlaceAt("only a", "a"), PlaceAt("prefix", "a")]


def test_parked_requests_wait_within_their_bounds_and_keep_their_turn() -> None:
    pool = Pool()
    pool.lose()
    pool.waiting.add(POOL, one("short", 90.0, parked_until=103.0))
    pool.waiting.add(POOL, one("long", 95.0, parked_until=130.0))
    assert pool.run(120.0) == [RefuseWaiting("short", parked=True)]
    assert pool.ends[0][0] == 103.0
    for _ in range(MAX_WAITING):
        for name in INSTANCES:
            pool.pace.opened(name)
    pool.waiting.add(POOL, one("new", 119.0))
    pool.find()
    assert pool.run(121.0) == [Ask("long"), Ask("new")]


def test_without_instances_requests_are_refused() -> None:
    pool = Pool(())
    pool.lose()
    pool.waiting.add(POOL, one("r"))
    assert pool.run(105.0) == [RefuseWaiting("r", parked=False)]


def test_a_router_that_does_not_serve_yet_is_asked_by_one_request_at_a_time() -> None:
    pool = Pool()
    requests = {name: one(name, 100.0 + number / 10) for number, name in enumerate("abc")}
    for request in requests.values():
        pool.refuse(request)
    assert pool.run(100.0 + RETRY_S) == [Ask("a")]
    pool.refuse(requests["a"])
    assert pool.run(100.0 + 2 * RETRY_S) == [Ask("a")]
    # Not refused again: it is held there.
    assert pool.run(100.0 + 3 * RETRY_S) == [Ask("b"), Ask("c")]
    assert not pool.waiting.must_wait(POOL)
    pool.refuse(requests["b"])
    # The clock has run on since the first refusal.
    assert pool.waiting.since(POOL) == 100.0
    assert pool.run(100.0 + 4 * RETRY_S) == [Ask("b")]
    assert pool.waiting.must_wait(POOL)
    assert not pool.waiting.served(POOL)
    assert pool.waiting.pools() == []


def test_a_router_that_serves_one_is_asked_for_the_others() -> None:
    pool = Pool()
    for name in "abc":
        pool.refuse(one(name))
    assert pool.run(100.0 + RETRY_S) == [Ask("a")]
    assert pool.waiting.served(POOL)
    assert pool.waiting.must_wait(POOL)
    assert pool.run(100.0 + RETRY_S) == [Ask("b"), Ask("c")]
    assert pool.waiting.pools() == []


def test_a_router_that_refuses_for_longer_than_the_limit_is_done_without() -> None:
    pool = Pool()
    request = one("r")
    pool.refuse(request)
    while pool.now < 100.0 + LIMIT_S + RETRY_S:
        for end in pool.run(pool.now + RETRY_S / 2):
            if isinstance(end, Ask):
                pool.refuse(request)
    assert isinstance(pool.ends[-1][1], PlaceAt)
    assert pool.ends[-1][0] == pytest.approx(100.0 + LIMIT_S, abs=2 * RETRY_S)
    assert len(pool.ends) == pytest.approx(LIMIT_S / RETRY_S, rel=0.2)


def test_a_clock_that_ended_begins_anew() -> None:
    pool = Pool()
    pool.lose()
    pool.run(103.0)
    pool.find()
    pool.run(150.0)
    pool.lose()
    assert pool.waiting.since(POOL) == 150.0
    # Asked, and held there for longer than the limit: that router served the pool.
    pool.waiting.add(POOL, one("r", 150.0))
    pool.find()
    assert pool.run(151.0) == [Ask("r")]
    pool.run(160.0)
    pool.lose()
    assert pool.waiting.since(POOL) == 160.0
    # A router that dies before it has answered anything does not begin it anew.
    pool.waiting.add(POOL, one("r", 150.0))
    pool.find()
    pool.run(161.0)
    pool.lose()
    assert pool.waiting.since(POOL) == 160.0


class Owners(RuleBasedStateMachine):
    """Owners of one pool come, refuse, die and answer; clients come and leave; instances come, go and answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pace = LocalPace()
        self.waiting = WaitingForOwner(self.pace)
        self.up = True  # there is a router to ask
        self.requests: dict[str, WaitingRequest] = {}
        self.at_router: list[str] = []
        self.running: dict[str, str] = {}  # placed without a router, without a first byte -> instance
        self.refused: set[str] = set()
        self.answered: set[str] = set()
        self.gone: set[str] = set()
        self.instances = list(INSTANCES)
        self.placed: dict[str, list[tuple[float, int]]] = {}  # instance -> (time, units) of local placements
        self.refused_once = False  # the present router has said that it does not serve the pool
        self.clock: float | None = None  # the pool's, when its owner died last

    # ---- what happens ----

    @rule(tokens=st.sampled_from([0, 3_000, 140_000]), exclude=st.sampled_from([(), ("a",), ("a", "b", "c")]))
    def comes(self, tokens: int, exclude: tuple[str, ...]) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = WaitingRequest(name, self.now, tokens, exclude)
        if self.waiting.must_wait(POOL):
            self.waiting.add(POOL, self.requests[name])
        else:
            assert self.up, "asked without a router"
            self.at_router.append(name)
        self.work()

    @rule(count=st.integers(10, 80))
    def a_crowd_comes(self, count: int) -> None:
        for _ in range(count):
            self.comes(0, ())

    @precondition(lambda self: self.at_router)
    @rule(at=st.integers(0, 80), bound_s=st.sampled_from([1.0, 30.0]))
    def is_parked(self, at: int, bound_s: float) -> None:
        name = self.at_router[at % len(self.at_router)]
        request = self.requests[name]
        if request.parked_until is None:
            self.requests[name] = WaitingRequest(
                name, request.asked_at, request.tokens, request.exclude, "", self.now + bound_s
            )
        self.serves()

    @precondition(lambda self: self.at_router)
    @rule(at=st.integers(0, 80))
    def is_answered(self, at: int) -> None:
        self.answered.add(self.at_router.pop(at % len(self.at_router)))
        self.serves()

    def serves(self) -> None:
        self.waiting.served(POOL)
        self.refused_once = False
        self.work()

    @precondition(lambda self: self.at_router)
    @rule(at=st.integers(0, 80))
    def is_refused_as_not_serving(self, at: int) -> None:
        name = self.at_router.pop(at % len(self.at_router))
        self.waiting.refused(POOL, self.now, LIMIT_S)
        self.refused_once = True
        self.wait_again(name)
        self.work()

    @precondition(lambda self: self.up)
    @rule()
    def owner_dies(self) -> None:
        self.up = False
        self.waiting.disconnected(POOL, self.now, LIMIT_S)
        self.clock = self.waiting.since(POOL)
        lost, self.at_router = self.at_router, []
        for name in lost:
            self.wait_again(name)
        self.work()

    def wait_again(self, name: str) -> None:
        request = self.requests[name]
        if request.parked_until is not None and request.parked_until <= self.now:
            request = self.requests[name] = WaitingRequest(name, request.asked_at, request.tokens, request.exclude)
        self.waiting.add(POOL, request)

    @rule(changed=st.booleans())
    def owner_comes(self, changed: bool) -> None:
        """`changed`: also while there is one, which then gives the pool to the next, with its requests."""
        self.refused_once = self.refused_once and self.up and not changed
        self.up = True
        self.waiting.connected(POOL, self.now, changed=changed)
        if changed:
            moved, self.at_router = self.at_router, []
            for name in moved:
                self.wait_again(name)
        self.work()

    @precondition(lambda self: any(self.unanswered()))
    @rule(at=st.integers(0, 80))
    def client_leaves(self, at: int) -> None:
        names = self.unanswered()
        name = names[at % len(names)]
        self.waiting.remove(name)
        if name in self.at_router:
            self.at_router.remove(name)
        self.gone.add(name)
        self.work()

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 40))
    def instances_answer(self, count: int) -> None:
        for name in list(self.running)[:count]:
            instance = self.running.pop(name)
            self.pace.began(instance)
            self.pace.closed(instance, began=True)
        self.work()

    @rule(present=st.sampled_from([["a", "b"], ["a"], [], ["a", "b", "c"]]))
    def instances_change(self, present: list[str]) -> None:
        self.instances = present
        self.work()

    @rule(passed=st.sampled_from([0.0, 0.015, 0.1, 1.0, 6.0, 40.0]))
    def time_passes(self, passed: float) -> None:
        until = self.now + passed
        while (at := self.waiting.wake_at(POOL, self.now, LIMIT_S)) is not None and at <= until:
            self.now = max(self.now, at)
            self.work()
        self.now = until
        self.work()

    # ---- what must hold ----

    def work(self) -> None:
        """Carry out what is due, and what that makes due at the same time."""
        for _ in range(100):
            ends = self.waiting.due(self.now, LIMIT_S, lambda _: self.instances)
            for end in ends:
                self.carry_out(end)
            at = self.waiting.wake_at(POOL, self.now, LIMIT_S)
            if at is None or at > self.now:
                return
        raise AssertionError("always something to do, and it is not done")

    def carry_out(self, end: End) -> None:
        name = end.request_id
        assert name not in self.waiting
        assert name in self.requests
        assert name not in self.at_router
        assert name not in self.answered | self.refused | self.gone, "a second end"
        request = self.requests[name]
        match end:
            case Ask():
                assert self.up
                self.at_router.append(name)
            case PlaceAt(_, instance):
                assert request.parked_until is None, "placed past the admission"
                assert not self.up or self.refused_once, "placed in spite of a router"
                assert instance in self.instances
                assert instance not in request.exclude
                since = self.waiting.since(POOL)
                assert since is not None
                assert self.now - since >= LIMIT_S - 1e-9, "before the limit"
                self.answered.add(name)
                self.running[name] = instance
                self.check_pace(instance, request.tokens)
            case RefuseWaiting(_, parked):
                if parked:
                    assert request.parked_until is not None
                    assert request.parked_until <= self.now
                else:
                    assert set(self.instances) <= set(request.exclude)
                self.refused.add(name)

    def check_pace(self, instance: str, tokens: int) -> None:
        assert sum(where == instance for where in self.running.values()) <= MAX_WAITING
        history = self.placed.setdefault(instance, [])
        # What was placed in any time up to now. The bucket had a part of a unit left for this one.
        units = 0
        for at, before in reversed(history):
            units += before
            assert units < BURST_UNITS + (self.now - at) * UNITS_PER_S + 1e-6
        history.append((self.now, max(-(-tokens // UNIT_TOKENS), 1)))

    def unanswered(self) -> list[str]:
        over = self.answered | self.refused | self.gone
        return [name for name in self.requests if name not in over]

    @invariant()
    def nobody_is_forgotten(self) -> None:
        for name in self.unanswered():
            assert (name in self.waiting) + (name in self.at_router) == 1
        assert len(self.waiting) + len(self.at_router) == len(self.unanswered())

    @invariant()
    def nobody_waits_beyond_his_bound(self) -> None:
        for name in self.unanswered():
            bound = self.requests[name].parked_until
            assert name in self.at_router or bound is None or bound > self.now

    @invariant()
    def without_a_router_there_is_one_clock(self) -> None:
        if not self.up:
            assert self.waiting.must_wait(POOL)
            assert self.waiting.since(POOL) == self.clock is not None

    def teardown(self) -> None:
        """No router comes any more: all that waits is placed or refused, as fast as the instances answer."""
        if self.up:
            self.owner_dies()
        self.instances = list(INSTANCES)
        for _ in range(1_000):
            if not self.unanswered():
                return
            self.time_passes(1.0)
            if self.running:
                self.instances_answer(len(self.running))
        raise AssertionError(f"{self.unanswered()[:5]} of {len(self.unanswered())} wait for ever")


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
