"""Owners of sessions, against a plain dict."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.load import affinity
from pointsman_router.core.load.affinity import Affinity

POOLS, SESSIONS, OWNERS = st.sampled_from("mn"), st.sampled_from("stuvw"), st.sampled_from("abc")
ACTIONS = st.one_of(
    st.tuples(st.just("assign"), POOLS, SESSIONS, OWNERS),
    st.tuples(st.just("recall"), POOLS, SESSIONS, OWNERS),
    st.tuples(st.just("forget"), POOLS, st.none(), st.none()),
    st.tuples(st.just("end"), st.none(), SESSIONS, st.none()),
    st.tuples(st.just("wait"), st.none(), st.none(), st.none()),
)


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 4))
def test_owners_are_those_of_a_dict(actions: list[tuple[str, str, str, str]], chunk: int) -> None:
    with mock.patch.object(affinity, "CHUNK", chunk):
        compare_with_a_dict(actions)


def compare_with_a_dict(actions: list[tuple[str, str, str, str]]) -> None:
    known, now = Affinity(ttl_s=10.0), 0.0
    model: dict[tuple[str, str], tuple[str, float]] = {}
    returned: set[tuple[str, str]] = set()
    for action, pool, session, owner in actions:
        key = pool, session
        match action:
            case "assign":
                assert known.assign(pool, session, owner, now) == (key in model)
                (returned.add if key in model else returned.discard)(key)
                model.pop(key, None)
                model[key] = owner, now + 10.0
            case "recall":
                known.recall(pool, session, owner, now)
                if key not in model:
                    model[key] = owner, now + 10.0
                    returned.add(key)
            case "forget":
                known.forget_pool(pool)
                model = {key: value for key, value in model.items() if key[0] != pool}
            case "end":
                assert set(known.end(session, now)) == {key[0] for key in model if key[1] == session}
                model = {key: value for key, value in model.items() if key[1] != session}
            case _:
                now += 3.0
                known.expire(now)
                model = {key: value for key, value in model.items() if value[1] > now}
        returned &= set(model)
        known.check_invariants()
        assert len(known) == len(model)
        assert all(known.owner(*key, now) == value[0] for key, value in model.items())
        for name in "abc":
            assert known.sessions_of(name) == sum(value[0] == name for value in model.values())
        for of in "mn":
            assert dict(filter(None, known.returning(of))) == {
                key[1]: model[key][0] for key in model if key in returned and key[0] == of
            }
        listed = list(known.newest(now))
        assert {entry[:3] for entry in listed} == {(*key, value[0]) for key, value in model.items()}
        assert [entry[3] for entry in listed] == sorted((entry[3] for entry in listed), reverse=True)


def test_the_oldest_of_all_pools_goes_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_SESSIONS", 3)
    known = Affinity(ttl_s=10.0)
    for now, (pool, session) in enumerate([("m", "1"), ("n", "2"), ("m", "3"), ("m", "4"), ("n", "5")]):
        known.assign(pool, session, "a", float(now))
    assert [(pool, session) for pool, session, *_ in known.newest(5.0)] == [("n", "5"), ("m", "4"), ("m", "3")]
    known.recall("m", "6", "a", 5.0)
    assert len(known) == 3, "recalled sessions of an earlier router displace no session"


def test_what_goes_at_once_goes_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of a forgotten pool, and expired sessions."""
    monkeypatch.setattr(affinity, "DROPPED_AT_ONCE", 2)
    monkeypatch.setattr(affinity, "CHUNK", 2)
    known = Affinity(ttl_s=10.0)
    for number in range(5):
        known.assign("m", str(number), "a", 0.0)
    known.forget_pool("m")
    assert (len(known), known.owner("m", "1", 0.0), known.sessions_of("a")) == (0, "", 0)
    freed = [known.left_to_free]
    while known.left_to_free:
        known.expire(0.0)
        freed.append(known.left_to_free)
    assert freed[0] == 10
    assert all(0 < before - after <= 3 for before, after in pairwise(freed)), freed

    for number in range(5):
        known.assign("m", str(number), "a", 0.0)
    left = []
    for _ in range(3):
        known.expire(10.0)
        known.check_invariants()
        left.append(len(known))
    assert left == [3, 1, 0]


def test_a_session_whose_time_is_over_has_not_come_back() -> None:
    """Though it has not been dropped yet."""
    known = Affinity(ttl_s=10.0)
    assert not known.assign("m", "s", "a", 0.0)
    assert known.assign("m", "s", "a", 9.0)
    assert not known.assign("m", "s", "a", 19.0)
    assert list(known.returning("m")) == [None]


def test_sessions_that_come_and_go_while_they_are_listed() -> None:
    """A caller that lists sessions lets the event loop run between two of them, so sessions can change meanwhile."""
    known = Affinity(ttl_s=10.0)
    for number in range(6):
        known.assign("m", str(number), "a", float(number))
    listed = known.newest(5.0)
    assert next(listed)[1] == "5"
    known.assign("m", "3", "a", 6.0)
    known.assign("m", "new", "a", 6.0)
    assert [session for _, session, _, _ in listed] == ["4", "2", "1", "0"]
    returning = known.returning("m")
    known.forget_pool("m")
    assert list(returning) == []


def test_no_dict_becomes_large() -> None:
    """A dict that grows is copied at once, which takes time in proportion to its size. So every dict stays small, in any order of
    changes."""
    known = Affinity(ttl_s=1e9)
    for number in range(100_000):
        known.assign("m", f"t/{number}", "a", float(number))
        if number % 3:
            known.assign("m", f"t/{number // 2}", "b", float(number))
    sessions = known._pools["m"]
    assert max(map(len, sessions.shards.values())) < 2 * 100_000 / affinity.SHARDS
    assert max(map(len, sessions.chunks.values())) <= affinity.CHUNK
    # The collector tracks every dict from Python 3.14 on, and passes over these in a full collection there.
    if sys.version_info < (3, 14):
        assert not any(map(gc.is_tracked, [*sessions.shards.values(), *sessions.chunks.values()]))
