"""Plans that are decided slice by slice: the end of a slice, the placement of the rest, holds between two slices, and what the
prefill curve learns."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pointsman_common.core.key_report_types import Delta
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import (
    Decision,
    FleetView,
    Phase,
    PlacementRequest,
    PolicyResult,
    PrefillBacklog,
    StepKind,
)
from pointsman_router.core.policy.base import Policy, hold, serve, slice_of
from pointsman_router.core.prefill_curve import PrefillCurve
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import RouterState, StateSettings
from tests.support.router_values import join, place, request

KEYS = tuple(range(1, 65))  # 1,024 tokens


@dataclass(frozen=True)
class Slices(Policy):
    """Plans slices of 256 tokens until `hold_at` tokens are cached, then a hold while other prefills are open, then SERVE."""

    name: ClassVar[str] = "slices"
    hold_at: int = 10**9

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        best = max(view.eligible(), key=lambda one: one.cached_tokens)
        busy = any(candidate.prefill_backlog.queue for candidate in view.candidates)
        if best.cached_tokens >= self.hold_at and busy:
            return hold("busy", queue_penalty_s=best.new_tokens)
        if request.sliceable_tokens and best.new_tokens > 300:
            return slice_of(best, best.cached_tokens + 256, "slice")
        return serve(best, "rest")


def router(hold_at: int = 10**9, engine: dict[str, Any] | None = None, **settings: Any) -> RouterState:
    made = RouterState(Slices(hold_at), StateSettings(**settings), router_id="t")
    for number, name in enumerate("ab"):
        join(made, name, number, **(engine or {}))
    return made


def prompt() -> PlacementRequest:
    return request("r", tokens=1_030, keys=KEYS, sliceable_tokens=1_030, session_id="s")


def done(made: RouterState, step: int, now: float, name: str = "r") -> list[ev.Effect]:
    effects = made.handle(ev.StepDone(name, step, ok=True), now)
    made.check_invariants()
    return effects


def placed(effects: list[ev.Effect]) -> ev.Placed:
    [answer] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    return answer


def test_without_a_gateway_a_prompt_is_not_cut() -> None:
    answer = place(router(), prompt(), gateway="")
    assert isinstance(answer, ev.Placed)
    assert (answer.step.kind, answer.last) == (StepKind.SERVE, True)


@pytest.mark.parametrize(
    ("engine", "prefixes"),
    [
        ({}, (256, 512, 768)),
        ({"sparse_prefixes": True}, (256, 512, 768)),
        ({"uncertain_blocks": 1}, (256, 496, 736, 976)),
    ],
    ids=["plain", "sparse", "uncertain"],
)
def test_a_prompt_is_computed_part_by_part_and_then_served(engine: dict[str, Any], prefixes: tuple[int, ...]) -> None:
    made = router(engine=engine)
    answer = place(made, prompt())
    assert isinstance(answer, ev.Placed)
    where = answer.step.instance_id
    for number, prefix in enumerate(prefixes):
        assert (answer.step.kind, answer.step.prefix_tokens) == (StepKind.PREFILL, prefix)
        assert (answer.step_index, answer.last, answer.gateway_id) == (number, False, "g")
        reserved = made.reservations.get("r")
        assert reserved is not None
        assert (reserved.new_tokens, reserved.cached_tokens, reserved.step_index) == (256, prefix - 256, number)
        effects = done(made, number, 0.5 + number / 4)
        answer = placed(effects)
        [decided] = [effect.decision for effect in effects if isinstance(effect, ev.DecisionMade)]
        assert decided.decision_id == answer.decision.decision_id
        assert len(decided.result.steps) == 1, "each part is a decision of its own, to be made again from its own view"
        assert decided.previous_id
        assert decided.request.age_s == 0.5 + number / 4
    assert (answer.step.kind, answer.last, answer.step_index) == (StepKind.SERVE, True, len(prefixes))
    assert {step.instance_id for step in answer.decision.result.steps} == {where}
    made.handle(ev.FirstToken("r"), 5.0)
    finished = ev.Finished("r", "OK", cached_tokens=1_024)
    [closed] = [effect for effect in made.handle(finished, 6.0) if isinstance(effect, ev.DecisionClosed)]
    assert closed.decision is not None
    assert (closed.decision_id, closed.finished) == (answer.decision.decision_id, finished)
    assert (closed.decision.decision_id, closed.decision.result) == (closed.decision_id, answer.decision.result)
    made.check_invariants()
    assert len(made.reservations) == 0


def test_asked_again_within_a_plan_the_same_step_is_answered() -> None:
    made = router()
    place(made, prompt())
    answer = placed(done(made, 0, 1.0))
    again = place(made, prompt(), 1.5)
    assert isinstance(again, ev.Placed)
    assert (again.step, again.step_index, again.last) == (answer.step, answer.step_index, answer.last)
    assert again.decision.decision_id == answer.decision.decision_id
    assert made.handle(ev.StepDone("r", 0, ok=True), 2.0) == [], "a step ends once"


def test_a_slice_that_fails_is_followed_by_one_serve_there() -> None:
    made = router()
    place(made, prompt())
    first = placed(done(made, 0, 1.0))
    answer = placed(made.handle(ev.StepDone("r", 1, ok=False, error="not cached any more"), 2.0))
    assert (answer.step.kind, answer.step.instance_id, answer.last) == (StepKind.SERVE, first.step.instance_id, True)
    assert answer.decision.notes[-1] == "prefill_failed: not cached any more"
    made.check_invariants()


def test_a_slice_that_is_not_known_to_be_there_is_the_last() -> None:
    made = router()
    first = place(made, request("r", tokens=1_030, sliceable_tokens=1_030))
    assert isinstance(first, ev.Placed)
    assert first.step.kind is StepKind.PREFILL
    assert placed(done(made, 0, 0.5)).step.kind is StepKind.SERVE


def held_between(made: RouterState, deadline_s: float | None = None) -> str:
    """Hold request r after its first slice, because request `busy` prefills on the other instance; return that instance."""
    answer = place(made, prompt())
    assert isinstance(answer, ev.Placed)
    other = "ab".replace(answer.step.instance_id, "")
    busy = place(made, request("busy", tokens=5_000, exclude=(answer.step.instance_id,)))
    assert isinstance(busy, ev.Placed)
    assert busy.step.instance_id == other
    effects = made.handle(ev.StepDone("r", 0, ok=True, deadline_s=deadline_s), 1.0)
    assert not [effect for effect in effects if isinstance(effect, ev.Placed)]
    made.check_invariants()
    return other


def test_the_rest_may_have_to_wait_and_keeps_its_place_with_nothing_to_compute() -> None:
    made = router(hold_at=256)
    held_between(made)
    assert made.held_requests.queue.count("m") == 1
    kept = made.reservations.get("r")
    assert kept is not None
    assert (kept.pending_tokens, kept.phase) == (0, Phase.PREFILL)
    answer = placed(made.handle(ev.FirstToken("busy"), 2.0))
    assert (answer.request_id, answer.step_index, answer.step.prefix_tokens) == ("r", 1, 512)
    assert made.held_requests.queue.count("m") == 0
    made.check_invariants()


def test_a_rest_that_waited_too_long_is_served_by_default() -> None:
    made = router(hold_at=256, stale_keys_s=100.0)
    other = held_between(made)
    [where] = {"a", "b"} - {other}
    made.handle(ev.KeysReported("ab".index(where), where, Delta(1, 1, list(KEYS[:16]), [])), 1.0)
    assert not [effect for effect in made.handle(ev.Tick(), 30.5) if isinstance(effect, ev.Placed)]
    answer = placed(made.handle(ev.Tick(), 31.5))
    assert (answer.step.kind, answer.last, answer.step_index) == (StepKind.SERVE, True, 1)
    assert "hold_expired" in answer.decision.notes
    made.check_invariants()


def test_a_rest_is_answered_before_its_gateway_waits_no_longer() -> None:
    made = router(hold_at=256, queue=QueueSettings(timeout_s=300.0), stale_keys_s=100.0)
    where = "ab".replace(held_between(made, deadline_s=5.0), "")
    made.handle(ev.KeysReported("ab".index(where), where, Delta(1, 1, list(KEYS[:16]), [])), 1.0)
    assert not [effect for effect in made.handle(ev.Tick(), 4.9) if isinstance(effect, ev.Placed)]
    assert placed(made.handle(ev.Tick(), 5.0)).last
    made.check_invariants()


@pytest.mark.parametrize("placed_late", [False, True])
def test_a_gateway_that_went_on_alone_is_counted_once_and_where_it_is(placed_late: bool) -> None:
    made = router(hold_at=256)
    other = held_between(made)
    where = "ab".replace(other, "")
    if placed_late:
        # The placement of the next slice and the gateway's report cross on the stream.
        assert placed(made.handle(ev.FirstToken("busy"), 2.0)).step.prefix_tokens == 512
    alone = ev.StreamOpened("g", ev.OpenStream(prompt(), where, Phase.PREFILL, 256))
    effects = made.handle(alone, 2.5)
    assert not [effect for effect in effects if isinstance(effect, ev.Placed)]
    reserved = made.reservations.get("r")
    assert reserved is not None
    assert (reserved.instance_id, reserved.pending_tokens, reserved.phase) == (where, 1_030 - 256, Phase.PREFILL)
    assert made.reservations.counters(where).num_requests == 1
    request_state = made.requests.placed("r")
    assert request_state is not None
    assert (decision := request_state.decision) is not None
    assert (decision.instance_id, decision.notes[-1]) == (where, "next_step_came_too_late")
    made.handle(ev.FirstToken("busy"), 3.0)
    assert not [effect for effect in made.handle(ev.Tick(), 99.0) if isinstance(effect, ev.Placed)], "a second answer"
    made.handle(ev.FirstToken("r"), 100.0)
    for name in ("r", "busy"):
        made.handle(ev.Finished(name, "OK"), 101.0)
    made.check_invariants()
    assert len(made.reservations) == 0


def test_who_goes_on_alone_at_a_router_that_does_not_know_the_request_counts_there() -> None:
    made = router()
    made.handle(ev.StreamOpened("g", ev.OpenStream(prompt(), "a", Phase.PREFILL, 0)), 1.0)
    assert made.reservations.counters("a").num_requests == 1
    made.handle(ev.Finished("r", "OK"), 2.0)
    made.check_invariants()
    assert len(made.reservations) == 0


def test_a_rest_that_nobody_can_take_anew_is_served_where_it_was() -> None:
    made = router()
    answer = place(made, prompt())
    assert isinstance(answer, ev.Placed)
    made.handle(ev.DrainsChanged({"a": "1", "b": "1"}), 0.5)
    rest = placed(done(made, 0, 1.0))
    assert (rest.step.kind, rest.step.instance_id, rest.last) == (StepKind.SERVE, answer.step.instance_id, True)


def test_a_client_that_leaves_between_two_parts_leaves_nothing_behind() -> None:
    made = router(hold_at=256)
    held_between(made)
    made.handle(ev.Finished("r", "CANCELLED"), 1.5)
    assert made.reservations.get("r") is None
    assert made.held_requests.queue.count("m") == 0
    made.check_invariants()


@pytest.mark.parametrize("knows", [True, False])
def test_a_gateway_that_says_hello_again_still_waits_for_the_rest(knows: bool) -> None:
    made = router(hold_at=256)
    other = held_between(made)
    where = "ab".replace(other, "")
    streams = (ev.OpenStream(prompt(), where, Phase.PREFILL, 0),) if knows else ()
    busy = ev.OpenStream(request("busy", tokens=5_000), other, Phase.PREFILL, 0)
    made.handle(ev.GatewayHello("g", (*streams, busy)), 1.5)
    assert made.held_requests.queue.count("m") == (1 if knows else 0)
    assert (made.reservations.get("r") is not None) is knows
    made.check_invariants()


def test_a_lost_gateway_gives_the_rest_up() -> None:
    made = router(hold_at=256, gateway_lease_s=5.0)
    held_between(made)
    made.handle(ev.GatewayLost("g"), 1.5)
    assert made.held_requests.queue.count("m") == 0
    made.handle(ev.Tick(), 7.0)
    assert len(made.reservations) == 0
    made.check_invariants()


def test_a_pool_that_comes_back_makes_gateways_end_their_plans() -> None:
    made = router(hold_at=256)
    held_between(made)
    effects = made.handle(ev.PoolTaken("m"), 2.0)
    [refused] = [effect for effect in effects if isinstance(effect, ev.Refused)]
    assert (refused.request_id, refused.not_serving, refused.gateway_id) == ("r", True, "g")
    made.check_invariants()


def test_a_new_owner_lets_the_request_ask_anew_or_ends_a_failed_plan_by_one_serve() -> None:
    """The new owner has the request from the store and its gateway, without its slices."""
    made = router()
    kept = Reservation("r", "g", "a", "one-7", 1_030, 256, pool="m")
    made.handle(ev.PoolTaken("m", (kept,)), 1.0)
    made.handle(ev.GatewayHello("g", (ev.OpenStream(prompt(), "a", Phase.PREFILL, 0),)), 1.1)
    [refused] = made.handle(ev.StepDone("r", 1, ok=True), 2.0)
    assert isinstance(refused, ev.Refused)
    assert (refused.request_id, refused.not_serving, refused.gateway_id) == ("r", True, "g")
    answer = placed(made.handle(ev.StepDone("r", 1, ok=False), 2.0))
    assert (answer.step.kind, answer.step.instance_id, answer.last) == (StepKind.SERVE, "a", True)
    assert (answer.gateway_id, answer.decision.result.reason) == ("g", "recovered")
    made.handle(ev.FirstToken("r"), 3.0)
    made.handle(ev.Finished("r", "OK"), 4.0)
    made.check_invariants()
    assert len(made.reservations) == 0


def test_a_new_owner_counts_no_progress_before_it_knew_of_a_prefill() -> None:
    made = router()
    made.handle(ev.PoolTaken("m", (Reservation("r", "g", "a", "one-7", 1_030, 1_030, pool="m"),)), 50.0)
    made.handle(ev.GatewayHello("g", (ev.OpenStream(prompt(), "a", Phase.PREFILL, 0),)), 51.0)
    answer = place(made, request("t", tokens=1_030), 52.0)
    assert isinstance(answer, ev.Placed)
    [busy] = [candidate for candidate in answer.decision.view.candidates if candidate.instance_id == "a"]
    assert busy.prefill_backlog.advanced_at == 51.0
    made.check_invariants()


def test_a_new_owner_goes_on_from_what_is_computed() -> None:
    made = router()
    kept = Reservation("r", "g", "a", "one-7", 1_030, 256, pool="m")
    made.handle(ev.PoolTaken("m", (kept,)), 1.0)
    made.handle(ev.KeysReported(0, "a", Delta(1, 1, list(KEYS[:16]), [])), 1.1)
    made.handle(ev.StepDone("r", 0, ok=True), 1.2)
    made.handle(ev.Finished("r", "CANCELLED"), 1.3)
    again = place(made, replace(prompt(), request_id="r.1"), 1.3)
    assert isinstance(again, ev.Placed)
    assert (again.step.kind, again.step.instance_id, again.step.prefix_tokens) == (StepKind.PREFILL, "a", 512)
    made.check_invariants()


# ---- what prefills teach ----


def learned(made: RouterState) -> tuple[int, PrefillCurve]:
    return made.prefill_observer.samples("m", ""), made.prefill_observer.curve("m", "")


def test_prefills_one_after_another_teach_what_each_took() -> None:
    made = router()
    for number in range(3):
        place(made, request(f"r{number}", tokens=10_000, exclude=("b",)))
    for number in range(3):
        made.handle(ev.FirstToken(f"r{number}"), 2.0 * (number + 1))
        made.check_invariants()
    count, curve = learned(made)
    assert count == 3
    assert curve.cost_s(10_000, 0) == pytest.approx(2.0, rel=0.05)


def test_what_ends_out_of_order_teaches_nothing() -> None:
    made = router()
    for name in ("long", "short"):
        place(made, request(name, tokens=10_000, exclude=("b",)))
    made.handle(ev.FirstToken("short"), 1.0)
    made.handle(ev.FirstToken("long"), 5.0)
    assert learned(made)[0] == 0


def test_an_engine_that_cuts_long_prompts_teaches_by_lone_ones_only() -> None:
    made = RouterState(Slices(), StateSettings(), router_id="t")
    join(made, "a", 0, long_prefill_token_threshold=4_096)
    for name in ("one", "two"):
        place(made, request(name, tokens=10_000))
    made.handle(ev.FirstToken("one"), 2.0)
    made.handle(ev.FirstToken("two"), 4.0)
    assert learned(made)[0] == 0
    place(made, request("three", tokens=10_000), 10.0)
    made.handle(ev.FirstToken("three"), 12.0)
    assert learned(made)[0] == 1


def test_a_whole_answer_that_tells_who_refused_it_teaches_nothing() -> None:
    made = router()
    for name, streamed in (("whole", False), ("stream", True)):
        place(made, request(name, tokens=10_000, exclude=("b",), streamed=streamed))
        made.handle(ev.FirstToken(name, ("b",)), 60.0)
        assert learned(made)[0] == streamed
        made.handle(ev.Finished(name, "OK"), 60.0)
        made.check_invariants()


def test_cancelled_prefills_teach_nothing_and_are_not_watched() -> None:
    made = router()
    place(made, request("r", tokens=10_000, exclude=("b",)))
    made.handle(ev.Finished("r", "CANCELLED"), 1.0)
    made.check_invariants()
    assert learned(made)[0] == 0


def test_hardware_is_told_apart() -> None:
    made = RouterState(Slices(), StateSettings(), router_id="t")
    join(made, "a", 0, hardware="fast")
    join(made, "b", 1, hardware="slow")
    for name, other, seconds in (("a", "b", 1.0), ("b", "a", 10.0)):
        place(made, request(name, tokens=10_000, exclude=(other,)))
        made.handle(ev.FirstToken(name), seconds)
    decision = made.explain(request("?", tokens=100), 20.0)
    assert isinstance(decision, Decision)
    assert decision.view.curves["slow"].cost_s(10_000, 0) > 5 * decision.view.curves["fast"].cost_s(10_000, 0)
    assert decision.view.mean_work.tokens == 10_000


def test_the_queue_of_an_instance_is_seen_as_it_moves() -> None:
    made = router()
    place(made, request("first", tokens=1_030, keys=KEYS, exclude=("b",)), 1.0)
    place(made, request("second", tokens=500, exclude=("b",)), 2.0)
    made.handle(ev.KeysReported(0, "a", Delta(1, 1, list(KEYS[:32]), [])), 3.0)
    decision = made.explain(request("?", tokens=100), 4.0)
    assert isinstance(decision, Decision)
    found = decision.view.find("a")
    assert found is not None
    assert found.prefill_backlog.queue == ((518, 512), (500, 0))
    assert found.prefill_backlog.advanced_at == 3.0
    made.check_invariants()


def test_what_is_left_of_a_prompt_between_its_slices_is_seen() -> None:
    made = router()
    place(made, request("long", tokens=1_030, keys=KEYS, sliceable_tokens=1_030, exclude=("b",)), 1.0)

    def seen(now: float) -> PrefillBacklog:
        decision = made.explain(request("?", tokens=100), now)
        assert isinstance(decision, Decision)
        found = decision.view.find("a")
        assert found is not None
        return found.prefill_backlog

    first = seen(2.0)
    [(who, left, there)] = first.remainders
    assert (who, left + there, first.requests) == ("long", 1_030, 1)
    assert first.queue == ((there, 0),)
    made.handle(ev.Finished("long", "CANCELLED"), 3.0)
    gone = seen(3.0)
    assert (gone.remainders, gone.requests) == ((), 0)
    made.check_invariants()


def test_when_an_answer_last_began_is_seen_while_the_instance_has_open_requests() -> None:
    made = router()
    for name in ("first", "second"):
        place(made, request(name, tokens=100, exclude=("b",)), 1.0)

    def seen(now: float) -> float | UnsetType:
        decision = made.explain(request("?", tokens=100), now)
        assert isinstance(decision, Decision)
        found = decision.view.find("a")
        assert found is not None
        return found.prefill_backlog.answer_began_at

    assert seen(1.0) is UNSET
    made.handle(ev.FirstToken("first"), 2.0)
    made.handle(ev.FirstToken("second"), 3.0)
    assert seen(3.0) == 3.0
    made.handle(ev.Finished("second", "OK"), 4.0)
    assert seen(4.0) == 3.0
    made.handle(ev.Finished("first", "OK"), 5.0)
    assert seen(5.0) is UNSET
    made.check_invariants()
