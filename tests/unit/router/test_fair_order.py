"""The order of held requests: classes, tenants' shares and ranks, by example, by properties, and under any order of changes."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count, cycle, islice
from types import FrameType
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman_router.core.requests.fair_order import Entry, PoolOrder, QueueKey

BATCH, STANDARD, INTERACTIVE = 0, 1, 2
SHARE = 0.1
BASE, LORA = ("m", ""), ("lora", "")


def entry(name: str, tenant: str = "t", **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "queue_key": BASE,
        "level": STANDARD,
        "rank": 0.0,
        "since": 0.0,
        "cost": 1_000.0,
        "weight": 1.0,
    }
    return Entry(name, tenant, **{**values, **changes})


def added(*entries: Entry, share: float = SHARE) -> PoolOrder:
    order = PoolOrder(share)
    for queued in entries:
        order.add(queued)
    return order


class Backlog:
    """Flows (tenant, class) of waiting requests. Serves requests that are not of a `full` queue, and counts the served work by
    flow."""

    def __init__(self, order: PoolOrder, full: frozenset[QueueKey] = frozenset()) -> None:
        self.order = order
        self.full = full
        self.entries: dict[str, Entry] = {}
        self.served: Counter[tuple[str, int]] = Counter()
        self._numbers = count()

    def arrive(self, tenant: str, level: int, cost: float, weight: float = 1.0, queue_key: QueueKey = BASE) -> str:
        name = f"{tenant}{next(self._numbers)}"
        one = entry(name, tenant, level=level, cost=cost, weight=weight, rank=float(len(name)), queue_key=queue_key)
        self.entries[name] = one
        self.order.add(one)
        return name

    def serve(self) -> Entry:
        one = self.entries.pop(next(iter(self.order.walk(set(self.full)))))
        self.order.serve(one, one.cost)
        self.served[one.tenant, one.level] += int(one.cost)
        return one


def test_higher_classes_go_first_and_a_lower_one_gets_its_share_of_their_work() -> None:
    """Requests of one cost: of each eleven, ten are of the higher class."""
    waiting = [entry(f"b{n}", level=BATCH, rank=n) for n in range(3)]
    waiting += [entry(f"i{n}", level=INTERACTIVE, rank=n) for n in range(25)]
    order = list(added(*waiting).walk())
    assert [place for place, name in enumerate(order) if name[0] == "b"] == [10, 21, 27]


def test_without_a_share_lower_classes_wait_for_all_higher_ones() -> None:
    levels = [BATCH, STANDARD, INTERACTIVE] * 40
    order = added(*(entry(f"{level}-{n}", level=level, rank=n) for n, level in enumerate(levels)), share=0.0)
    assert [name[0] for name in order.walk()] == ["2"] * 40 + ["1"] * 40 + ["0"] * 40


def test_each_lower_class_is_owed_its_share() -> None:
    waiting = [entry(f"i{n}", level=INTERACTIVE, rank=n) for n in range(40)]
    waiting += [entry(f"s{n}", level=STANDARD, rank=n) for n in range(9)]
    waiting += [entry(f"b{n}", level=BATCH, rank=n) for n in range(9)]
    first = Counter(name[0] for name in islice(added(*waiting).walk(), 36))
    assert first == {"i": 30, "s": 3, "b": 3}


def test_tenants_of_a_class_share_by_weight_and_by_cost() -> None:
    waiting = [entry(f"a{n}", "a", rank=n, weight=2.0) for n in range(30)]
    waiting += [entry(f"b{n}", "b", rank=n) for n in range(30)]
    waiting += [entry(f"c{n}", "c", rank=n, cost=4_000.0) for n in range(30)]
    first = Counter(name[0] for name in islice(added(*waiting).walk(), 26))
    assert first == {"a": 16, "b": 8, "c": 2}


def test_of_one_tenant_the_least_rank_goes_first_whatever_the_model() -> None:
    order = added(entry("x", rank=2.0), entry("y", rank=1.0, queue_key=LORA), entry("z", rank=3.0))
    assert list(order.walk()) == ["y", "x", "z"]


def test_lines_that_are_full_are_passed_over_also_when_that_is_found_on_the_way() -> None:
    order = added(
        entry("a0", "a", queue_key=LORA), entry("a1", "a", rank=1.0), entry("b0", "b", queue_key=LORA), entry("b1", "b")
    )
    full: set[QueueKey] = set()
    walked = []
    for name in order.walk(full):
        walked.append(name)
        full.add(LORA)
    assert walked == ["a0", "a1", "b1"]


def test_who_comes_back_does_not_begin_anew() -> None:
    """Tenant b has one request at a time, which costs as much as one of a's: they take turns."""
    backlog = Backlog(PoolOrder(SHARE))
    for _ in range(20):
        backlog.arrive("a", STANDARD, 1_000)
    backlog.arrive("b", STANDARD, 1_000)
    for _ in range(20):
        if backlog.serve().tenant == "b":
            backlog.arrive("b", STANDARD, 1_000)
    assert abs(backlog.served["a", STANDARD] - backlog.served["b", STANDARD]) <= 1_000


def test_who_was_away_has_saved_up_nothing() -> None:
    backlog = Backlog(PoolOrder(SHARE))
    for _ in range(60):
        backlog.arrive("a", STANDARD, 1_000)
    backlog.arrive("b", STANDARD, 1_000)
    for _ in range(40):
        backlog.serve()
    for _ in range(20):
        backlog.arrive("b", STANDARD, 1_000)
    backlog.served.clear()
    for _ in range(10):
        backlog.serve()
    assert backlog.served["b", STANDARD] <= 6_000


@given(
    tenants=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5_000)), min_size=2, max_size=6),
    served=st.integers(1, 300),
)
def test_while_all_wait_shares_are_as_weights(tenants: list[tuple[int, int]], served: int) -> None:
    """Served work by weight differs by one request of each at most, whatever requests cost: the bound of start-time fair
    queueing."""
    backlog = Backlog(PoolOrder(SHARE))
    flows = {f"t{n}-": flow for n, flow in enumerate(tenants)}
    for tenant, (weight, cost) in flows.items():
        for _ in range(2):
            backlog.arrive(tenant, STANDARD, float(cost), float(weight))
    for _ in range(served):
        tenant = backlog.serve().tenant
        weight, cost = flows[tenant]
        backlog.arrive(tenant, STANDARD, float(cost), float(weight))
    for a, (weight_a, cost_a) in flows.items():
        for b, (weight_b, cost_b) in flows.items():
            difference = backlog.served[a, STANDARD] / weight_a - backlog.served[b, STANDARD] / weight_b
            assert difference <= cost_a / weight_a + cost_b / weight_b + 1e-6


@example(share=0.5, first=1, costs=[(INTERACTIVE, 1_000), (STANDARD, 500)], others=0, blocked=[])
@example(share=0.1, first=5_000, costs=[(INTERACTIVE, 1_000)], others=0, blocked=[1])
@given(
    share=st.sampled_from([0.05, 0.1, 0.5]),
    first=st.integers(1, 5_000),
    costs=st.lists(
        st.tuples(st.sampled_from([STANDARD, INTERACTIVE]), st.integers(500, 9_000)), min_size=1, max_size=9
    ),
    others=st.integers(0, 3),
    blocked=st.lists(st.integers(1, 9_000), max_size=3),
)
def test_no_class_starves(
    share: float, first: int, costs: list[tuple[int, int]], others: int, blocked: list[int]
) -> None:
    """The first request of the lowest class that is not blocked waits for at most cost / share tokens of higher classes, and one
    request more, while higher classes always have requests. The same holds for each later request of its tenant, from the
    moment the one before it is served."""
    backlog = Backlog(PoolOrder(share), frozenset({("full", "")}))
    for cost in blocked:
        backlog.arrive("before", BATCH, float(cost), queue_key=("full", ""))
    names = [backlog.arrive("low", BATCH, float(first)) for _ in range(3)]
    for n in range(others):
        backlog.arrive(f"other{n}", BATCH, 1.0)
    arrivals = cycle(costs)
    for _ in range(2):
        backlog.arrive("high", *next(arrivals))
    higher, largest = 0.0, max(cost for _, cost in costs)
    for name in names:
        while name in backlog.entries:
            one = backlog.serve()
            if one.level > BATCH:
                higher += one.cost
                backlog.arrive("high", *next(arrivals))
            bound = (first + others) / share + (1 + others) * largest
            assert higher <= bound + 1e-6, (higher, bound)
        higher = 0.0


@given(
    share=st.sampled_from([0.0, 0.1, 1.0]), rounds=st.integers(1, 200), costs=st.tuples(*[st.integers(1, 9_999)] * 3)
)
def test_a_lower_class_gets_no_more_than_its_share(share: float, rounds: int, costs: tuple[int, int, int]) -> None:
    """This holds while a higher class waits. The share is exceeded by at most the share of one request, from rounding."""
    backlog = Backlog(PoolOrder(share))
    for level, cost in enumerate(costs):
        for _ in range(2):
            backlog.arrive(f"t{level}-", level, float(cost))
    for _ in range(rounds):
        one = backlog.serve()
        backlog.arrive(one.tenant, one.level, one.cost)
    work = [backlog.served[f"t{level}-", level] for level in range(3)]
    assert work[STANDARD] <= share * work[INTERACTIVE] + share * costs[INTERACTIVE] + 1e-6
    assert work[BATCH] <= share * (work[STANDARD] + work[INTERACTIVE]) + share * max(costs) + 1e-6


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python `act` runs."""
    ran = 0

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal ran
        ran += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        act()
    finally:
        sys.settrace(before)
    return ran


def test_a_walk_over_many_lines_costs_no_pass_over_them_for_each_request() -> None:
    """Of one tenant, and of one for each queue."""
    for tenants in (1, 400):
        ran = {}
        for queues in (40, 400):
            order = added(*(entry(f"r{n}", f"t{n % tenants}", rank=n, queue_key=("m", f"i{n}")) for n in range(queues)))
            full: set[QueueKey] = set()

            def past_full_ones(order: PoolOrder = order, full: set[QueueKey] = full, queues: int = queues) -> None:
                for name in order.walk(full):
                    full.add(("m", f"i{name[1:]}"))
                assert len(full) == queues

            ran[queues] = lines_run(past_full_ones)
        assert ran[400] <= 15 * ran[40]


def _first_of_walk(order: PoolOrder) -> list[str]:
    return list(islice(order.walk(), 64))


def _last_of_class(order: PoolOrder) -> object:
    return next(order.last(BATCH, None))


def test_what_one_retry_costs_does_not_grow_with_the_queue() -> None:
    """With one tenant, and with one for each request: the first 64 of the walk, the last request of a class, serving one, adding
    one."""
    ran = {}
    for size in (100, 10_000):
        for tenants in (1, size):
            order = added(*(entry(f"r{n:05}", f"t{n % tenants}", rank=n, level=n % 3) for n in range(size)))
            first = next(iter(order.walk()))
            number = int(first[1:])
            served = entry(first, f"t{number % tenants}", rank=number, level=number % 3)
            ran[size, tenants > 1] = [
                lines_run(partial(_first_of_walk, order)),
                lines_run(partial(_last_of_class, order)),
                lines_run(partial(order.serve, served, 1_000.0)),
                lines_run(partial(order.add, entry("new", "tn", rank=5.5))),
            ]
    for many in (False, True):
        for small, large in zip(ran[100, many], ran[10_000, many], strict=True):
            assert large <= 2 * small


NAMES = st.integers(0, 10**6)
QUEUE_KEYS = st.sampled_from([BASE, LORA, ("m", "a")])


class OrderMachine(RuleBasedStateMachine):
    """Any order of changes leaves the lists consistent; the walk is the order in which requests are served, has each once, and
    passes over no class, tenant or rank."""

    def __init__(self) -> None:
        super().__init__()
        self.order = PoolOrder(SHARE)
        self.entries: dict[str, Entry] = {}

    @rule(
        number=NAMES,
        tenant=st.sampled_from("abc"),
        queue_key=QUEUE_KEYS,
        level=st.integers(0, 2),
        rank=st.integers(0, 3),
        cost=st.integers(1, 3_000),
        weight=st.integers(1, 4),
    )
    def add(self, number: int, tenant: str, queue_key: QueueKey, level: int, rank: int, cost: int, weight: int) -> None:
        name = f"r{number}"
        if name not in self.entries:
            one = Entry(name, tenant, queue_key, level, float(rank), 0.0, float(cost), float(weight))
            self.entries[name] = one
            self.order.add(one)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.order.remove(self.entries.pop(data.draw(st.sampled_from(sorted(self.entries)))))

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), queue_key=QUEUE_KEYS, rank=st.integers(0, 3), cost=st.integers(1, 3_000))
    def replace(self, data: st.DataObject, queue_key: QueueKey, rank: int, cost: int) -> None:
        old = self.entries[data.draw(st.sampled_from(sorted(self.entries)))]
        new = Entry(old.request_id, old.tenant, queue_key, old.level, float(rank), 0.0, float(cost), old.weight)
        self.entries[old.request_id] = new
        self.order.replace(old, new)

    @precondition(lambda self: self.entries)
    @rule(place=st.integers(0, 3), cost=st.integers(1, 3_000))
    def serve(self, place: int, cost: int) -> None:
        order = list(self.order.walk())
        self.order.serve(self.entries.pop(order[min(place, len(order) - 1)]), float(cost))

    @rule(full=QUEUE_KEYS, served=st.integers(1, 6))
    def serve_past_a_full_queue(self, full: QueueKey, served: int) -> None:
        for _ in range(served):
            if (name := next(iter(self.order.walk({full})), None)) is not None:
                one = self.entries.pop(name)
                self.order.serve(one, one.cost)

    @rule(full=QUEUE_KEYS)
    def walk_past_a_full_queue(self, full: QueueKey) -> None:
        walked = list(self.order.walk({full}))
        assert sorted(walked) == sorted(name for name, queued in self.entries.items() if queued.queue_key != full)

    @rule(level=st.integers(0, 2), tenant=st.sampled_from([None, "a", "b"]))
    def who_goes_last(self, level: int, tenant: str | None) -> None:
        last = [self.entries[name] for name in self.order.last(level, tenant)]
        wanted = [
            queued for queued in self.entries.values() if queued.level == level and tenant in (None, queued.tenant)
        ]
        assert sorted(queued.request_id for queued in last) == sorted(queued.request_id for queued in wanted)
        for name in "abc":
            ranks = [queued.rank for queued in last if queued.tenant == name]
            assert ranks == sorted(ranks, reverse=True)

    @invariant()
    def the_walk_is_the_order_of_service(self) -> None:
        self.order.check_invariants()
        assert len(self.order) == len(self.entries) == sum(self.order.count(level) for level in range(3))
        walked = list(self.order.walk())
        assert sorted(walked) == sorted(self.entries)
        served, twin = [], copy.deepcopy(self.order)
        while len(twin):
            served.append(next(iter(twin.walk())))
            one = self.entries[served[-1]]
            twin.serve(one, one.cost)
        assert walked == served
        for level in range(3):
            for name in "abc":
                of = [self.entries[request_id] for request_id in walked]
                ranks = [queued.rank for queued in of if (queued.level, queued.tenant) == (level, name)]
                assert ranks == sorted(ranks)


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=60, stateful_step_count=30)
