"""Which process owns a gateway id, and which gateway owns a request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.gateway_claims import GatewayClaims
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Phase
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state

MINE, THEIRS = b"m" * 16, b"t" * 16


def test_an_id_is_its_first_ones_until_a_lease_after_its_last_session() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    assert claims.opened("g", MINE, 0.0)
    assert not claims.claim("g", THEIRS, 1_000.0)
    assert claims.claim("g", MINE, 1_000.0)  # a second stream, when the first is lost unnoticed
    claims.closed("g", 1_000.0)
    assert not claims.claim("g", THEIRS, 1_014.9)
    assert claims.claim("h", THEIRS, 1_014.9)
    assert claims.claim("g", THEIRS, 1_015.0)
    assert not claims.claim("g", MINE, 1_015.0)


def test_a_session_that_never_opens_leaves_nothing_behind() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    assert not claims.claim("g", THEIRS, 14.0)
    claims.expire(14.0)
    assert len(claims) == 1
    claims.expire(15.0)
    assert len(claims) == 0


def test_a_session_that_opens_after_its_lease_has_the_id_unless_another_took_it() -> None:
    claims = GatewayClaims(lease_s=15.0)
    for name in "gh":
        assert claims.claim(name, MINE, 0.0)
    claims.expire(15.0)
    assert claims.claim("h", THEIRS, 15.0)
    assert claims.opened("g", MINE, 16.0)
    assert not claims.opened("h", MINE, 16.0)
    assert not claims.claim("g", THEIRS, 1_000.0)
    assert claims.claim("h", MINE, 1_000.0)


def test_a_lease_that_begins_again_lasts_whole() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    assert claims.claim("g", MINE, 10.0)
    assert not claims.claim("g", THEIRS, 20.0)


def effects_of_end(router: RouterState, request_id: str, gateway_id: str, now: float = 1.0) -> list[type]:
    """Report the end of a request as a gateway does; return the types of the effects."""
    effects = router.handle(ev.GatewayReported(gateway_id, ev.Finished(request_id, "OK")), now)
    router.check_invariants()
    return [type(effect) for effect in effects]


ENDED = [ev.Released, ev.DecisionClosed]


@pytest.mark.parametrize("sender", ["h", ""])
def test_only_its_own_gateway_ends_a_request_while_it_has_a_stream(sender: str) -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", tokens=10), gateway="g")
    assert effects_of_end(router, "r", sender) == [ev.ReportIgnored]
    assert router.reservations.get("r") is not None
    assert effects_of_end(router, "r", "g") == ENDED
    assert effects_of_end(router, "r", sender) == []  # as of any that nobody knows


@pytest.mark.parametrize("sender", ["g", ""])
def test_a_request_of_the_unary_form_is_ended_by_whoever_is_told_to(sender: str) -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", tokens=10), gateway="")
    assert effects_of_end(router, "r", sender) == ENDED


def test_what_a_gateway_left_is_ended_by_any_until_it_is_back() -> None:
    router = state(gateway_lease_s=15.0)
    join(router, "a", 1)
    for name in ("r", "s"):
        place(router, request(name, tokens=10), gateway="g")
    router.handle(ev.GatewayLost("g"), 1.0)
    assert effects_of_end(router, "r", "h", 2.0) == ENDED
    open_stream = ev.OpenStream(request("s", tokens=10), "a", Phase.DECODE, 0)
    router.handle(ev.GatewayHello("g", (open_stream,)), 3.0)
    assert effects_of_end(router, "s", "h", 4.0) == [ev.ReportIgnored]


def test_after_a_takeover_ends_count_before_their_gateways_hello() -> None:
    router = state(owns_all=False)
    join(router, "a", 1)
    known = Reservation("r", "g", "a", "d", 10, 10, pool="m")
    router.handle(ev.PoolTaken("m", (known, replace(known, request_id="s"))), 1.0)
    assert effects_of_end(router, "r", "g", 2.0) == ENDED
    assert effects_of_end(router, "s", "h", 2.0) == ENDED


def test_a_held_request_is_cancelled_by_its_own_gateway_alone() -> None:
    router = state(limits=SaturationLimits(1))
    join(router, "a", 1)
    place(router, request("x", tokens=10), gateway="g")
    assert router.handle(ev.PlaceRequested(request("r", tokens=10), "g"), 1.0) == []
    assert effects_of_end(router, "r", "h") == [ev.ReportIgnored]
    assert router.held_requests.queue.get("r") is not None
    assert effects_of_end(router, "r", "g") == []
    assert router.held_requests.queue.get("r") is None


OTHERS = [
    ev.PlaceRequested(request("r", tokens=10), "h"),
    ev.PlaceRequested(request("r", tokens=10)),
    ev.StreamOpened("h", ev.OpenStream(request("r", tokens=10), "b", Phase.DECODE, 0)),
    ev.GatewayHello("h", (ev.OpenStream(request("r", tokens=10), "b", Phase.DECODE, 0),)),
    ev.GatewayHello("h", (), frozenset({"r"})),
    ev.GatewayReported("h", ev.StepDone("r", 0, ok=True)),
    ev.GatewayReported("h", ev.StepDone("r", 0, ok=False, instance_failed=True)),
    ev.GatewayReported("h", ev.FirstToken("r", ("a",))),
    ev.GatewayReported("h", ev.Finished("r", "FAILED")),
    ev.GatewayReported("", ev.Finished("r", "FAILED")),
]


@pytest.mark.parametrize("event", OTHERS)
@pytest.mark.parametrize("held", [False, True])
def test_nothing_that_another_says_or_asks_touches_a_gateways_request(event: ev.Event, held: bool) -> None:
    router = state(limits=SaturationLimits(1))
    join(router, "a", 1)
    if held:
        place(router, request("x", tokens=10), gateway="g")
    router.handle(ev.PlaceRequested(request("r", tokens=10), "g"), 1.0)
    before, queued = list(router.reservations), list(router.held_requests.queue)
    effects = router.handle(event, 1.0)
    assert (list(router.reservations), list(router.held_requests.queue)) == (before, queued)
    assert {type(effect) for effect in effects} <= {ev.ReportIgnored, ev.Refused}
    for effect in effects:
        if isinstance(effect, ev.Refused):
            assert (effect.code, effect.gateway_id) == ("ALREADY_EXISTS", getattr(event, "gateway_id", ""))
    router.check_invariants()
    assert effects_of_end(router, "r", "g") == ([] if held else ENDED)


@pytest.mark.parametrize("event", [event for event in OTHERS if getattr(event, "gateway_id", "")])
def test_a_request_of_a_gateway_without_a_stream_is_taken_over_by_who_says_to_have_it(event: ev.Event) -> None:
    router = state(gateway_lease_s=15.0)
    join(router, "a", 1)
    place(router, request("r", tokens=10), gateway="g")
    router.handle(ev.GatewayLost("g"), 1.0)
    effects = router.handle(event, 2.0)
    assert not any(isinstance(effect, ev.ReportIgnored | ev.Refused) for effect in effects)
    router.check_invariants()


def test_a_gateway_that_comes_back_has_its_streams_and_what_it_waits_for_again() -> None:
    router = state(limits=SaturationLimits(1), gateway_lease_s=15.0)
    join(router, "a", 1)
    place(router, request("r", tokens=10), gateway="g")
    stream = ev.OpenStream(request("r", tokens=10), "a", Phase.DECODE, 0)
    router.handle(ev.GatewayLost("g"), 1.0)
    for now in (2.0, 3.0):  # the second time on a new stream, when the first is lost unnoticed
        assert ev.ReportIgnored("r", "g") not in router.handle(ev.GatewayHello("g", (stream,)), now)
        [reservation] = router.reservations
        assert (reservation.gateway_id, reservation.lease_until) == ("g", None)
    router.check_invariants()
