"""Tests of the count of the sessions under way, and a Hypothesis machine of any history of sessions."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman_router.core.admission.return_chances import KEEP_S, ReturnChances
from pointsman_router.core.admission.session_ledger import MOST_OPEN, SessionLedger
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, bin_of

KEYS = tuple(range(1_000, 1_100))


def counted(ledger: SessionLedger, name: str, tokens: int = 1_600, now: float = 0.0, first: int = 0) -> None:
    """One request of a session with its own keys, and its answer of 100 tokens."""
    keys = range(first + 10**6 * len(name), first + 10**6 * len(name) + tokens // 16)
    ledger.opened(name, "t", tokens, keys, 0, now)
    ledger.closed(name, tokens, 100, "TOOL_CALLS", now)


def test_a_session_weighs_its_size_while_a_request_is_open() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_000, (), 0, 0.0)
    assert ledger.weighted() == ledger.of_tenant("t") == 1_000


def test_an_idle_session_weighs_its_chance_to_return() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_000, (), 0, 0.0)
    ledger.closed("t/a", 1_000, 200, "TOOL_CALLS", 5.0)
    chance = ReturnChances().chance(AnswerKind.FIRST_TOOL, 0)
    assert abs(ledger.weighted() - 1_200 * chance) < 1e-6
    ledger.advance(5.0 + EDGES_S[6])
    later = ReturnChances().chance(AnswerKind.FIRST_TOOL, 6)
    assert abs(ledger.weighted() - 1_200 * later) < 0.02 * 1_200


def test_sessions_that_go_together_count_no_longer_soon_though_those_before_them_returned() -> None:
    ledger, size, began, rng = SessionLedger(), 1_700, 100_000.0, Random(1)
    now = 0.0
    for _ in range(2_000):
        counted(ledger, "early", now=now)
        now += rng.expovariate(1 / 20.0)
        ledger.advance(now)
    ledger.advance(began)
    for number in range(300):
        for turn in range(2):
            counted(ledger, f"s{number}", now=began + turn, first=10_000_000 + 1_000 * number)
    learned = ledger.chances.chance(AnswerKind.TOOL, bin_of(8.0))
    assert learned > 0.9
    for second in range(600):
        ledger.advance(began + 2.0 + second)
        if second >= 15:
            assert ledger.weighted() <= 0.25 * 300 * size, second
    # What was learned of thousands of others is still known.
    assert ledger.chances.chance(AnswerKind.TOOL, bin_of(8.0)) > 0.8


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 0.8, 1.0), (0.5, 0.2, 0.75), (0.0, 0.0, 0.05)])
def test_presence_is_the_share_of_the_expected_returns_that_come(share: float, least: float, most: float) -> None:
    """This share of 1,000 sessions returns as the agents whose returns are known."""
    ledger, rng, known = SessionLedger(), Random(3), ReturnChances()
    history = [tuple(tuple(200 * number for number in bins) for bins in observed) for observed in known.observed()]
    ledger.chances.restore(history[0], history[1])
    returns = []
    for number in range(1_000):
        for _ in range(2):
            counted(ledger, f"{number}")
        chance = rng.random()
        idle_s = next((at / 4 for at in range(240) if known.stays_idle(AnswerKind.TOOL, 0.0, at / 4) < chance), 60.0)
        if number < share * 1_000:
            returns.append((idle_s, f"{number}"))
    returns.sort()
    lowest = 1.0
    for quarter in range(1, 160):
        while returns and returns[0][0] <= quarter / 4:
            ledger.asked(returns.pop(0)[1])
        ledger.advance(quarter / 4)
        if quarter >= 8:
            lowest = min(lowest, ledger.chances.presence[bin_of(quarter / 4)])
    assert least <= lowest <= most


def test_a_session_whose_request_waits_has_returned() -> None:
    waits, placed = SessionLedger(), SessionLedger()
    for ledger in (waits, placed):
        counted(ledger, "a")
    waits.asked("a")
    counted(placed, "a", now=3.0)
    weight = waits.weighted()
    waits.advance(300.0)
    assert 0.0 < waits.weighted() < weight
    counted(waits, "a", now=300.0)
    assert waits.chances.observed() == placed.chances.observed()
    waits.check_invariants()


def test_a_session_that_is_idle_for_an_hour_is_forgotten() -> None:
    ledger = SessionLedger()
    counted(ledger, "t/a")
    ledger.advance(EDGES_S[-1] - 1.0)
    assert len(ledger) == 1
    ledger.advance(EDGES_S[-1])
    assert len(ledger) == 0
    assert ledger.weighted() == 0.0
    ledger.check_invariants()


def test_what_a_family_shared_counts_no_longer_when_all_of_it_is_done() -> None:
    ledger = SessionLedger()
    ledger.hosted_by(8)
    for number in range(40):
        own = range(10**6 * (number + 1), 10**6 * (number + 1) + 10)
        ledger.opened(f"t/{number}", "t", 960, (*KEYS[:50], *own), 800, 0.0)
        ledger.closed(f"t/{number}", 960, 10, "STOP", 10.0)
    assert ledger.weighted() > 8 * 800
    ledger.advance(10.0 + KEEP_S)
    assert len(ledger) == 40, "they are remembered, by what is their own"
    assert ledger.weighted() < 40 * 170
    ledger.opened("t/7", "t", 960, (*KEYS[:50], 1), 800, 500.0)
    ledger.check_invariants()
    assert ledger.weighted() > 800, "whoever returns needs it"
    ledger.closed("t/7", 960, 10, "STOP", 501.0)
    ledger.advance(EDGES_S[-1] + 501.0)
    assert (len(ledger), ledger.weighted()) == (0, 0.0)
    ledger.check_invariants()


def test_a_prefix_that_sessions_share_counts_once_for_each_instance_at_most() -> None:
    ledger = SessionLedger()
    ledger.hosted_by(3)
    for number in range(10):
        own = range(10**6 * (number + 1), 10**6 * (number + 1) + 50)
        ledger.opened(f"t/{number}", "t", 1_600, (*KEYS[:50], *own), 800 if number else 0, 0.0)
    # The first session has 1,600 tokens, and each of the nine others 800 of its own; 3 copies of the shared 800.
    assert ledger.weighted() == 1_600 + 9 * 800 + 3 * 800
    ledger.hosted_by(20)
    assert ledger.weighted() == 1_600 + 9 * 800 + 9 * 800


def test_a_session_whose_prompt_no_longer_has_the_shared_prefix_counts_in_full() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_600, KEYS, 800, 0.0)
    ledger.closed("t/a", 1_600, 0, "", 0.0)
    ledger.opened("t/a", "t", 1_600, range(100), 0, 1.0)
    assert ledger.weighted() == 1_600
    ledger.check_invariants()


def test_a_request_that_continues_another_sessions_prompt_is_recognised_by_its_keys() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 0.0)
    assert ledger.continued("t/b", "t", (*KEYS, 7)) == "prefix"
    assert ledger.continued("t/b", "t", (*KEYS, 7, 8)) == "prefix"
    assert ledger.continued("u/b", "u", (*KEYS, 7)) == ""
    # Another conversation over the same beginning.
    assert ledger.continued("t/c", "t", (*KEYS, 9)) == ""
    assert ledger.continued("t/d", "t", KEYS[:50]) == ""


def test_a_prompt_of_several_sessions_is_continued_by_none() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 0.0)
    ledger.opened("t/b", "t", 1_600, KEYS, 1_600, 0.0)
    assert ledger.continued("t/c", "t", (*KEYS, 7)) == ""


def test_one_name_does_not_stand_for_any_number_of_conversations() -> None:
    ledger = SessionLedger()
    for number in range(MOST_OPEN):
        assert ledger.continued("t/a", "t", range(100 * number, 100 * number + 10)) == ("session" if number else "")
        ledger.opened("t/a", "t", 160, range(100 * number, 100 * number + 10), 0, 0.0)
    assert ledger.weighted() == MOST_OPEN * 160
    assert ledger.continued("t/a", "t", range(9_000, 9_010)) == ""


def test_a_session_without_a_further_request_leaves_nothing() -> None:
    ledger = SessionLedger()
    ledger.opened("r1", "t", 1_600, KEYS, 0, 0.0)
    ledger.closed("r1", 1_600, 10, "STOP", 1.0, lasts=False)
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 2.0)
    ledger.closed("t/a", 1_600, 10, "STOP", 3.0)
    ledger.over("t/a")
    assert len(ledger) == 0
    assert ledger.of_tenant("t") == 0.0
    ledger.check_invariants()


def test_a_session_that_ends_while_a_request_is_open_is_forgotten_with_it_unless_it_begins_anew() -> None:
    ledger = SessionLedger()
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 0.0)
    ledger.over("t/a")
    assert ledger.weighted() == 1_600
    ledger.closed("t/a", 1_600, 10, "STOP", 2.0)
    assert len(ledger) == 0
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 3.0)
    ledger.over("t/a")
    ledger.opened("t/a", "t", 1_600, KEYS, 0, 5.0)
    ledger.closed("t/a", 1_600, 10, "STOP", 6.0)
    ledger.closed("t/a", 1_600, 10, "STOP", 7.0)
    assert len(ledger) == 1
    ledger.check_invariants()


def test_beyond_the_limit_the_longest_idle_session_is_forgotten() -> None:
    ledger = SessionLedger(max_sessions=2)
    counted(ledger, "t/a", now=0.0)
    counted(ledger, "t/bb", now=10.0)
    ledger.advance(40.0)
    counted(ledger, "t/ccc", now=40.0)
    assert set(ledger.sessions) == {"t/bb", "t/ccc"}
    ledger.check_invariants()


def agent(ledger: SessionLedger, name: str, parent: str = "", reason: str = "TOOL_CALLS") -> None:
    ledger.opened(name, "t", 100, (), 0, 0.0, parent=parent)
    ledger.closed(name, 100, 10, reason, 0.0)


def test_a_sub_agent_is_over_with_its_first_answer_that_calls_no_tool() -> None:
    ledger = SessionLedger()
    agent(ledger, "t/parent", reason="STOP")
    agent(ledger, "t/child", "t/parent")
    assert set(ledger.sessions) == {"t/parent", "t/child"}
    ledger.opened("t/child", "t", 200, (), 0, 1.0)
    ledger.closed("t/child", 200, 10, "STOP", 1.0)
    assert set(ledger.sessions) == {"t/parent"}
    ledger.check_invariants()


def test_the_end_of_a_session_ends_its_sub_agents_those_with_open_requests_later() -> None:
    ledger = SessionLedger()
    for name, parent in (("root", ""), ("child", "t/root"), ("grandchild", "t/child"), ("other", "t/else")):
        agent(ledger, f"t/{name}", parent)
    ledger.opened("t/grandchild", "t", 100, (), 0, 1.0)
    ledger.over("t/root")
    assert set(ledger.sessions) == {"t/grandchild", "t/other"}
    ledger.closed("t/grandchild", 100, 10, "TOOL_CALLS", 3.0)
    assert set(ledger.sessions) == {"t/other"}
    ledger.check_invariants()


def test_a_session_that_is_not_counted_any_more_ends_its_sub_agents_too() -> None:
    ledger = SessionLedger(max_sessions=2)
    agent(ledger, "t/root")
    agent(ledger, "t/child", "t/root")
    agent(ledger, "t/other")
    assert "t/root" not in ledger.sessions
    assert ledger.knows("t/root")
    ledger.over("t/root")
    assert not ledger.knows("t/child")
    assert not ledger.knows("t/root")


def test_sessions_that_name_each_other_end_together() -> None:
    ledger = SessionLedger()
    for name, parent in (("a", "t/b"), ("b", "t/a"), ("self", "t/self")):
        agent(ledger, f"t/{name}", parent)
    ledger.over("t/a")
    ledger.over("t/self")
    assert not len(ledger)
    ledger.check_invariants()


class LedgerMachine(RuleBasedStateMachine):
    """Whatever sessions do, the sums are those of the sessions, and the weighted size is within their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SessionLedger(max_sessions=6)
        self.now = 0.0
        self.open: list[tuple[str, int]] = []

    @rule(
        name=st.sampled_from([f"t/{number}" for number in range(9)]),
        first=st.integers(0, 3),
        blocks=st.integers(0, 12),
        cached=st.integers(0, 200),
        parent=st.sampled_from(["", *(f"t/{number}" for number in range(9))]),
    )
    def opened(self, name: str, first: int, blocks: int, cached: int, parent: str) -> None:
        tokens = 16 * blocks + 5
        keys = range(20 * first, 20 * first + blocks)
        self.ledger.continued(name, name[:1], keys)
        self.ledger.opened(name, name[:1], tokens, keys, cached, self.now, parent=parent)
        self.open.append((name, tokens))

    @rule(
        at=st.integers(0, 20),
        output=st.integers(0, 50),
        reason=st.sampled_from(["", "STOP", "TOOL_CALLS"]),
        lasts=st.booleans(),
    )
    def closed(self, at: int, output: int, reason: str, lasts: bool) -> None:
        if self.open:
            name, tokens = self.open.pop(at % len(self.open))
            self.ledger.closed(name, tokens, output, reason, self.now, lasts=lasts)

    @rule(seconds=st.sampled_from([0.1, 3.0, 50.0, 700.0, 4_000.0]), advance=st.booleans())
    def time_passes(self, seconds: float, advance: bool) -> None:
        self.now += seconds
        if advance:
            self.ledger.advance(self.now)

    @rule(name=st.sampled_from([f"t/{number}" for number in range(9)]))
    def asked(self, name: str) -> None:
        self.ledger.asked(name)

    @rule(name=st.sampled_from([f"t/{number}" for number in range(9)]))
    def over(self, name: str) -> None:
        self.ledger.over(name)

    @rule(instances=st.integers(1, 4))
    def hosted(self, instances: int) -> None:
        self.ledger.hosted_by(instances)

    @invariant()
    def consistent(self) -> None:
        self.ledger.check_invariants()
        sizes = sum(session.size for session in self.ledger.sessions.values())
        shared = self.ledger._shared_sum
        assert -1e-6 <= self.ledger.weighted() - shared <= sizes + 1e-6
        assert sum(self.ledger.of_tenant(tenant) for tenant in ("t",)) >= 0.0
        for kind in KINDS:
            assert len(self.ledger.chances.chances(kind)) == BINS


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)
