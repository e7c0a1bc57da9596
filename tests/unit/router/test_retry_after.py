"""When a refused request may come again: as late as its class waits, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.retry_after import MOST_S, RetryAfter
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, state

BATCH, STANDARD, INTERACTIVE = Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE


def full(size: int, timeout_s: float = 10.0) -> RouterState:
    router = state(limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=size, timeout_s=timeout_s))
    join(router, "a", 1)
    router.handle(ev.PlaceRequested(request("busy", 100), "g"), 0.0)
    return router


def refused(effects: list[ev.Effect]) -> dict[str, float | None]:
    return {effect.request_id: effect.retry_after_s for effect in effects if isinstance(effect, ev.Refused)}


def ask(router: RouterState, name: str, now: float, priority: Priority = STANDARD) -> dict[str, float | None]:
    return refused(router.handle(ev.PlaceRequested(request(name, 100, priority=priority), "g"), now))


def test_who_has_waited_in_vain_comes_again_no_sooner_than_it_waited() -> None:
    router = full(size=1)
    assert ask(router, "held", 0.0) == {}
    assert ask(router, "early", 1.0) == {"early": 1.0}, "nothing is known yet"
    assert refused(router.handle(ev.Tick(), 10.5)) == {"held": 10.5}
    assert ask(router, "next", 11.0) == {}
    assert ask(router, "later", 11.0) == {"later": 10.5}, "its class waits so long"


def test_a_class_waits_at_least_as_long_as_those_before_it() -> None:
    router = full(size=1)
    ask(router, "b", 0.0, BATCH)
    assert ask(router, "i", 4.0, INTERACTIVE) == {"b": 4.0}, "displaced"
    assert ask(router, "b2", 4.0, BATCH) == {"b2": 4.0}
    assert ask(router, "i2", 4.0, INTERACTIVE) == {"i2": 1.0}
    router.handle(ev.Finished("busy", "OK"), 9.0)
    assert router.reservations.get("i") is not None
    ask(router, "i3", 9.0, INTERACTIVE)
    assert ask(router, "i4", 9.0, INTERACTIVE) == {"i4": 5.0}, "as long as i waited for its placement"
    assert ask(router, "b3", 9.0, BATCH) == {"b3": 5.0}


def test_what_was_waited_long_ago_is_forgotten() -> None:
    router = full(size=1)
    ask(router, "held", 0.0)
    router.handle(ev.Tick(), 10.0)
    router.handle(ev.Tick(), 10.0 + MOST_S)
    ask(router, "next", 100.0)
    assert ask(router, "other", 100.0) == {"other": 1.0}


@given(st.lists(st.tuples(st.sampled_from(Priority), st.floats(0, 1e6)), max_size=30), st.floats(0, 1e6))
def test_nobody_is_sent_away_for_less_than_the_least_or_more_than_the_most(
    waits: list[tuple[Priority, float]], waited_s: float
) -> None:
    retry_after = RetryAfter(1.0)
    for priority, seconds in waits:
        retry_after.waited("m", priority, seconds, 0.0)
    by_class = [retry_after.seconds("m", priority, waited_s) for priority in (INTERACTIVE, STANDARD, BATCH)]
    assert by_class == sorted(by_class)
    assert all(1.0 <= seconds <= MOST_S for seconds in by_class)
    assert retry_after.seconds("other", STANDARD) == 1.0
