"""Owners of sessions, against a plain dict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.core.load import affinity
from pointsman.router.core.load.affinity import Affinity

POOLS, SESSIONS, OWNERS = st.sampled_from("mn"), st.sampled_from("stuvw"), st.sampled_from("abc")
ACTIONS = st.one_of(
    st.tuples(st.just("assign"), POOLS, SESSIONS, OWNERS),
    st.tuples(st.just("recall"), POOLS, SESSIONS, OWNERS),
    st.tuples(st.just("forget"), POOLS, st.none(), st.none()),
    st.tuples(st.just("wait"), st.none(), st.none(), st.none()),
)


@given(st.lists(ACTIONS, max_size=60))
def test_owners_are_those_of_a_dict(actions: list[tuple[str, str, str, str]]) -> None:
    known, model, now = Affinity(ttl_s=10.0), {}, 0.0
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
                model = {one: value for one, value in model.items() if one[0] != pool}
            case _:
                now += 3.0
                known.expire(now)
                model = {one: value for one, value in model.items() if value[1] > now}
        returned &= set(model)
        known.check_invariants()
        assert len(known) == len(model)
        assert all(known.owner(*one, now) == value[0] for one, value in model.items())
        for name in "abc":
            assert known.sessions_of(name) == sum(value[0] == name for value in model.values())
        for of in "mn":
            assert dict(known.returning(of)) == {
                one[1]: model[one][0] for one in model if one in returned and one[0] == of
            }
        listed = list(known.newest(now))
        assert {one[:3] for one in listed} == {(*one, value[0]) for one, value in model.items()}
        assert [one[3] for one in listed] == sorted((one[3] for one in listed), reverse=True)


def test_the_oldest_of_all_pools_goes_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_SESSIONS", 3)
    known = Affinity(ttl_s=10.0)
    for now, (pool, session) in enumerate([("m", "1"), ("n", "2"), ("m", "3"), ("m", "4"), ("n", "5")]):
        known.assign(pool, session, "a", float(now))
    assert [(pool, session) for pool, session, *_ in known.newest(5.0)] == [("n", "5"), ("m", "4"), ("m", "3")]
    known.recall("m", "6", "a", 5.0)
    assert len(known) == 3, "what an earlier router knew displaces nothing"


def test_a_pool_that_is_given_up_is_freed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "FREED_AT_ONCE", 2)
    known = Affinity(ttl_s=10.0)
    for number in range(5):
        known.assign("m", str(number), "a", 0.0)
    known.forget_pool("m")
    assert (len(known), known.owner("m", "1", 0.0), known.sessions_of("a")) == (0, "", 0)
    left = []
    for _ in range(3):
        known.expire(0.0)
        left.append(sum(map(len, known._given_up)))
    assert left == [3, 1, 0]
