"""Tests of what a new owner knows of the idle sessions of the owner before it."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.inherited_sessions import InheritedSessions
from pointsman_router.core.admission.return_chances import ReturnChances
from pointsman_router.core.admission.session_admission import STORED_EVERY_ARMED_S, STORED_EVERY_S, AdmissionSettings
from pointsman_router.core.admission.session_ledger import SessionLedger
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, IdleSessions, bin_of
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, state

CAPACITY = 80_000
SESSIONS = 40


def ended(ledger: SessionLedger, number: int, now: float) -> None:
    ledger.opened(f"t/{number}", "t", 1_000, (), 0, now)
    ledger.closed(f"t/{number}", 1_000, 0, "TOOL_CALLS" if number % 2 else "STOP", now)


def stored_again(idle: IdleSessions) -> IdleSessions:
    """What the shared store returns."""
    return msgspec.json.decode(msgspec.json.encode(idle), type=IdleSessions)


def test_a_new_owner_counts_the_idle_sessions_as_the_owner_before_it_did() -> None:
    before, after = SessionLedger(), SessionLedger()
    for number in range(400):
        ended(before, number, number / 4)
    before.advance(100.0)
    assert before.weighted() > 100_000
    # The times of another process.
    after.inherit(stored_again(before.idle()), 0.0, 7.0)
    assert after.weighted() == pytest.approx(before.weighted(), rel=0.01)
    again = SessionLedger()
    again.inherit(stored_again(after.idle()), 0.0, 0.0)
    assert again.weighted() == pytest.approx(before.weighted(), rel=0.01)


def test_a_new_owner_learns_what_the_owner_before_it_had_learned() -> None:
    before, after = SessionLedger(), SessionLedger()
    for number in range(4_000):
        ended(before, number, 0.0)
    for edge_s in EDGES_S[1:]:
        before.advance(edge_s)
    assert before.chances.chance(AnswerKind.FIRST_TOOL, 0) < 0.1
    after.inherit(stored_again(before.idle()), 0.0, 0.0)
    for kind in KINDS:
        assert after.chances.chances(kind) == pytest.approx(before.chances.chances(kind), abs=0.01)


def test_the_expected_part_of_the_sessions_returns_and_is_not_counted_any_more() -> None:
    """Sessions that return as the chances say: at each time the sum is about that of the sessions themselves."""
    before, after, chances, draw = SessionLedger(), SessionLedger(), ReturnChances(), Random(1)
    kinds = {number: AnswerKind.FIRST_TOOL if number % 2 else AnswerKind.FIRST_STOP for number in range(4_000)}
    for number in kinds:
        ended(before, number, 0.0)
    after.inherit(before.idle(), 0.0, 0.0)
    returns = {number: return_time(chances, kind, draw) for number, kind in kinds.items()}
    due = sorted((at, number) for number, at in returns.items())
    for now in (3.0, 10.0, 60.0, 300.0, 1_000.0):
        while due and due[0][0] <= now:
            at, number = due.pop(0)
            after.advance(at)
            after.opened(f"t/{number}", "t", 1_000, (), 0, at)
        after.advance(now)
        idle = [kinds[number] for _, number in due]
        expected = 1_000 * (len(kinds) - len(due) + sum(chances.chance(kind, bin_of(now)) for kind in idle))
        assert after.weighted() == pytest.approx(expected, rel=0.03)
    after.advance(EDGES_S[-1])
    assert after.weighted() == sum(session.size for session in after.sessions.values())
    after.check_invariants()


def return_time(chances: ReturnChances, kind: AnswerKind, draw: Random) -> float:
    """Draw the idle time at which a session returns; the end of the last bin at most."""
    left, low, high = draw.random(), 0.0, EDGES_S[-1]
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if chances.stays_idle(kind, 0.0, middle) > left else (low, middle)
    return high


def test_sums_that_were_stored_long_ago_have_aged() -> None:
    before = SessionLedger()
    for number in range(100):
        ended(before, number, 0.0)
    at_once, late, hours = SessionLedger(), SessionLedger(), SessionLedger()
    at_once.inherit(before.idle(), 0.0, 0.0)
    late.inherit(before.idle(), 600.0, 0.0)
    hours.inherit(before.idle(), 2 * EDGES_S[-1], 0.0)
    assert 0 < late.weighted() < at_once.weighted() / 4
    assert hours.weighted() == 0


def test_clocks_that_disagree_do_not_make_sessions_younger() -> None:
    before, after, skewed = SessionLedger(), SessionLedger(), SessionLedger()
    for number in range(100):
        ended(before, number, 0.0)
    after.inherit(before.idle(), 0.0, 50.0)
    skewed.inherit(before.idle(), -30.0, 50.0)
    assert after.weighted() == skewed.weighted()


GOOD = SessionLedger().idle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": GOOD.tokens[:-1]},
        {"tokens": tuple(bins[:-1] for bins in GOOD.tokens)},
        {"returns": ((-1.0,) * BINS,) * len(KINDS)},
        {"exposure_s": ((0.0,) * BINS,) * len(KINDS)},
    ],
)
def test_numbers_of_a_router_with_other_bins_cannot_be_read(wrong: dict[str, Any]) -> None:
    text = msgspec.json.encode(msgspec.structs.asdict(GOOD) | wrong)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=IdleSessions)


# ---- two routers ----


def owner(taken: ev.PoolTaken) -> RouterState:
    router = state(admission=AdmissionSettings(True), owns_all=False)
    router.handle(taken, 0.0)
    while router.unfinished:
        router.handle(ev.GoOn(), 0.0)
    join(router, "a", 1, kv_capacity_tokens=CAPACITY)
    router.admission.was_parked("m", 0.0)
    return router


def ask(router: RouterState, name: str, tokens: int, now: float) -> list[ev.Effect]:
    asked = request(f"r-{name}-{now}", tokens, keys=keys(name, tokens), tenant="t", session_id=name, parkable=True)
    return router.handle(ev.PlaceRequested(asked, "g"), now)


def keys(name: str, tokens: int) -> tuple[int, ...]:
    first = int(name.removeprefix("s")) << 20
    return tuple(range(first, first + tokens // 16))


def answers(effects: list[ev.Effect]) -> list[type[ev.Effect]]:
    return [type(effect) for effect in effects if isinstance(effect, ev.Placed | ev.Parked | ev.Refused)]


def used(router: RouterState) -> None:
    """Two turns of each of SESSIONS sessions of 2,000 tokens, which called tools, and are idle from 8 s on."""
    for turn in range(2):
        for number in range(SESSIONS):
            now = turn * 4.0 + number / 10
            router.admission.pools["m"].armed = False
            assert answers(ask(router, f"s{number}", 2_000, now)) == [ev.Placed]
            router.handle(ev.Finished(f"r-s{number}-{now}", "OK", output_tokens=0, finish_reason="TOOL_CALLS"), now)


def stored(router: RouterState, first: float, last: float) -> list[ev.IdleSessionsSet]:
    """What a router stores at the ticks of these times."""
    times = [first + step / 4 for step in range(int(4 * (last - first)))]
    return [
        effect for now in times for effect in router.handle(ev.Tick(), now) if isinstance(effect, ev.IdleSessionsSet)
    ]


def test_a_new_owner_of_an_armed_pool_lets_in_no_more_than_the_owner_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # None of the sessions returns while the test looks on; that is not to count.
    monkeypatch.setattr(ReturnChances, "presence", property(lambda _: [1.0] * BINS, lambda *_: None), raising=False)
    before = owner(ev.PoolTaken("m"))
    used(before)
    before.admission.pools["m"].armed = True
    stored_effects = stored(before, 8.0, 14.0)
    assert len(stored_effects) == pytest.approx(6.0 / STORED_EVERY_ARMED_S, abs=1)
    assert answers(ask(before, "s1000", 30_000, 14.0)) == [ev.Parked]
    after = owner(ev.PoolTaken("m", (), None, stored_again(stored_effects[-1].idle_sessions), 1.0))
    after.handle(ev.Tick(), 0.0)
    weighted = before.admission.status("m", 14.0).weighted
    assert after.admission.status("m", 0.0).weighted == pytest.approx(weighted, rel=0.1)
    assert answers(ask(after, "s1000", 30_000, 0.1)) == [ev.Parked]
    after.check_invariants()


def test_a_session_that_returns_to_a_new_owner_shares_nothing_by_that() -> None:
    after = owner(ev.PoolTaken("m"))
    after.handle(ev.SessionsRead("m", {"t/s1": "a"}), 0.0)
    after.index.add("a", keys("s1", 8_000))
    assert answers(ask(after, "s1", 8_000, 1.0)) == [ev.Placed]
    ledger = after.admission.pools["m"].ledger
    assert (ledger.sessions["t/s1"].size, ledger.sessions["t/s1"].shared) == (8_000, 0)
    after.handle(ev.Finished("r-s1-1.0", "OK", output_tokens=0, finish_reason="STOP"), 2.0)
    assert ledger.weighted() < 4_000, "idle, and not likely to return"


def test_a_pool_that_is_not_armed_stores_its_sums_now_and_then_and_a_router_without_others_never() -> None:
    router = owner(ev.PoolTaken("m"))
    used(router)
    assert len(stored(router, 100.0, 200.0)) == pytest.approx(100.0 / STORED_EVERY_S, abs=1)
    alone = state(admission=AdmissionSettings(True))
    join(alone, "a", 1, kv_capacity_tokens=CAPACITY)
    alone.admission.was_parked("m", 0.0)
    used(alone)
    assert not stored(alone, 100.0, 200.0)


def test_sums_of_sessions_that_have_all_returned_take_no_memory() -> None:
    ledger = SessionLedger()
    ended(ledger, 1, 0.0)
    inherited = InheritedSessions(ReturnChances())
    inherited.take_over(ledger.idle(), 0.0, 0.0)
    inherited.advance(EDGES_S[-1])
    assert not inherited._parts
