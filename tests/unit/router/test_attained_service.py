"""What programs have been served: who belongs to one, how it decays, and what it does to the order of waiting requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.attained_service import FORGET_S, HALF_LIFE_S, MOST_S, AttainedService
from pointsman_router.core.placement_types import Phase, PlacementRequest
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.fair_order import REQUEST_TOKENS
from pointsman_router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, state


def of(session: str, parent: str = "", agent_parent: str = "", **changes: Any) -> PlacementRequest:
    named = f"t/{parent}" if parent else ""
    return request(session, tenant="t", session_id=session, parent=named, agent_parent=agent_parent, **changes)


def test_sub_agents_of_all_depths_share_their_programs_service() -> None:
    attained = AttainedService()
    attained.add("m", of("root"), 100, 0.0)
    attained.add("m", of("child", parent="root"), 10, 0.0)
    attained.add("m", of("grandchild", agent_parent="child"), 1, 0.0)
    for session in ("root", "child", "grandchild"):
        assert attained.tokens("m", of(session), 0.0) == 111
    # A sub-agent that comes for the first time belongs to it as well.
    assert attained.tokens("m", of("new", agent_parent="root"), 0.0) == 111
    assert attained.tokens("m", of("other"), 0.0) == 0
    assert attained.tokens("other", of("root"), 0.0) == 0


def test_a_parent_that_comes_after_its_sub_agents_belongs_to_them() -> None:
    attained = AttainedService()
    attained.add("m", of("child", parent="root"), 10, 0.0)
    attained.add("m", of("root"), 100, 0.0)
    assert attained.tokens("m", of("child"), 0.0) == 110


def test_requests_without_a_session_have_no_program() -> None:
    attained = AttainedService()
    attained.add("m", request("r"), 100, 0.0)
    assert attained.tokens("m", request("r"), 0.0) == 0
    assert not len(attained)


def test_service_is_halved_and_forgotten() -> None:
    attained = AttainedService()
    attained.add("m", of("a"), 800, 0.0)
    attained.add("m", of("a"), 100, HALF_LIFE_S)
    assert attained.tokens("m", of("a"), 3 * HALF_LIFE_S) == pytest.approx(125)
    attained.expire(HALF_LIFE_S + FORGET_S - 1)
    assert len(attained) == 1
    attained.expire(HALF_LIFE_S + FORGET_S)
    assert not len(attained)


def test_no_number_of_sessions_takes_more_memory_than_is_set() -> None:
    attained = AttainedService(max_sessions=100)
    for number in range(1_000):
        attained.add("m", of(f"s{number}", parent=f"p{number % 7}"), 1, float(number))
        assert len(attained) <= 100
    assert attained.tokens("m", of("s999"), 999.0) > 0


def held(asked: PlacementRequest, new: int, since: float) -> HeldRequest:
    return HeldRequest(asked, "g", "m", since, since + 30.0, "saturated", new, for_room=True)


Arrival = tuple[float, int, int, int]


@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 40), st.integers(0, 3), st.integers(0, 200_000), st.integers(0, 2)), max_size=25
    ),
    ageing=st.sampled_from([100.0, 5_000.0]),
)
def test_whoever_came_first_of_a_program_is_never_passed_by_one_like_him(
    arrivals: list[Arrival], ageing: float
) -> None:
    attained, queue = AttainedService(), HoldQueue(QueueSettings(ageing_tokens_per_s=ageing, fair="program"))
    now, number = 0.0, 0
    programs: dict[str, tuple[int, int]] = {}
    for pause, program, tokens, more in arrivals:
        now += pause
        for new in (tokens, *([tokens] * more)):
            name, number = f"r{number:03}", number + 1
            asked = of(name, parent=f"p{program}", tokens=max(new, 1))
            served = attained.tokens("m", asked, now)
            queue.add(held(request_with(asked, served), new, now))
            attained.add("m", asked, new + REQUEST_TOKENS, now)
            programs[name] = program, new
        queue.check_invariants()
    order = [waiting.request.request_id for waiting in queue.order("m")]
    for at, name in enumerate(order):
        for later in order[at + 1 :]:
            like_him = programs[later][0] == programs[name][0] and programs[later][1] <= programs[name][1]
            assert not like_him or later > name, (later, name)


def request_with(asked: PlacementRequest, served: float) -> PlacementRequest:
    return request(
        asked.request_id,
        tokens=asked.input_tokens,
        tenant=asked.tenant,
        session_id=asked.session_id,
        parent=asked.parent,
        program_tokens=served,
    )


def test_service_outweighs_at_most_some_age() -> None:
    queue = HoldQueue(QueueSettings(ageing_tokens_per_s=5_000.0, fair="program"))
    queue.add(held(request("served", tokens=10, program_tokens=1e12), 10, 0.0))
    queue.add(held(request("new", tokens=10), 10, MOST_S - 1.0))
    queue.add(held(request("newest", tokens=10), 10, MOST_S + 1.0))
    assert [waiting.request.request_id for waiting in queue.order("m")] == ["new", "served", "newest"]


def ask(router: RouterState, asked: PlacementRequest, now: float) -> list[ev.Placed]:
    return placed(router.handle(ev.PlaceRequested(asked, "g"), now))


def placed(effects: list[ev.Effect]) -> list[ev.Placed]:
    return [effect for effect in effects if isinstance(effect, ev.Placed)]


def drained(router: RouterState, names: list[str], now: float) -> list[str]:
    """End the requests one after the other; return the ids of those that were placed instead, in order."""
    found = []
    while names:
        now += 1.0
        for effect in placed(router.handle(ev.Finished(names.pop(0), "OK", output_tokens=10), now)):
            names.append(effect.request_id)
            found.append(effect.request_id)
        router.check_invariants()
    return found


@pytest.mark.parametrize(
    ("fair", "first"), [("off", "a1 a2 a3 user"), ("tenant", "a1 a2 a3 user"), ("program", "user a1 a2 a3")]
)
def test_a_program_of_many_sub_agents_does_not_stand_before_a_user(fair: Any, first: str) -> None:
    router = state(limits=SaturationLimits(1), queue=QueueSettings(fair=fair))
    join(router, "a", 0)
    assert ask(router, of("root", tokens=40_000), 0.0)
    for number in (1, 2, 3):
        assert not ask(router, of(f"a{number}", parent="root", tokens=1_000), 1.0)
    assert not ask(router, of("user", tokens=1_000), 1.5)
    assert " ".join(drained(router, ["root"], 2.0)) == first


def test_explain_shows_why_a_sub_agent_waited() -> None:
    router = state(limits=SaturationLimits(1), queue=QueueSettings(fair="program"))
    join(router, "a", 0)
    ask(router, of("root", tokens=40_000), 0.0)
    ask(router, of("child", parent="root", tokens=1_000), 0.0)
    (answer,) = placed(router.handle(ev.Finished("root", "OK", output_tokens=88), 1.0))
    assert answer.decision.notes == (
        "program_served: its program had been served 40,512 tokens lately, so others went first",
    )


def test_what_is_refused_or_leaves_the_queue_is_no_service() -> None:
    router = state(limits=SaturationLimits(1), queue=QueueSettings(size=1, timeout_s=30.0, fair="program"))
    join(router, "a", 0)
    ask(router, request("busy"), 0.0)

    def served(now: float) -> float:
        return router.requests.attained.tokens("m", of("root"), now)

    for asked_at, ended_at, event in (
        (1.0, 2.0, ev.Finished("left", "CANCELLED")),
        (3.0, 34.0, ev.Tick()),  # the time that a request may wait has passed
        (35.0, 36.0, ev.PlaceRequested(request("first", tenant="u", priority=Priority.INTERACTIVE), "g")),
    ):
        assert not ask(router, of("left", parent="root", tokens=9_000), asked_at)
        assert served(asked_at) == pytest.approx(9_000 + REQUEST_TOKENS)
        router.handle(event, ended_at)
        assert served(ended_at) == pytest.approx(0.0)
    # The queue is full.
    [refused] = router.handle(ev.PlaceRequested(of("refused", parent="root", tokens=9_000), "g"), 37.0)
    assert isinstance(refused, ev.Refused)
    assert served(37.0) == pytest.approx(0.0)
    router.check_invariants()


def test_the_next_owner_counts_the_open_requests_that_gateways_announce() -> None:
    router = state(limits=SaturationLimits(1), queue=QueueSettings(fair="program"))
    join(router, "a", 0)
    streams = (ev.OpenStream(of("root", tokens=40_000), "a", Phase.DECODE, 10_000),)
    router.handle(ev.GatewayHello("g", streams, frozenset(), frozenset("a")), 0.0)
    assert router.requests.attained.tokens("m", of("child", parent="root"), 0.0) == 30_000
