"""Sessions that their clients end: they have no owner, nor get one by requests that came before the end."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load import affinity
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.requests import unfinished_work
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import finish, join, place, request, state

END = ev.SessionEnded("t", "s", "g")


def fleet(**settings: Any) -> RouterState:
    router = state(**settings)
    join(router, "a", 1, served_names=())
    join(router, "b", 2, model="n", served_names=())
    return router


def ask(router: RouterState, name: str, now: float, **changes: Any) -> ev.Placed | ev.Refused:
    return place(router, request(name, tokens=100, tenant="t", session_id="s", **changes), now)


def owners(router: RouterState, now: float, session: str = "t/s") -> tuple[str, str]:
    return router.affinity.owner("m", session, now), router.affinity.owner("n", session, now)


def disowned(effects: list[ev.Effect]) -> list[tuple[str, str]]:
    return [(effect.session, effect.pool) for effect in effects if isinstance(effect, ev.SessionDisowned)]


def test_an_ended_session_has_no_owner_in_any_pool() -> None:
    router = fleet()
    ask(router, "r1", 0.0)
    ask(router, "r2", 0.0, model="n")
    assert owners(router, 1.0) == ("a", "b")
    effects = router.handle(END, 1.0)
    assert owners(router, 1.0) == ("", "")
    assert disowned(effects) == [("t/s", "m"), ("t/s", "n")]
    assert ev.SessionEndApplied("g", "t", "s", ("m", "n")) in effects
    assert router.affinity.ended_count == 1
    router.check_invariants()


def test_the_end_of_an_unknown_session_and_a_second_end_change_nothing() -> None:
    router = fleet()
    assert router.handle(END, 0.0) == [ev.SessionEndApplied("g", "t", "s", ("m", "n"))]
    ask(router, "r1", 1.0)
    router.handle(END, 2.0)
    assert router.handle(END, 2.0) == [ev.SessionEndApplied("g", "t", "s", ("m", "n"))]
    assert router.handle(ev.SessionEnded("t", "", "g"), 2.0) == [], "without an id"
    assert router.affinity.ended_count == 1


def test_a_tenant_does_not_end_anothers_session() -> None:
    router = fleet()
    ask(router, "r1", 0.0)
    assert disowned(router.handle(ev.SessionEnded("other", "s", "g"), 1.0)) == []
    assert owners(router, 1.0) == ("a", "")


def test_a_request_after_the_end_begins_the_session_anew() -> None:
    router = fleet()
    ask(router, "r1", 0.0)
    router.handle(END, 1.0)
    answer = ask(router, "r2", 1.0)
    assert isinstance(answer, ev.Placed)
    assert answer.decision.view.session_owner == ""
    assert owners(router, 1.0) == ("a", "")


def test_an_open_request_goes_on_after_the_end_of_its_session() -> None:
    router = fleet()
    ask(router, "r1", 0.0)
    router.handle(END, 1.0)
    assert router.reservations.get("r1") is not None
    router.handle(ev.FirstToken("r1"), 2.0)
    router.handle(ev.Finished("r1", "OK"), 3.0)
    assert router.reservations.get("r1") is None
    assert owners(router, 3.0) == ("", "")


def test_a_request_that_was_held_at_the_end_of_its_session_gives_it_no_owner() -> None:
    router = fleet(limits=SaturationLimits(1))
    place(router, request("other", tokens=100), 0.0)
    assert not [effect for effect in router.handle(_asks("held"), 1.0) if isinstance(effect, ev.Placed | ev.Refused)]
    router.handle(END, 2.0)
    assert len(router.held_requests.queue) == 1
    effects = router.handle(ev.Finished("other", "OK"), 3.0)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Placed)] == ["held"]
    assert owners(router, 3.0) == ("", "")
    assert not [effect for effect in effects if isinstance(effect, ev.SessionOwnerSet)]


def test_a_request_that_comes_after_the_end_and_is_held_gives_the_session_an_owner() -> None:
    router = fleet(limits=SaturationLimits(1))
    place(router, request("other", tokens=100), 0.0)
    router.handle(END, 2.0)
    router.handle(_asks("held"), 2.5)
    router.handle(ev.Finished("other", "OK"), 3.0)
    assert owners(router, 3.0) == ("a", "")


def _asks(name: str) -> ev.PlaceRequested:
    return ev.PlaceRequested(request(name, tokens=100, tenant="t", session_id="s"), "g")


def test_sessions_that_the_store_still_has_stay_ended_at_a_new_owner() -> None:
    """The sessions of a pool that was taken are read page by page. A page may have a session that has ended since."""
    router = fleet(owns_all=False)
    assert router.handle(END, 0.0) == [ev.SessionEndApplied("g", "t", "s", ())], "it owns no pool"
    router.handle(ev.PoolTaken("m"), 1.0)
    finish(router, 1.0)
    router.handle(ev.SessionEnded("t", "one"), 2.0)
    effects = router.handle(ev.SessionsRead("m", {"t/one": "a", "t/two": "a", "t/s": "a"}), 3.0)
    assert disowned(effects) == [("t/one", "m")], "the store must forget it, too"
    assert owners(router, 3.0, "t/one") == ("", "")
    assert owners(router, 3.0, "t/two") == ("a", "")
    assert owners(router, 3.0) == ("a", ""), "it ended at an earlier owner, and may have begun again since"
    router.check_invariants()


def test_an_end_is_stored_while_the_sessions_are_still_read() -> None:
    """It is confirmed then, and this router may lose the pool before it reads the session."""
    router = fleet(owns_all=False)
    router.handle(ev.PoolTaken("m"), 1.0)
    finish(router, 1.0)
    effects = router.handle(END, 2.0)
    assert disowned(effects) == [("t/s", "m")]
    assert effects[-1] == ev.SessionEndApplied("g", "t", "s", ("m",))
    router.handle(ev.SessionsRead("m", {"t/two": "a"}), 3.0)
    assert disowned(router.handle(ev.SessionEnded("t", "two", "g"), 4.0)) == [("t/two", "m")], "once"
    router.handle(ev.SessionsRead("m", {}, last=True), 5.0)
    assert disowned(router.handle(ev.SessionEnded("t", "three", "g"), 6.0)) == [], "the store has no other session"


def test_a_session_that_began_again_keeps_its_owner_when_the_old_one_is_read() -> None:
    router = fleet(owns_all=False)
    join(router, "c", 3, served_names=())
    router.handle(ev.PoolTaken("m"), 1.0)
    finish(router, 1.0)
    router.handle(END, 2.0)
    ask(router, "r1", 3.0, exclude=("c",))
    assert router.handle(ev.SessionsRead("m", {"t/s": "c"}), 4.0) == []
    assert owners(router, 4.0) == ("a", "")


def test_an_end_keeps_its_place_among_requests_that_wait_for_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A takeover is applied in parts; the requests of its pool wait, and what comes before and after the end stays so."""
    monkeypatch.setattr(unfinished_work, "PART", 1)
    router = fleet(owns_all=False)
    router.handle(ev.PoolTaken("n"), 0.0)
    finish(router, 0.0)
    ask(router, "r0", 0.0, model="n")
    router.handle(ev.PoolTaken("m"), 1.0)
    assert router.unfinished
    assert router.handle(_asks("r1"), 1.0) == []
    assert router.handle(END, 1.0) == []
    other = ev.PlaceRequested(request("r2", tokens=100, model="n", tenant="t", session_id="s"), "g")
    assert router.handle(other, 1.0) == [], "of another pool, but after the end"
    finish(router, 2.0)
    assert owners(router, 2.0) == ("", "b")
    router.check_invariants()


def test_the_number_of_remembered_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_ENDED", 2)
    known = Affinity(ttl_s=10.0)
    for now, session in enumerate(["a", "b", "a", "c"]):
        known.end(session, float(now))
        known.check_invariants()
    assert [known.ended_at(session) for session in "abc"] == [2.0, float("-inf"), 3.0]
    known.expire(12.0)
    assert [known.ended_at(session) for session in "abc"] == [float("-inf"), float("-inf"), 3.0]


def test_a_request_from_before_the_end_does_not_displace_the_owner_that_came_after_it() -> None:
    known = Affinity(ttl_s=10.0)
    known.end("s", 5.0)
    assert not known.assign("m", "s", "new", 6.0, asked_at=6.0)
    assert not known.assign("m", "s", "old", 7.0, asked_at=4.0)
    assert known.owner("m", "s", 7.0) == "new"
    assert known.assign("m", "s", "newer", 8.0, asked_at=8.0)
