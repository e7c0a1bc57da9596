"""Ends of sessions wait in the gateway until the owners of all pools have confirmed them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core import session_ends
from pointsman_gateway.core.session_ends import KEPT_S, SessionEnds

POOLS = ("m", "n")


def test_an_end_waits_for_the_owner_of_every_pool() -> None:
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    assert ends.untold(["m"], 1.0) == ends.untold(["n"], 1.0) == [("t", "s")]
    ends.confirmed("t", "s", ["m"])
    assert (ends.untold(["m"], 1.0), ends.untold(["n"], 1.0)) == ([], [("t", "s")])
    assert ends.unconfirmed(POOLS) == 1
    ends.confirmed("t", "s", ["n"])
    assert (ends.untold(["m", "n"], 1.0), ends.unconfirmed(POOLS)) == ([], 0)


def test_an_end_that_is_reported_before_any_pool_is_known_waits_for_the_first() -> None:
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    assert ends.untold(["m"], 1.0) == [("t", "s")]


def test_an_end_waits_for_the_owner_of_a_pool_that_is_not_known_as_the_others_confirm_it() -> None:
    """No router knew an instance of the pool for a while, so gateways were not told of it."""
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    ends.confirmed("t", "s", ["m"])
    assert ends.unconfirmed(["m"]) == 0
    assert (ends.unconfirmed(POOLS), ends.untold(["n"], 1.0)) == (1, [("t", "s")])


def test_an_owner_that_does_not_confirm_an_end_is_told_again_ever_more_rarely() -> None:
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    times = [now / 2 for now in range(2 * int(KEPT_S)) if ends.overdue(now / 2)]
    assert times == [1.0, 3.0, 7.0, 15.0, 31.0]
    ends.add("t", "s", 100.0)
    assert ends.overdue(100.5) == []
    assert ends.untold(["m"], 100.8) == [("t", "s")]
    assert ends.overdue(101.5) == [], "a new owner was told just now"
    assert ends.overdue(102.0) == [(("t", "s"), frozenset())]
    ends.confirmed("t", "s", ["m"])
    assert ends.overdue(150.0) == [(("t", "s"), frozenset({"m"}))]


def test_owners_are_told_again_of_an_end_that_a_late_request_may_undo() -> None:
    """A router that does not answer may own the pool when the connection moves again, and place what it was asked for."""
    ends = SessionEnds()
    for session in ("over", "goes on"):
        ends.asked_in_vain("t", session, 0.0)
        ends.add("t", session, 5.0)
        ends.confirmed("t", session, POOLS)
    assert ends.unconfirmed(POOLS) == 0
    assert ends.untold(["m"], 5.0) == [("t", "over"), ("t", "goes on")]
    ends.begun("t", "goes on", "m")
    ended = [(now, session, done) for now in range(6, 100) for (_, session), done in ends.overdue(float(now))]
    assert [now for now, session, _ in ended if session == "over"] == [6, 8, 12, 20, 36]
    assert {done for _, session, done in ended if session == "over"} == {frozenset()}
    assert {done for _, session, done in ended if session == "goes on"} == {frozenset(POOLS)}
    ends.add("t", "over", 200.0)
    ends.confirmed("t", "over", POOLS)
    assert ends.untold(["m"], 200.0) == []


def test_an_end_that_is_reported_twice_is_one_end() -> None:
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    ends.confirmed("t", "s", ["m"])
    ends.add("t", "s", 1.0)
    assert ends.untold(["m"], 1.0) == [("t", "s")], "the second end is another, which the owner has not confirmed"
    ends.confirmed("t", "s", POOLS)
    ends.confirmed("t", "s", POOLS)
    assert ends.unconfirmed(POOLS) == 0


def test_an_owner_is_not_told_of_an_end_after_which_the_session_has_begun_again() -> None:
    ends = SessionEnds()
    ends.add("t", "s", 0.0)
    ends.begun("t", "s", "m")
    ends.begun("t", "unknown", "m")
    assert (ends.untold(["m"], 1.0), ends.untold(["n"], 1.0)) == ([], [("t", "s")])


def test_ends_of_one_id_are_kept_apart_by_tenant() -> None:
    ends = SessionEnds()
    ends.add("red", "s", 0.0)
    ends.add("blue", "s", 0.0)
    ends.confirmed("red", "s", POOLS)
    assert ends.untold(["m"], 1.0) == [("blue", "s")]


def test_an_end_that_nobody_confirms_is_dropped_after_a_time() -> None:
    ends = SessionEnds()
    ends.add("t", "old", 0.0)
    ends.add("t", "new", 1.0)
    assert ends.untold(["m"], KEPT_S) == [("t", "new")]
    assert ends.unconfirmed(POOLS) == 1


def test_the_oldest_ends_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_ends, "MAX_ENDS", 2)
    ends = SessionEnds()
    for name in ("a", "b", "a", "c"):
        ends.add("t", name, 0.0)
    assert ends.untold(["m"], 1.0) == [("t", "a"), ("t", "c")]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "begun", "confirmed", "told again"]), st.sampled_from("ab"), st.sampled_from(POOLS)
    )
)


@given(ACTIONS)
def test_an_owner_is_told_of_what_it_has_not_confirmed(actions: list[tuple[str, str, str]]) -> None:
    ends = SessionEnds()
    untold: dict[str, set[str]] = {}
    for action, session, pool in actions:
        match action:
            case "add":
                ends.add("t", session, 0.0)
                untold[session] = set(POOLS)
            case "begun":
                ends.begun("t", session, pool)
                untold.get(session, set()).discard(pool)
            case "confirmed":
                ends.confirmed("t", session, [pool])
                untold.get(session, set()).discard(pool)
        for pool_name in POOLS:
            assert {name for _, name in ends.untold([pool_name], 1.0)} == {
                name for name, left in untold.items() if pool_name in left
            }
