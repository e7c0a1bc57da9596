"""The request state machine: one ReportFinished for each attempt, bounded attempts, a deadline in each phase that waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman_gateway.core.request import request_events as ev
from pointsman_gateway.core.request.local_placement import least_inflight
from pointsman_gateway.core.request.request_events import Outcome, RequestTimeouts, StepAssigned, Target
from pointsman_gateway.core.request.request_state_machine import Phase, RequestStateMachine

LIMITS = RequestTimeouts(placement_s=10, prefill_s=20, first_byte_s=30, transfer_s=5, max_retries=2)
A, B = Target("a", "http://a"), Target("b", "http://b", 1)


def begun() -> RequestStateMachine:
    machine = RequestStateMachine("r", LIMITS)
    assert machine.start(0.0) == [ev.AskRouter("r", ())]
    return machine


def serving(target: Target = A, **step: Any) -> RequestStateMachine:
    machine = begun()
    given = StepAssigned("r", target, **step)
    assert machine.handle(given, 1.0) == [ev.Serve(given)]
    return machine


def test_the_plain_way() -> None:
    machine = serving()
    assert machine.deadline == 31.0
    assert machine.handle(ev.ResponseStarted(), 2.0) == [ev.ReportFirstToken("r")]
    assert machine.deadline is None
    assert machine.handle(ev.ResponseEnded(), 3.0) == [ev.ReportFinished("r", Outcome.OK)]
    assert machine.phase is Phase.DONE


def test_prefill_then_serve() -> None:
    machine = begun()
    first = StepAssigned("r", A, prefill_tokens=64)
    assert machine.handle(first, 1.0) == [ev.Prefill(first)]
    assert machine.deadline == 21.0
    assert machine.handle(ev.PrefillEnded(), 2.0) == [ev.AskNextStep("r", 0, "")]
    second = StepAssigned("r", B, index=1)
    assert machine.handle(second, 3.0) == [ev.Serve(second)]


def test_a_late_prefill_is_aborted_and_the_router_asked_what_now() -> None:
    machine = begun()
    machine.handle(StepAssigned("r", A, prefill_tokens=64), 0.0)
    assert machine.handle(ev.Tick(), 19.9) == []
    assert machine.handle(ev.Tick(), 20.0) == [ev.AbortUpstream(), ev.AskNextStep("r", 0, "deadline", True)]


def test_without_a_next_step_the_prefilled_instance_serves() -> None:
    for event, now in ((ev.Tick(), 99.0), (ev.RouterLost("r"), 3.0)):
        machine = begun()
        machine.handle(StepAssigned("r", A, prefill_tokens=64), 1.0)
        machine.handle(ev.PrefillEnded("broke"), 2.0)
        effect, report = machine.handle(event, now)
        assert isinstance(effect, ev.Serve)
        assert report == ev.ReportServedAlone("r")
        assert (effect.step.target, effect.step.index, effect.step.degraded) == (A, 1, True)


def test_a_failure_before_the_first_byte_goes_elsewhere_at_most_twice() -> None:
    machine = serving()
    for attempt, excluded in ((1, ("a",)), (2, ("a", "a1"))):
        abort, finished, ask = machine.handle(ev.UpstreamFailed("no", 500), 2.0)
        assert abort == ev.AbortUpstream()
        assert isinstance(finished, ev.ReportFinished)
        assert (finished.outcome, finished.status) == (Outcome.FAILED, 500)
        assert ask == ev.AskRouter(f"r.{attempt}", excluded)
        machine.handle(StepAssigned(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)
    *_, last = machine.handle(ev.UpstreamFailed("no"), 4.0)
    assert isinstance(last, ev.FailRequest)
    assert last.code == ev.INTERNAL
    assert machine.phase is Phase.DONE


def streaming() -> RequestStateMachine:
    machine = serving()
    machine.handle(ev.ResponseStarted(), 2.0)
    return machine


BROKEN = ev.UpstreamFailed("broke off", 200, continuable=True)


def test_a_stream_that_another_instance_can_continue_goes_on_there() -> None:
    machine = streaming()
    assert machine.handle(BROKEN, 3.0) == [
        ev.AbortUpstream(),
        ev.ReportFinished("r", Outcome.FAILED, "broke off", 200, continued=True),
        ev.AskRouter("r.1", ("a",)),
    ]
    assert machine.deadline == 13.0
    step = StepAssigned("r.1", B)
    assert machine.handle(step, 4.0) == [ev.Serve(step)]
    assert machine.handle(ev.ResponseStarted(), 5.0) == [ev.ReportFirstToken("r.1")]
    assert machine.handle(ev.ResponseEnded(), 6.0) == [ev.ReportFinished("r.1", Outcome.OK)]


def test_an_instance_that_cannot_continue_is_not_blamed() -> None:
    machine = streaming()
    machine.handle(BROKEN, 3.0)
    machine.handle(StepAssigned("r.1", B), 3.0)
    assert machine.handle(ev.UpstreamFailed("cannot", 200, innocent=True), 4.0) == [
        ev.AbortUpstream(),
        ev.ReportFinished("r.1", Outcome.CANCELLED, "cannot", 200),
        ev.AskRouter("r.2", ("a", "b")),
    ]


def test_a_stream_is_continued_at_most_as_often_as_a_request_is_retried() -> None:
    machine = streaming()
    for attempt in (1, 2):
        assert machine.handle(BROKEN, 3.0)[-1] == ev.AskRouter(f"r.{attempt}", ("a", "a1")[:attempt])
        machine.handle(StepAssigned(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)
        machine.handle(ev.ResponseStarted(), 3.0)
    assert machine.handle(BROKEN, 4.0) == [
        ev.AbortUpstream(),
        ev.ReportFinished("r.2", Outcome.FAILED, "broke off", 200),
        ev.EndStreamWithError(),
    ]


MOVED = ev.UpstreamFailed("moved", 200, continuable=True, moved=True)


def test_a_stream_that_operators_move_is_no_failure_and_no_retry() -> None:
    machine = streaming()
    for attempt in range(1, 5):
        before = "r" if attempt == 1 else f"r.{attempt - 1}"
        assert machine.handle(MOVED, 3.0) == [
            ev.AbortUpstream(),
            ev.ReportFinished(before, Outcome.CANCELLED, "moved", 200, continued=True),
            ev.AskRouter(f"r.{attempt}", ()),
        ]
        machine.handle(StepAssigned(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)
        machine.handle(ev.ResponseStarted(), 3.0)
    assert machine.handle(BROKEN, 4.0)[-1] == ev.AskRouter("r.5", ("a4",)), "those that it left work"


def test_a_request_that_is_moved_before_its_first_byte_is_asked_anew() -> None:
    machine = serving()
    for attempt in range(1, 5):
        _, finished, ask = machine.handle(ev.UpstreamFailed("moved", 200, moved=True), 3.0)
        assert isinstance(finished, ev.ReportFinished)
        assert (finished.outcome, finished.continued) == (Outcome.CANCELLED, False)
        assert isinstance(ask, ev.AskRouter)
        machine.handle(StepAssigned(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([ev.PlacementRefused("r.1", ev.UNAVAILABLE, "none left")], []),
        ([ev.Tick()], [ev.AbortUpstream(), ev.ReportFinished("r.1", Outcome.FAILED, "no step in time")]),
        (
            [StepAssigned("r.1", B), ev.ResponseRejected(400)],
            [ev.ReportFinished("r.1", Outcome.REJECTED, "rejected", 400)],
        ),
    ],
)
def test_a_stream_with_which_no_instance_goes_on_ends_with_an_error_event(
    events: list[ev.Event], last: list[ev.Effect]
) -> None:
    machine = streaming()
    machine.handle(BROKEN, 3.0)
    for event in events[:-1]:
        machine.handle(event, 20.0)
    assert machine.handle(events[-1], 20.0) == [*last, ev.EndStreamWithError()]
    assert machine.phase is Phase.DONE


def test_the_same_5xx_of_two_instances_is_final_and_nobodys_fault() -> None:
    machine = serving()
    assert machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 2.0)[-1] == ev.AskRouter("r.1", ("a",))
    machine.handle(StepAssigned("r.1", B), 3.0)
    assert machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 4.0) == [
        ev.ReportFinished("r.1", Outcome.REJECTED, "status 500", 500, refused=True, alike=("a",))
    ]
    assert machine.phase is Phase.DONE


@pytest.mark.parametrize(
    "last", [ev.ResponseEnded(), ev.ResponseEnded("its own"), ev.UpstreamFailed("reset"), ev.ClientDisconnected()]
)
def test_who_refused_is_named_once_however_the_answer_of_another_ends(last: ev.Event) -> None:
    """They are named when the answer begins: it may last for minutes, in which the instance would refuse other requests."""
    machine = serving()
    machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 2.0)
    machine.handle(StepAssigned("r.1", B), 3.0)
    assert machine.handle(ev.ResponseStarted(), 4.0) == [ev.ReportFirstToken("r.1", ("a",))]
    (report,) = [effect for effect in machine.handle(last, 5.0) if isinstance(effect, ev.ReportFinished)]
    assert report.refused_by == ()


def test_who_refused_what_another_instance_finds_wrong_is_named() -> None:
    machine = serving()
    machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 2.0)
    machine.handle(StepAssigned("r.1", B), 3.0)
    (report,) = machine.handle(ev.ResponseRejected(400), 4.0)
    assert isinstance(report, ev.ReportFinished)
    assert (report.outcome, report.refused_by) == (Outcome.REJECTED, ("a",))


@pytest.mark.parametrize("second", [ev.UpstreamFailed("status 503", 503, refused=True), ev.UpstreamFailed("reset")])
def test_who_refused_is_named_once_another_has_answered(second: ev.UpstreamFailed) -> None:
    machine = serving()
    machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 2.0)
    machine.handle(StepAssigned("r.1", B), 3.0)
    machine.handle(second, 4.0)
    machine.handle(StepAssigned("r.2", Target("c", "")), 5.0)
    refused_by = ("a", "b") if second.refused else ("a",)
    assert machine.handle(ev.ResponseStarted(), 6.0) == [ev.ReportFirstToken("r.2", refused_by)]


def test_a_refused_prefill_is_no_witness_that_the_request_is_at_fault() -> None:
    """A transfer can fail by itself."""
    machine = begun()
    machine.handle(StepAssigned("r", B, prefill_tokens=64, kv_target=A), 1.0)
    machine.handle(ev.PrefillEnded("status 500", refused=True), 2.0)
    machine.handle(StepAssigned("r", A, index=1), 3.0)
    assert machine.handle(ev.UpstreamFailed("status 500", 500, refused=True), 4.0)[-1] == ev.AskRouter("r.1", ("a",))


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_4xx_of_a_doubted_instance_is_compared_with_what_another_one_answers(status: int) -> None:
    machine = serving(doubted=True)
    aborted, report, asked = machine.handle(ev.ResponseRejected(status), 2.0)
    assert aborted == ev.AbortUpstream()
    assert report == ev.ReportFinished("r", Outcome.FAILED, f"status {status}", status, refused=True)
    assert asked == ev.AskRouter("r.1", ("a",))
    machine.handle(StepAssigned("r.1", B), 3.0)
    assert machine.handle(ev.ResponseStarted(), 4.0) == [ev.ReportFirstToken("r.1", ("a",))]


def test_a_4xx_that_two_instances_answer_is_the_requests_fault_and_a_proven_instance_is_not_compared() -> None:
    machine = serving(doubted=True)
    machine.handle(ev.ResponseRejected(400), 2.0)
    machine.handle(StepAssigned("r.1", B, doubted=True), 3.0)
    assert machine.handle(ev.ResponseRejected(400), 4.0) == [
        ev.ReportFinished("r.1", Outcome.REJECTED, "rejected", 400, alike=("a",))
    ]
    machine = serving()
    assert machine.handle(ev.ResponseRejected(400), 2.0) == [ev.ReportFinished("r", Outcome.REJECTED, "rejected", 400)]


@pytest.mark.parametrize(
    "end", [ev.PlacementRefused("r.1", 8, "busy"), ev.PlacementRefused("r.1", 14, "none"), ev.Tick()]
)
def test_a_client_gets_its_4xx_soon_where_no_other_instance_can_be_asked(end: ev.Event) -> None:
    machine = serving(doubted=True)
    machine.handle(ev.ResponseRejected(400), 2.0)
    assert machine.deadline == 4.0
    [*_, failure] = machine.handle(end, 4.0)
    assert isinstance(failure, ev.FailRequest)
    assert failure.code == ev.INTERNAL, "the runner then answers with what the instance has sent"


def test_a_request_that_breaks_a_second_instance_is_sent_to_no_third() -> None:
    machine = serving()
    assert machine.handle(ev.UpstreamFailed("no answer: reset", broke=True), 2.0)[-1] == ev.AskRouter("r.1", ("a",))
    machine.handle(StepAssigned("r.1", B), 3.0)
    _, report, failure = machine.handle(ev.UpstreamFailed("no answer: reset", broke=True), 4.0)
    assert report == ev.ReportFinished("r.1", Outcome.REJECTED, "no answer: reset", broke=True, alike=("a",))
    assert isinstance(failure, ev.FailRequest)
    assert failure.code == ev.BREAKS_INSTANCES
    assert machine.phase is Phase.DONE


@pytest.mark.parametrize("progressed", [True, False])
def test_in_mid_stream_too_unless_the_second_instance_has_gone_on_for_long(progressed: bool) -> None:
    machine = serving()
    machine.handle(ev.ResponseStarted(), 2.0)
    machine.handle(ev.UpstreamFailed("reset", 200, continuable=True, broke=True, progressed=True), 3.0)
    machine.handle(StepAssigned("r.1", B), 4.0)
    machine.handle(ev.ResponseStarted(), 5.0)
    effects = machine.handle(ev.UpstreamFailed("reset", 200, continuable=True, broke=True, progressed=progressed), 6.0)
    if progressed:
        assert effects[-1] == ev.AskRouter("r.2", ("a", "b"))
    else:
        assert effects[1:] == [
            ev.ReportFinished("r.1", Outcome.REJECTED, "reset", broke=True, alike=("a",)),
            ev.EndStreamWithError(),
        ]


BROKE_AHEAD = ev.UpstreamFailed("no answer: reset", broke=True)
BROKE_PREFILL = ev.PrefillEnded("no answer: reset", True, broke=True)


@pytest.mark.parametrize("events", [(BROKE_AHEAD, BROKE_PREFILL), (BROKE_PREFILL, None), (BROKE_AHEAD, None)])
def test_a_request_that_breaks_both_instances_at_once_is_sent_to_no_third(
    events: tuple[ev.Event, ev.Event | None],
) -> None:
    """Both compute it at the same time. One may be left before it is seen to have died, and takes no connection then."""
    machine, (first, second) = sent_ahead(), events
    effects = machine.handle(first, 1.0)
    if second is not None:
        assert effects == []
        effects = machine.handle(second, 1.1)
    else:
        machine.handle(ev.Tick(), 1.25)
        left = EAGER_B if first is BROKE_PREFILL else EAGER_A
        machine.handle(StepAssigned("r", left, 1), 1.3)
        effects = machine.handle(ev.UpstreamFailed("no answer: ConnectionRefusedError", unreached=True), 1.4)
    assert isinstance(effects[-1], ev.FailRequest)
    assert effects[-1].code == ev.BREAKS_INSTANCES
    assert machine.phase is Phase.DONE


def test_a_prefill_goes_on_for_a_moment_after_the_other_instance_has_broken_the_connection() -> None:
    machine = sent_ahead()
    assert machine.handle(BROKE_AHEAD, 1.0) == []
    assert machine.deadline == 1.25
    ended = [ev.AbortUpstream(), ev.AskNextStep("r", 0, "the other instance: no answer: reset")]
    assert machine.handle(ev.Tick(), 1.25) == ended
    machine = sent_ahead()
    machine.handle(BROKE_AHEAD, 1.0)
    assert machine.handle(ev.PrefillEnded(), 1.1) == [ev.AskNextStep("r", 0, "")]
    assert machine.handle(FOLLOWS, 1.2)[-1] == ev.AskRouter("r.1", ("b",))


def test_an_instance_that_takes_no_connection_is_not_broken_by_the_request() -> None:
    machine = serving()
    machine.handle(ev.UpstreamFailed("no answer: ConnectionRefusedError"), 2.0)
    machine.handle(StepAssigned("r.1", B), 3.0)
    assert machine.handle(ev.UpstreamFailed("no answer: reset", broke=True), 4.0)[-1] == ev.AskRouter("r.2", ("a", "b"))


def test_silence_before_the_first_byte_counts_as_a_failure() -> None:
    machine = serving()
    assert machine.handle(ev.Tick(), 31.0)[-1] == ev.AskRouter("r.1", ("a",))


def test_after_the_first_byte_the_stream_breaks() -> None:
    machine = serving()
    machine.handle(ev.ResponseStarted(), 2.0)
    effects = machine.handle(ev.UpstreamFailed("reset"), 3.0)
    assert effects == [ev.AbortUpstream(), ev.ReportFinished("r", Outcome.FAILED, "reset"), ev.EndStreamWithError()]


def test_a_failure_that_the_engine_told_the_client_is_not_reported_twice() -> None:
    machine = serving()
    machine.handle(ev.ResponseStarted(), 2.0)
    assert machine.handle(ev.ResponseEnded("its own"), 3.0) == [
        ev.AbortUpstream(),
        ev.ReportFinished("r", Outcome.FAILED, "its own"),
    ]


def test_an_answer_of_another_instance_is_an_attempt_of_its_own() -> None:
    """A proxy has sent the request to the next of the instances that it was given."""
    machine = serving()
    finished, adopt, serve, report = machine.handle(ev.OtherAnswered(B), 2.0)
    assert isinstance(finished, ev.ReportFinished)
    assert (finished.attempt_id, finished.outcome, finished.refused) == ("r", Outcome.FAILED, True)
    step = StepAssigned("r.1", B, degraded=True)
    assert [adopt, serve, report] == [ev.AdoptInstance(step), ev.Serve(step), ev.ReportServedAlone("r.1")]
    assert machine.handle(ev.ResponseStarted(), 2.0) == [ev.ReportFirstToken("r.1", ("a",))]
    assert machine.handle(ev.ResponseEnded(), 3.0) == [ev.ReportFinished("r.1", Outcome.OK)]


def test_a_rejection_is_final() -> None:
    machine = serving()
    assert machine.handle(ev.ResponseRejected(422), 2.0) == [ev.ReportFinished("r", Outcome.REJECTED, "rejected", 422)]


def test_a_refusal_reserves_nothing() -> None:
    machine = begun()
    assert machine.handle(ev.PlacementRefused("r", 8, "full", 3.0), 1.0) == [ev.FailRequest(8, "full", 3.0)]


def test_a_model_whose_instances_are_out_of_sight_is_not_unknown() -> None:
    """Its agents are away, or the router is new: the client is to come again, not to give up."""
    machine = begun()
    assert machine.handle(ev.PlacementRefused("r", 5, "no instance serves a model"), 1.0) == [
        ev.FailRequest(14, "No instance is ready for this model.")
    ]


def test_after_a_placement_without_a_router_the_next_attempt_asks_one() -> None:
    machine = begun()
    given = StepAssigned("r", A, degraded=True)
    assert machine.handle(given, 2.0) == [ev.Serve(given)]
    assert machine.handle(ev.UpstreamFailed("no"), 3.0)[-1] == ev.AskRouter("r.1", ("a",))


def test_a_client_that_leaves_ends_every_phase() -> None:
    machine = begun()
    assert machine.handle(ev.ClientDisconnected(), 1.0) == [
        ev.AbortUpstream(),
        ev.ReportFinished("r", Outcome.CANCELLED, "client left"),
    ]
    assert machine.handle(StepAssigned("r", A), 2.0) == []


def test_no_step_in_time_is_an_error() -> None:
    machine = begun()
    abort, finished, fail = machine.handle(ev.Tick(), 10.0)
    assert (abort, finished) == (ev.AbortUpstream(), ev.ReportFinished("r", Outcome.FAILED, "no step in time"))
    assert isinstance(fail, ev.FailRequest)
    assert fail.code == ev.PLACEMENT_TIMEOUT


FIRST = StepAssigned("r", A, prefill_tokens=64, kv_target=B)
SECOND = StepAssigned("r", B, index=1, kv_source=A)
ALONE = StepAssigned("r", B, index=2)


def prefilled(*, inline_kv_transfer: bool = True) -> RequestStateMachine:
    machine = RequestStateMachine("r", LIMITS, inline_kv_transfer=inline_kv_transfer)
    machine.start(0.0)
    assert machine.handle(FIRST, 0.0) == [ev.Prefill(FIRST)]
    assert machine.handle(ev.PrefillEnded(), 1.0) == [ev.AskNextStep("r", 0, "")]
    return machine


def test_an_offload_whose_request_brings_the_kv_along() -> None:
    machine = prefilled()
    assert machine.handle(SECOND, 2.0) == [ev.Serve(SECOND)]
    assert machine.deadline == 7.0
    assert machine.handle(ev.ResponseStarted(), 3.0) == [ev.ReportFirstToken("r")]


def test_an_offload_that_pulls_the_kv_before() -> None:
    machine = prefilled(inline_kv_transfer=False)
    assert machine.handle(SECOND, 2.0) == [ev.PullKv(SECOND)]
    assert machine.deadline == 7.0
    plain = StepAssigned("r", B, index=1)
    assert machine.handle(ev.PullEnded(), 3.0) == [ev.Serve(plain)]
    assert machine.deadline == 33.0
    # From here on it is a request like any other.
    assert machine.handle(ev.UpstreamFailed("no", 500), 4.0)[-1] == ev.AskRouter("r.1", ("b",))


def test_a_transfer_that_fails_is_reported_and_answered_without_it() -> None:
    cases: list[tuple[bool, ev.Event, float, list[ev.Effect]]] = [
        (True, ev.UpstreamFailed("status 500", 500), 3.0, [ev.AbortUpstream(), ev.AskNextStep("r", 1, "status 500")]),
        (True, ev.Tick(), 7.0, [ev.AbortUpstream(), ev.AskNextStep("r", 1, "deadline")]),
        (False, ev.PullEnded("status 500"), 3.0, [ev.AskNextStep("r", 1, "status 500")]),
        (False, ev.Tick(), 7.0, [ev.AbortUpstream(), ev.AskNextStep("r", 1, "deadline")]),
    ]
    for inline_kv_transfer, event, now, expected in cases:
        machine = prefilled(inline_kv_transfer=inline_kv_transfer)
        machine.handle(SECOND, 2.0)
        assert machine.handle(event, now) == expected
        # Whatever the router says now, nothing but a plain SERVE is sent.
        assert machine.handle(StepAssigned("r", B, index=2, prefill_tokens=9, kv_source=A), 8.0) == [ev.Serve(ALONE)]
        assert machine.deadline == 38.0


def test_an_instance_that_is_not_there_is_left_with_its_kv() -> None:
    machine = prefilled()
    machine.handle(SECOND, 2.0)
    abort, finished, ask = machine.handle(ev.UpstreamFailed("no answer"), 3.0)
    assert (abort, ask) == (ev.AbortUpstream(), ev.AskRouter("r.1", ("b",)))
    assert isinstance(finished, ev.ReportFinished)
    # The next attempt may offload again.
    again = StepAssigned("r.1", A, prefill_tokens=64, kv_target=B)
    assert machine.handle(again, 4.0) == [ev.Prefill(again)]


def test_without_a_next_step_the_target_of_a_failed_prefill_serves() -> None:
    machine = RequestStateMachine("r", LIMITS)
    machine.start(0.0)
    machine.handle(FIRST, 0.0)
    machine.handle(ev.PrefillEnded("broke"), 1.0)
    assert machine.handle(ev.RouterLost("r"), 2.0) == [
        ev.Serve(StepAssigned("r", B, 1, degraded=True)),
        ev.ReportServedAlone("r"),
    ]


SLICE = StepAssigned("r", A, prefill_tokens=64)
LOST = ev.ReportFinished("r", Outcome.CANCELLED, "its router was lost between two steps")


def between_slices() -> RequestStateMachine:
    machine = begun()
    machine.handle(SLICE, 0.0)
    machine.handle(ev.PrefillEnded(), 1.0)
    return machine


def test_a_router_that_is_lost_between_two_slices_is_followed_by_another_attempt() -> None:
    machine = between_slices()
    assert machine.handle(ev.RouterLost("r"), 2.0) == [LOST, ev.AskRouter("r.1", (), "a")]
    assert machine.deadline == 12.0
    # The new owner decides the rest of the prompt.
    rest = StepAssigned("r.1", A, prefill_tokens=128)
    assert machine.handle(rest, 3.0) == [ev.Prefill(rest)]


def test_without_any_router_what_is_left_of_a_sliced_prompt_goes_where_it_began() -> None:
    machine = between_slices()
    assert machine.handle(ev.RouterLost("r"), 2.0) == [LOST, ev.AskRouter("r.1", (), "a")]
    alone = StepAssigned("r.1", A, degraded=True)
    assert machine.handle(alone, 3.0) == [ev.Serve(alone)]
    # If the instance fails, another one is chosen, without the computed slice.
    assert machine.handle(ev.UpstreamFailed("broke"), 4.0)[-1] == ev.AskRouter("r.2", ("a",))


def test_routers_are_lost_between_two_slices_twice_at_most() -> None:
    machine = between_slices()
    for number in (1, 2):
        machine.handle(ev.RouterLost(machine.attempt_id), 2.0)
        machine.handle(replace(SLICE, attempt_id=f"r.{number}"), 3.0)
        machine.handle(ev.PrefillEnded(), 4.0)
    assert machine.handle(ev.RouterLost("r.2"), 5.0) == [
        ev.Serve(StepAssigned("r.2", A, 1, cached_tokens=64, degraded=True)),
        ev.ReportServedAlone("r.2"),
    ]


def test_a_next_step_that_comes_after_the_gateways_patience_is_void() -> None:
    machine = between_slices()
    assert machine.deadline == 11.0
    alone = ev.Serve(StepAssigned("r", A, 1, cached_tokens=64, degraded=True))
    assert machine.handle(ev.Tick(), 11.0) == [alone, ev.ReportServedAlone("r")]
    assert machine.handle(StepAssigned("r", B, 1), 11.1) == []
    assert machine.handle(ev.PlacementRefused("r", 14, "late"), 11.2) == []
    assert machine.handle(ev.ResponseStarted(), 12.0) == [ev.ReportFirstToken("r")]
    assert machine.handle(ev.ResponseEnded(), 13.0) == [ev.ReportFinished("r", Outcome.OK)]


def test_after_an_offload_without_its_router_the_instance_that_has_the_prefix_serves() -> None:
    assert prefilled().handle(ev.RouterLost("r"), 2.0) == [
        ev.Serve(StepAssigned("r", A, 1, cached_tokens=64, degraded=True)),
        ev.ReportServedAlone("r"),
    ]


# Both instances want the second request before the first has ended.
EAGER_A, EAGER_B = Target("a", "http://a", layerwise=True), Target("b", "http://b", 1, layerwise=True)
EAGER = StepAssigned("r", EAGER_A, prefill_tokens=64, kv_target=EAGER_B, decision_id="d")
AHEAD = StepAssigned("r", EAGER_B, index=1, kv_source=EAGER_A, decision_id="d")
# As the router gives it later, with what it predicts.
FOLLOWS = StepAssigned("r", EAGER_B, index=1, kv_source=EAGER_A, decision_id="d", cached_tokens=32)
EAGER_ALONE = StepAssigned("r", EAGER_B, index=2)


def sent_ahead(*, inline_kv_transfer: bool = True, prefilled: bool = False) -> RequestStateMachine:
    machine = RequestStateMachine("r", LIMITS, inline_kv_transfer=inline_kv_transfer)
    machine.start(0.0)
    second = ev.Serve(AHEAD, early=True) if inline_kv_transfer else ev.PullKv(AHEAD, early=True)
    assert machine.handle(EAGER, 0.0) == [ev.Prefill(EAGER), second]
    assert machine.deadline == 20.0
    if prefilled:
        assert machine.handle(ev.PrefillEnded(), 1.0) == [ev.AskNextStep("r", 0, "")]
    return machine


def test_both_requests_go_at_once_only_where_both_instances_want_it() -> None:
    for p, d in ((EAGER_A, B), (A, EAGER_B), (A, B)):
        machine = begun()
        step = StepAssigned("r", p, prefill_tokens=64, kv_target=d)
        assert machine.handle(step, 0.0) == [ev.Prefill(step)]


def test_the_step_sent_ahead_becomes_the_next_one() -> None:
    machine = sent_ahead(prefilled=True)
    assert machine.handle(FOLLOWS, 2.0) == [ev.AdoptEarlyStep(FOLLOWS)]
    assert (machine.phase, machine.deadline) == (Phase.SERVING, 7.0)
    assert machine.handle(ev.ResponseStarted(), 3.0) == [ev.ReportFirstToken("r")]
    machine = sent_ahead(inline_kv_transfer=False, prefilled=True)
    assert machine.handle(FOLLOWS, 2.0) == [ev.AdoptEarlyStep(FOLLOWS)]
    assert (machine.phase, machine.deadline) == (Phase.PULLING, 7.0)
    plain = StepAssigned("r", EAGER_B, index=1, decision_id="d", cached_tokens=32)
    assert machine.handle(ev.PullEnded(), 3.0) == [ev.Serve(plain)]


def test_an_answer_may_begin_before_the_prefill_says_that_it_is_done() -> None:
    machine = sent_ahead()
    assert machine.handle(ev.ResponseStarted(), 1.0) == [
        ev.ReportStepDone("r", 0),
        ev.AdoptEarlyStep(AHEAD),
        ev.ReportFirstToken("r"),
    ]
    assert machine.phase is Phase.STREAMING
    for late in (ev.PrefillEnded(), ev.PrefillEnded("broke"), FOLLOWS):
        assert machine.handle(late, 2.0) == []
    assert machine.handle(ev.ResponseEnded(), 3.0) == [ev.ReportFinished("r", Outcome.OK)]
    machine = sent_ahead(inline_kv_transfer=False)
    plain = StepAssigned("r", EAGER_B, index=1, decision_id="d")
    assert machine.handle(ev.PullEnded(), 1.0) == [ev.ReportStepDone("r", 0), ev.AdoptEarlyStep(AHEAD), ev.Serve(plain)]
    assert machine.deadline == 31.0
    # The end of the prefill is reported, and the router has not answered yet.
    machine = sent_ahead(prefilled=True)
    assert machine.handle(ev.ResponseStarted(), 2.0) == [ev.AdoptEarlyStep(AHEAD), ev.ReportFirstToken("r")]
    assert machine.handle(FOLLOWS, 3.0) == []


def test_a_prefill_that_fails_while_the_other_instance_waits_ends_both() -> None:
    for inline_kv_transfer in (True, False):
        for event, now, arguments in (
            (ev.PrefillEnded("broke", True), 1.0, ("broke", True)),
            (ev.PrefillEnded("stopped early"), 1.0, ("stopped early", False)),
            (ev.Tick(), 20.0, ("deadline", True)),
        ):
            machine = sent_ahead(inline_kv_transfer=inline_kv_transfer)
            assert machine.handle(event, now) == [ev.AbortUpstream(), ev.AskNextStep("r", 0, *arguments)]
            assert machine.handle(ev.ResponseStarted(), now) == []
            assert machine.handle(replace(FOLLOWS, index=2), now) == [
                ev.Serve(replace(EAGER_ALONE, decision_id="d", cached_tokens=32))
            ]


def test_an_instance_that_refuses_ahead_ends_the_prefill_and_is_asked_without_kv() -> None:
    cases: list[tuple[bool, ev.Event, str]] = [
        (True, ev.UpstreamFailed("status 500", 500), "status 500"),
        (True, ev.UpstreamFailed("no answer"), "no answer"),
        (True, ev.ResponseRejected(400), "status 400"),
        (False, ev.PullEnded("status 500"), "status 500"),
    ]
    for inline_kv_transfer, event, error in cases:
        machine = sent_ahead(inline_kv_transfer=inline_kv_transfer)
        # The failure of the other instance does not count against the prefilling one.
        assert machine.handle(event, 1.0) == [
            ev.AbortUpstream(),
            ev.AskNextStep("r", 0, f"the other instance: {error}"),
        ]
        assert machine.handle(EAGER_ALONE, 2.0) == [ev.Serve(EAGER_ALONE)]
        assert machine.deadline == 32.0
        # The second request fails while the router is asked for its step: the failure is handled after the answer.
        machine = sent_ahead(inline_kv_transfer=inline_kv_transfer, prefilled=True)
        assert machine.handle(event, 2.0) == []
        taken, *rest = machine.handle(FOLLOWS, 3.0)
        assert taken == ev.AdoptEarlyStep(FOLLOWS)
        if error == "no answer":
            assert rest[-1] == ev.AskRouter("r.1", ("b",))
        else:
            assert rest[-1] == ev.AskNextStep("r", 1, error)


def test_without_the_router_what_was_sent_ahead_goes_on() -> None:
    for event, now in ((ev.RouterLost("r"), 2.0), (ev.Tick(), 11.0)):
        machine = sent_ahead(prefilled=True)
        (taken,) = machine.handle(event, now)
        assert taken == ev.AdoptEarlyStep(replace(AHEAD, degraded=True))
        assert machine.phase is Phase.SERVING


def test_without_the_router_what_was_sent_ahead_and_failed_is_reported_once_more_and_then_served_alone() -> None:
    machine = sent_ahead(inline_kv_transfer=False, prefilled=True)
    assert machine.handle(ev.PullEnded("broke"), 2.0) == []
    taken = replace(AHEAD, degraded=True)
    assert machine.handle(ev.Tick(), 11.0) == [ev.AdoptEarlyStep(taken), ev.AskNextStep("r", 1, "broke")]
    alone = ev.Serve(StepAssigned("r", EAGER_B, 2, degraded=True))
    assert machine.handle(ev.Tick(), 21.0) == [alone, ev.ReportServedAlone("r")]


def test_another_step_than_the_one_sent_ahead_replaces_it() -> None:
    machine = sent_ahead(prefilled=True)
    other = StepAssigned("r", A, index=1)
    assert machine.handle(other, 2.0) == [ev.AbortUpstream(), ev.Serve(other)]
    machine = sent_ahead(prefilled=True)
    assert machine.handle(ev.PlacementRefused("r", 14, "gone"), 2.0) == [ev.AbortUpstream(), ev.FailRequest(14, "gone")]


def test_a_client_that_leaves_ends_both() -> None:
    for prefilled in (False, True):
        machine = sent_ahead(prefilled=prefilled)
        assert machine.handle(ev.ClientDisconnected(), 1.5) == [
            ev.AbortUpstream(),
            ev.ReportFinished("r", Outcome.CANCELLED, "client left"),
        ]


FETCH = StepAssigned("r", B, prefill_tokens=64, kv_source=A)
FETCH_AT_ONCE = replace(FETCH, target=EAGER_B, kv_source=EAGER_A)


def fetching(step: StepAssigned = FETCH) -> RequestStateMachine:
    machine = begun()
    assert machine.handle(step, 0.0) == [ev.Prefill(step)]
    return machine


def test_after_a_fetch_comes_what_the_router_plans() -> None:
    machine = fetching()
    assert machine.handle(ev.PrefillEnded(), 1.0) == [ev.AskNextStep("r", 0, "")]
    rest = StepAssigned("r", B, index=1, prefill_tokens=128)
    assert machine.handle(rest, 2.0) == [ev.Prefill(rest)]
    machine.handle(ev.PrefillEnded(), 3.0)
    last = StepAssigned("r", B, index=2)
    assert machine.handle(last, 4.0) == [ev.Serve(last)]


@pytest.mark.parametrize(
    ("limits", "tokens", "deadline"),
    [(RequestTimeouts(), 2_000, 6.0), (RequestTimeouts(), 100_000, 30.0), (LIMITS, 2_000, 5.0)],
)
def test_a_fetch_may_take_as_long_as_computing_on_a_slow_instance(
    limits: RequestTimeouts, tokens: int, deadline: float
) -> None:
    machine = RequestStateMachine("r", limits)
    machine.start(0.0)
    machine.handle(replace(FETCH, prefill_tokens=tokens), 0.0)
    assert machine.deadline == deadline
    # Either instance may be slow.
    assert machine.handle(ev.Tick(), deadline) == [ev.AbortUpstream(), ev.AskNextStep("r", 0, "deadline")]
    assert machine.handle(replace(FETCH, index=1), deadline) == [ev.Serve(StepAssigned("r", B, index=1))]


@pytest.mark.parametrize("step", [FETCH, FETCH_AT_ONCE], ids=["in turn", "at once"])
@pytest.mark.parametrize(
    ("ended", "fails", "refused_by"),
    [
        (ev.PrefillEnded("status 500", refused=True, instance_id="a"), False, ("a",)),
        (ev.PrefillEnded("no answer: reset", True, broke=True, instance_id="a"), False, ("a",)),
        (ev.PrefillEnded("status 404", instance_id="a"), False, ()),
        # The instance may refuse because of the source's KV.
        (ev.PrefillEnded("status 500", refused=True, instance_id="b"), False, ()),
        (ev.PrefillEnded("no answer: ConnectionRefusedError", True, instance_id="b"), True, ()),
        (ev.PrefillEnded("the prefix did not arrive"), False, ()),
    ],
)
def test_a_failed_fetch_counts_against_the_instance_that_failed(
    step: StepAssigned, ended: ev.PrefillEnded, fails: bool, refused_by: tuple[str, ...]
) -> None:
    machine = fetching(step)
    assert machine.handle(ended, 1.0) == [ev.AskNextStep("r", 0, ended.error, fails)]
    # Whatever the router says now, nothing but a plain SERVE is sent.
    plain = StepAssigned("r", step.target, index=1)
    assert machine.handle(replace(step, index=1), 2.0) == [ev.Serve(plain)]
    assert machine.handle(ev.ResponseStarted(), 3.0) == [ev.ReportFirstToken("r", refused_by)]


@pytest.mark.parametrize("step", [FETCH, FETCH_AT_ONCE], ids=["in turn", "at once"])
def test_a_request_that_breaks_the_source_and_then_the_instance_is_sent_to_no_third(step: StepAssigned) -> None:
    machine = fetching(step)
    machine.handle(ev.PrefillEnded("no answer: reset", True, broke=True, instance_id="a"), 1.0)
    machine.handle(StepAssigned("r", step.target, index=1), 2.0)
    _, report, failure = machine.handle(ev.UpstreamFailed("no answer: reset", broke=True), 3.0)
    assert report == ev.ReportFinished("r", Outcome.REJECTED, "no answer: reset", broke=True, alike=("a",))
    assert isinstance(failure, ev.FailRequest)
    assert failure.code == ev.BREAKS_INSTANCES


@pytest.mark.parametrize(("step", "died"), [(FETCH, False), (FETCH_AT_ONCE, True)], ids=["in turn", "at once"])
def test_an_instance_that_is_gone_after_a_fetch_died_of_the_request_only_if_it_had_it(
    step: StepAssigned, died: bool
) -> None:
    machine = fetching(step)
    machine.handle(ev.PrefillEnded("no answer: reset", True, broke=True, instance_id="a"), 1.0)
    machine.handle(StepAssigned("r", step.target, index=1), 2.0)
    last = machine.handle(ev.UpstreamFailed("no answer: ConnectionRefusedError", unreached=True), 3.0)[-1]
    assert isinstance(last, ev.FailRequest if died else ev.AskRouter)


def test_a_router_that_is_lost_after_a_fetch_is_followed_by_another_attempt() -> None:
    machine = fetching()
    machine.handle(ev.PrefillEnded(), 1.0)
    assert machine.handle(ev.RouterLost("r"), 2.0) == [LOST, ev.AskRouter("r.1", (), "b")]
    machine = fetching()
    machine.handle(ev.PrefillEnded("deadline"), 1.0)
    alone = ev.Serve(StepAssigned("r", B, 1, degraded=True))
    assert machine.handle(ev.RouterLost("r"), 2.0) == [alone, ev.ReportServedAlone("r")]


EVENTS = st.one_of(
    st.builds(
        StepAssigned,
        st.sampled_from(["r", "r.1", "r.2"]),
        st.sampled_from([A, B, EAGER_A, EAGER_B]),
        prefill_tokens=st.sampled_from([0, 16]),
        kv_target=st.sampled_from([None, B, EAGER_B]),
        kv_source=st.sampled_from([None, A, EAGER_A]),
    ),
    st.builds(ev.PlacementRefused, st.sampled_from(["r", "r.1", "r.2"]), st.sampled_from([5, 8, 14]), st.just("no")),
    st.builds(ev.RouterLost, st.sampled_from(["r", "r.1", "r.2"])),
    st.builds(ev.PrefillEnded, st.sampled_from(["", "broke"]), instance_id=st.sampled_from(["", "a", "b"])),
    st.builds(ev.PullEnded, st.sampled_from(["", "broke"])),
    st.builds(ev.ResponseEnded, st.sampled_from(["", "broke"])),
    st.builds(ev.ResponseRejected, st.just(400)),
    st.builds(ev.UpstreamFailed, st.just("no"), st.sampled_from([0, 500]), continuable=st.booleans()),
    st.sampled_from([ev.ResponseStarted(), ev.ClientDisconnected(), ev.Tick()]),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=30), st.booleans())
def test_every_attempt_ends_exactly_once_whatever_happens(
    history: list[tuple[ev.Event, float]], inline_kv_transfer: bool
) -> None:
    machine = RequestStateMachine("r", LIMITS, inline_kv_transfer=inline_kv_transfer)
    now, asked, ended, refused, first = 0.0, set[str](), list[str](), 0, list[str]()
    effects = machine.start(now)
    # The client leaves in the end, so that every history comes to one.
    for event, passed in [*history, (ev.ClientDisconnected(), 0.0), (ev.ClientDisconnected(), 0.0)]:
        for effect in effects:
            if isinstance(effect, ev.AskRouter):
                asked.add(effect.attempt_id)
            elif isinstance(effect, ev.ReportFinished):
                ended.append(effect.attempt_id)
            elif isinstance(effect, ev.ReportFirstToken):
                first.append(effect.attempt_id)
        assert len(asked) <= 1 + LIMITS.max_retries
        assert machine.deadline is not None or machine.phase in (Phase.STREAMING, Phase.DONE)
        open_before = machine.phase is not Phase.DONE
        now += passed
        effects = machine.handle(event, now)
        if open_before and machine.phase is Phase.DONE and isinstance(event, ev.PlacementRefused):
            refused += 1
    assert machine.phase is Phase.DONE
    assert effects == []
    assert len(ended) == len(set(ended)) == len(asked) - refused
    assert set(ended) <= asked
    assert len(first) == len(set(first)) <= 1 + LIMITS.max_retries


class Conversation(RuleBasedStateMachine):
    """Engines, a router, a client and a clock act in any order, and the machine's effects are carried out.

    As with real connections, only open requests can end. The machine may have one upstream request open (and an early step
    during a PREFILL), must leave none open when it is done, and must give the client one answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = RequestStateMachine("r", LIMITS)
        self.waiting: ev.Effect | None = None  # what was asked of the router
        self.upstream: ev.Effect | None = None  # what is open at an engine
        self.early: ev.Serve | ev.PullKv | None = None  # what is open at another one meanwhile
        self.ended_early: ev.Serve | ev.PullKv | None = None  # what was open there, and has failed
        self.answers: list[str] = []
        self.ended: list[str] = []
        self.plain_only: set[str] = set()
        self.broken: set[str] = set()  # instances that broke the connection
        self.adopted = False  # another instance has answered: a proxy sends a request once

    @initialize(inline_kv_transfer=st.booleans(), first=st.sampled_from([None, EAGER, SLICE]))
    def begin(self, inline_kv_transfer: bool, first: StepAssigned | None) -> None:
        self.machine = RequestStateMachine("r", LIMITS, inline_kv_transfer=inline_kv_transfer)
        self.carry_out(self.machine.start(self.now))
        if first is not None:
            self.tell(first)
        if first is SLICE:
            self.helper_ended("")

    def tell(self, event: ev.Event) -> None:
        self.carry_out(self.machine.handle(event, self.now))

    def carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.AskRouter() | ev.AskNextStep():
                    assert self.upstream is None, "asked for the next step while one runs"
                    if not isinstance(effect, ev.AskNextStep) or effect.error:
                        assert self.early is None, "a failure ends both"
                    if isinstance(effect, ev.AskNextStep) and effect.error:
                        self.plain_only.add(effect.attempt_id)
                    self.waiting = effect
                case ev.Serve(step, early=True) | ev.PullKv(step, early=True):
                    assert isinstance(self.upstream, ev.Prefill)
                    assert self.upstream.step.kv_target == step.target != self.upstream.step.target
                    assert step.attempt_id not in self.plain_only
                    self.early = effect
                case ev.AdoptEarlyStep(step):
                    # The end of the prefill may still be reported; it is not awaited any more.
                    taken = self.early or self.ended_early
                    assert taken is not None
                    assert taken.step.target == step.target
                    self.upstream, self.early, self.ended_early, self.waiting = self.early, None, None, None
                case ev.ReportStepDone(attempt_id):
                    assert isinstance(self.upstream, ev.Prefill)
                    assert attempt_id == self.machine.attempt_id
                case ev.Prefill(step) | ev.PullKv(step) | ev.Serve(step):
                    assert self.upstream is None, "two requests at once"
                    assert len(self.broken) < 2, "two have died of it"
                    assert self.early is None
                    assert step.attempt_id not in self.ended
                    if step.attempt_id in self.plain_only:
                        assert isinstance(effect, ev.Serve)
                        assert step.kv_source is None
                    self.waiting, self.upstream = None, effect
                case ev.AdoptInstance(step):
                    assert step.attempt_id == self.machine.attempt_id
                    self.upstream = None
                case ev.AbortUpstream():
                    self.upstream = self.early = self.ended_early = None
                case ev.ReportFirstToken():
                    if self.answers != ["stream"]:
                        self.answers.append("stream")
                case ev.ReportFinished(attempt_id, outcome, broke=broke):
                    assert attempt_id not in self.ended
                    self.ended.append(attempt_id)
                    # A request that breaks instances gets no engine's answer but an error.
                    if outcome is Outcome.REJECTED and not broke and self.answers != ["stream"]:
                        self.answers.append("rejection")
                    elif outcome is Outcome.CANCELLED and not self.answers and self.machine.phase is Phase.DONE:
                        self.answers.append("nobody listens")
                case ev.ReportServedAlone(attempt_id):
                    assert attempt_id == self.machine.attempt_id
                    assert isinstance(self.upstream, ev.Serve)
                    assert self.upstream.step.degraded
                case ev.FailRequest():
                    # A client that has had only pings can still be told, as an event.
                    assert not self.answers, "a begun answer ends as a stream"
                    self.answers.append("error")
                case ev.EndStreamWithError():
                    assert self.answers == ["stream"]

    @precondition(lambda self: self.waiting is not None)
    @rule(
        where=st.sampled_from([A, B]),
        shape=st.sampled_from(
            ["serve", "slice", "prefill", "pull", "eager", "follows", "follows", "fetch", "fetch at once"]
        ),
    )
    def step_given(self, where: Target, shape: str) -> None:
        other = B if where is A else A
        step = StepAssigned(
            self.machine.attempt_id,
            {"eager": EAGER_A, "follows": EAGER_B, "fetch at once": EAGER_B}.get(shape, where),
            prefill_tokens=64 * (shape in ("slice", "prefill", "eager", "fetch", "fetch at once")),
            kv_target={"prefill": B, "eager": EAGER_B}.get(shape),
            kv_source={"pull": A, "follows": EAGER_A, "fetch": other, "fetch at once": EAGER_A}.get(shape),
        )
        self.tell(step)

    @precondition(lambda self: self.waiting is not None)
    @rule(code=st.sampled_from([5, 8, 14]))
    def refused(self, code: int) -> None:
        self.tell(ev.PlacementRefused(self.machine.attempt_id, code, "no"))

    @precondition(lambda self: isinstance(self.waiting, ev.AskNextStep))
    @rule()
    def router_lost(self) -> None:
        self.tell(ev.RouterLost(self.machine.attempt_id))

    @precondition(lambda self: self.early is not None)
    @rule(
        event=st.sampled_from(
            ["", ev.UpstreamFailed("broke"), ev.UpstreamFailed("broke", 500), ev.ResponseRejected(400), BROKE_AHEAD]
        )
    )
    def ahead_ended(self, event: ev.Event | str) -> None:
        early = self.early
        good = event == ""
        if isinstance(early, ev.PullKv):
            event = ev.PullEnded("" if good else "broke")
        elif good:
            event = ev.ResponseStarted()
        if not good or isinstance(early, ev.PullKv):
            self.early, self.ended_early = None, early
        if event is BROKE_AHEAD:
            assert early is not None
            self.broken.add(early.step.target.instance_id)
        assert not isinstance(event, str)
        self.tell(event)

    @precondition(lambda self: isinstance(self.upstream, ev.Prefill | ev.PullKv))
    @rule(error=st.sampled_from(["", "broke"]), broke=st.booleans(), at_source=st.booleans())
    def helper_ends(self, error: str, broke: bool, at_source: bool) -> None:
        self.helper_ended(error, broke=broke, at_source=at_source)

    def helper_ended(self, error: str, *, broke: bool = False, at_source: bool = False) -> None:
        helper, self.upstream = self.upstream, None
        if isinstance(helper, ev.PullKv):
            self.tell(ev.PullEnded(error))
            return
        assert isinstance(helper, ev.Prefill)
        broke = broke and bool(error)
        failed = helper.step.kv_source if at_source else None
        if broke:
            self.broken.add((failed or helper.step.target).instance_id)
        self.tell(ev.PrefillEnded(error, broke, broke=broke, instance_id="" if failed is None else failed.instance_id))
        if isinstance(self.waiting, ev.AskNextStep):
            assert self.waiting.instance_failed == (broke and failed is None), "another one's failure"

    @precondition(lambda self: isinstance(self.upstream, ev.Serve) and self.machine.phase is Phase.SERVING)
    @rule(event=st.sampled_from([ev.ResponseStarted(), ev.ResponseRejected(400), ev.ResponseRejected(502, own=True)]))
    def answered(self, event: ev.Event) -> None:
        if isinstance(event, ev.ResponseRejected):
            self.upstream = None
        self.tell(event)

    @precondition(
        lambda self: isinstance(self.upstream, ev.Serve) and self.machine.phase is Phase.SERVING and not self.adopted
    )
    @rule(where=st.sampled_from([A, B]))
    def another_answered(self, where: Target) -> None:
        self.adopted = True
        self.tell(ev.OtherAnswered(where))

    @precondition(lambda self: isinstance(self.upstream, ev.Serve))
    @rule(
        status=st.sampled_from([0, 500]),
        refused=st.booleans(),
        continuable=st.booleans(),
        moved=st.booleans(),
        broke=st.booleans(),
    )
    def serve_failed(self, status: int, refused: bool, continuable: bool, moved: bool, broke: bool) -> None:
        refused = bool(status) and refused and not moved
        if refused:
            self.upstream = None  # its answer is read to its end: there is nothing to abort
        continuable = continuable and self.machine.phase is Phase.STREAMING
        broke = broke and not refused and not moved
        if broke:
            assert isinstance(self.upstream, ev.Serve)
            self.broken.add(self.upstream.step.target.instance_id)
        self.tell(ev.UpstreamFailed("broke", status, refused, continuable, moved=moved, broke=broke))

    @precondition(lambda self: self.machine.phase is Phase.STREAMING)
    @rule(error=st.sampled_from(["", "its own"]))
    def answer_ended(self, error: str) -> None:
        self.upstream = None
        self.tell(ev.ResponseEnded(error))

    @rule(event=EVENTS)
    def something_stale(self, event: ev.Event) -> None:
        """What belongs to an attempt that is over changes nothing."""
        if (
            isinstance(event, StepAssigned | ev.PlacementRefused | ev.RouterLost)
            and event.attempt_id != self.machine.attempt_id
        ):
            assert self.machine.handle(event, self.now) == []

    @rule()
    def client_gone(self) -> None:
        self.tell(ev.ClientDisconnected())

    @rule(passed=st.sampled_from([0.0, 1.9, 5.0, 30.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.tell(ev.Tick())

    @precondition(lambda self: self.machine.deadline is not None)
    @rule()
    def deadline(self) -> None:
        assert self.machine.deadline is not None
        before = (self.machine.phase, self.machine.attempt_id, self.machine.step)
        self.now = max(self.now, self.machine.deadline)
        self.tell(ev.Tick())
        after = (self.machine.phase, self.machine.attempt_id, self.machine.step)
        assert after != before, "a deadline that changes nothing"

    @invariant()
    def one_answer_and_nothing_left(self) -> None:
        assert len(self.answers) <= 1
        if self.machine.phase is Phase.DONE:
            assert len(self.answers) == 1
            assert self.upstream is None
        elif self.machine.phase is not Phase.STREAMING:
            assert self.answers in ([], ["stream"])
            assert self.machine.deadline is not None

    def teardown(self) -> None:
        # Silence to the end: the deadlines alone bring every request to its one answer.
        for _ in range(40):
            if self.machine.deadline is None:
                break
            self.now = self.machine.deadline
            self.tell(ev.Tick())
        if self.machine.phase is Phase.STREAMING:
            self.tell(ev.ClientDisconnected())
        assert self.machine.phase is Phase.DONE
        self.one_answer_and_nothing_left()


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=200, stateful_step_count=40)


@given(
    st.lists(st.sampled_from("abc"), unique=True),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    st.integers(0, 9),
)
def test_least_inflight_takes_one_of_the_emptiest(ids: list[str], inflight: dict[str, int], turn: int) -> None:
    chosen = least_inflight(ids, inflight, ("a",), turn)
    allowed = [instance_id for instance_id in ids if instance_id != "a"]
    if not allowed:
        assert chosen is None
    else:
        assert chosen in allowed
        assert inflight.get(chosen, 0) == min(inflight.get(instance_id, 0) for instance_id in allowed)


def test_equals_take_turns() -> None:
    assert [least_inflight(["a", "b"], {}, (), turn) for turn in range(3)] == ["a", "b", "a"]
