"""The request machine: exactly one Finished for each attempt, bounded attempts, a deadline at every arrow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway import moves as mv
from services.gateway.choreography import Choreography, Phase
from services.gateway.moves import Limits, Outcome, StepGiven, Target
from services.gateway.placing import least_inflight

LIMITS = Limits(place_s=10, prefill_s=20, first_byte_s=30, transfer_s=5, retries=2)
A, B = Target("a", "http://a"), Target("b", "http://b", 1)


def begun() -> Choreography:
    machine = Choreography("r", LIMITS)
    assert machine.start(0.0) == [mv.Ask("r", ())]
    return machine


def serving(target: Target = A, **step: Any) -> Choreography:
    machine = begun()
    given = StepGiven("r", target, **step)
    assert machine.handle(given, 1.0) == [mv.Serve(given)]
    return machine


def test_the_plain_way() -> None:
    machine = serving()
    assert machine.deadline == 31.0
    assert machine.handle(mv.AnswerBegan(), 2.0) == [mv.FirstToken("r")]
    assert machine.deadline is None
    assert machine.handle(mv.AnswerEnded(), 3.0) == [mv.Finished("r", Outcome.OK)]
    assert machine.phase is Phase.DONE


def test_a_steps_own_deadline_is_kept() -> None:
    assert serving(deadline_s=5.0).deadline == 6.0
    assert serving(deadline_s=500.0).deadline == 31.0


def test_prefill_then_serve() -> None:
    machine = begun()
    first = StepGiven("r", A, prefill_tokens=64)
    assert machine.handle(first, 1.0) == [mv.Prefill(first)]
    assert machine.deadline == 21.0
    assert machine.handle(mv.PrefillEnded(), 2.0) == [mv.AwaitNext("r", 0, "")]
    second = StepGiven("r", B, index=1)
    assert machine.handle(second, 3.0) == [mv.Serve(second)]


def test_a_late_prefill_is_aborted_and_the_router_asked_what_now() -> None:
    machine = begun()
    machine.handle(StepGiven("r", A, prefill_tokens=64), 0.0)
    assert machine.handle(mv.Tick(), 19.9) == []
    assert machine.handle(mv.Tick(), 20.0) == [mv.Abort(), mv.AwaitNext("r", 0, "deadline", True)]


def test_without_a_next_step_the_prefilled_instance_serves() -> None:
    for event, now in ((mv.Tick(), 99.0), (mv.RouterLost("r"), 3.0)):
        machine = begun()
        machine.handle(StepGiven("r", A, prefill_tokens=64), 1.0)
        machine.handle(mv.PrefillEnded("broke"), 2.0)
        (effect,) = machine.handle(event, now)
        assert isinstance(effect, mv.Serve)
        assert (effect.step.target, effect.step.index, effect.step.degraded) == (A, 1, True)


def test_a_failure_before_the_first_byte_goes_elsewhere_at_most_twice() -> None:
    machine = serving()
    for attempt, excluded in ((1, ("a",)), (2, ("a", "a1"))):
        abort, finished, ask = machine.handle(mv.UpstreamFailed("no", 500), 2.0)
        assert abort == mv.Abort()
        assert isinstance(finished, mv.Finished)
        assert (finished.outcome, finished.status) == (Outcome.FAILED, 500)
        assert ask == mv.Ask(f"r.{attempt}", excluded)
        machine.handle(StepGiven(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)
    *_, last = machine.handle(mv.UpstreamFailed("no"), 4.0)
    assert isinstance(last, mv.Fail)
    assert last.code == mv.FAILED
    assert machine.phase is Phase.DONE


def test_silence_before_the_first_byte_counts_as_a_failure() -> None:
    machine = serving()
    assert machine.handle(mv.Tick(), 31.0)[-1] == mv.Ask("r.1", ("a",))


def test_after_the_first_byte_the_stream_breaks() -> None:
    machine = serving()
    machine.handle(mv.AnswerBegan(), 2.0)
    effects = machine.handle(mv.UpstreamFailed("reset"), 3.0)
    assert effects == [mv.Abort(), mv.Finished("r", Outcome.FAILED, "reset"), mv.BreakStream()]


def test_a_failure_that_the_engine_told_the_client_is_not_told_twice() -> None:
    machine = serving()
    machine.handle(mv.AnswerBegan(), 2.0)
    assert machine.handle(mv.AnswerEnded("its own"), 3.0) == [mv.Abort(), mv.Finished("r", Outcome.FAILED, "its own")]


def test_a_rejection_is_final() -> None:
    machine = serving()
    assert machine.handle(mv.AnswerRejected(422), 2.0) == [mv.Finished("r", Outcome.REJECTED, "rejected", 422)]


def test_a_refusal_reserves_nothing() -> None:
    machine = begun()
    assert machine.handle(mv.Refused("r", 8, "full", 3.0), 1.0) == [mv.Fail(8, "full", 3.0)]


def test_a_model_whose_instances_are_out_of_sight_is_not_unknown() -> None:
    """Its agents are away, or the router is new: the client is to come again, not to give up."""
    machine = begun()
    assert machine.handle(mv.Refused("r", 5, "no instance serves a model"), 1.0) == [
        mv.Fail(14, "No instance is ready for this model.")
    ]


def test_a_lost_router_leads_to_a_placement_of_our_own() -> None:
    machine = begun()
    assert machine.handle(mv.RouterLost("r"), 1.0) == [mv.AskLocally("r", ())]
    given = StepGiven("r", A, degraded=True)
    assert machine.handle(given, 2.0) == [mv.Serve(given)]
    # The next attempt asks the router again: it may be back.
    assert machine.handle(mv.UpstreamFailed("no"), 3.0)[-1] == mv.Ask("r.1", ("a",))


def test_a_client_that_leaves_ends_every_phase() -> None:
    machine = begun()
    assert machine.handle(mv.ClientGone(), 1.0) == [mv.Abort(), mv.Finished("r", Outcome.CANCELLED, "client left")]
    assert machine.handle(StepGiven("r", A), 2.0) == []


def test_no_step_in_time_is_an_error() -> None:
    machine = begun()
    abort, finished, fail = machine.handle(mv.Tick(), 10.0)
    assert (abort, finished) == (mv.Abort(), mv.Finished("r", Outcome.FAILED, "no step in time"))
    assert isinstance(fail, mv.Fail)
    assert fail.code == mv.TIMED_OUT


FIRST = StepGiven("r", A, prefill_tokens=64, kv_target=B)
SECOND = StepGiven("r", B, index=1, kv_source=A)
ALONE = StepGiven("r", B, index=2)


def prefilled(*, direct: bool = True) -> Choreography:
    machine = Choreography("r", LIMITS, direct=direct)
    machine.start(0.0)
    assert machine.handle(FIRST, 0.0) == [mv.Prefill(FIRST)]
    assert machine.handle(mv.PrefillEnded(), 1.0) == [mv.AwaitNext("r", 0, "")]
    return machine


def test_an_offload_whose_request_brings_the_kv_along() -> None:
    machine = prefilled()
    assert machine.handle(SECOND, 2.0) == [mv.Serve(SECOND)]
    assert machine.deadline == 7.0
    assert machine.handle(mv.AnswerBegan(), 3.0) == [mv.FirstToken("r")]


def test_an_offload_that_pulls_the_kv_before() -> None:
    machine = prefilled(direct=False)
    assert machine.handle(SECOND, 2.0) == [mv.Pull(SECOND)]
    assert machine.deadline == 7.0
    plain = StepGiven("r", B, index=1)
    assert machine.handle(mv.PullEnded(), 3.0) == [mv.Serve(plain)]
    assert machine.deadline == 33.0
    # From here on it is a request like any other.
    assert machine.handle(mv.UpstreamFailed("no", 500), 4.0)[-1] == mv.Ask("r.1", ("b",))


def test_a_transfer_that_fails_is_told_and_answered_without_it() -> None:
    cases: list[tuple[bool, mv.Event, float, list[mv.Effect]]] = [
        (True, mv.UpstreamFailed("status 500", 500), 3.0, [mv.Abort(), mv.AwaitNext("r", 1, "status 500")]),
        (True, mv.Tick(), 7.0, [mv.Abort(), mv.AwaitNext("r", 1, "deadline")]),
        (False, mv.PullEnded("status 500"), 3.0, [mv.AwaitNext("r", 1, "status 500")]),
        (False, mv.Tick(), 7.0, [mv.Abort(), mv.AwaitNext("r", 1, "deadline")]),
    ]
    for direct, event, now, expected in cases:
        machine = prefilled(direct=direct)
        machine.handle(SECOND, 2.0)
        assert machine.handle(event, now) == expected
        # Whatever the router says now, nothing but a plain SERVE is sent.
        assert machine.handle(StepGiven("r", B, index=2, prefill_tokens=9, kv_source=A), 8.0) == [mv.Serve(ALONE)]
        assert machine.deadline == 38.0


def test_an_instance_that_is_not_there_is_left_with_its_kv() -> None:
    machine = prefilled()
    machine.handle(SECOND, 2.0)
    abort, finished, ask = machine.handle(mv.UpstreamFailed("no answer"), 3.0)
    assert (abort, ask) == (mv.Abort(), mv.Ask("r.1", ("b",)))
    assert isinstance(finished, mv.Finished)
    # The next attempt may offload again.
    again = StepGiven("r.1", A, prefill_tokens=64, kv_target=B)
    assert machine.handle(again, 4.0) == [mv.Prefill(again)]


def test_without_a_next_step_the_target_of_a_failed_prefill_serves() -> None:
    machine = Choreography("r", LIMITS)
    machine.start(0.0)
    machine.handle(FIRST, 0.0)
    machine.handle(mv.PrefillEnded("broke"), 1.0)
    assert machine.handle(mv.RouterLost("r"), 2.0) == [mv.Serve(StepGiven("r", B, 1, degraded=True))]


SLICE = StepGiven("r", A, prefill_tokens=64)
LOST = mv.Finished("r", Outcome.CANCELLED, "its router was lost between two steps")


def between_slices() -> Choreography:
    machine = begun()
    machine.handle(SLICE, 0.0)
    machine.handle(mv.PrefillEnded(), 1.0)
    return machine


def test_a_router_that_is_lost_between_two_slices_is_followed_by_another_attempt() -> None:
    machine = between_slices()
    assert machine.handle(mv.RouterLost("r"), 2.0) == [LOST, mv.Ask("r.1", ())]
    assert machine.deadline == 12.0
    # The new owner goes on where the old one ended, in its own way.
    rest = StepGiven("r.1", A, prefill_tokens=128)
    assert machine.handle(rest, 3.0) == [mv.Prefill(rest)]


def test_without_any_router_what_is_left_of_a_sliced_prompt_goes_where_it_began() -> None:
    machine = between_slices()
    machine.handle(mv.RouterLost("r"), 2.0)
    assert machine.handle(mv.RouterLost("r.1"), 3.0) == [mv.Serve(StepGiven("r.1", A, degraded=True))]
    # When that instance fails it is left with what it has.
    assert machine.handle(mv.UpstreamFailed("broke"), 4.0)[-1] == mv.Ask("r.2", ("a",))
    assert machine.handle(mv.RouterLost("r.2"), 5.0) == [mv.AskLocally("r.2", ("a",))]


def test_routers_are_lost_between_two_slices_twice_at_most() -> None:
    machine = between_slices()
    for number in (1, 2):
        machine.handle(mv.RouterLost(machine.attempt_id), 2.0)
        machine.handle(replace(SLICE, attempt_id=f"r.{number}"), 3.0)
        machine.handle(mv.PrefillEnded(), 4.0)
    assert machine.handle(mv.RouterLost("r.2"), 5.0) == [mv.Serve(StepGiven("r.2", A, 1, degraded=True))]


def test_after_an_offload_without_its_router_the_instance_that_has_the_prefix_serves() -> None:
    assert prefilled().handle(mv.RouterLost("r"), 2.0) == [mv.Serve(StepGiven("r", A, 1, degraded=True))]


# Both instances want the second request before the first has ended.
EAGER_A, EAGER_B = Target("a", "http://a", decode_first=True), Target("b", "http://b", 1, decode_first=True)
EAGER = StepGiven("r", EAGER_A, prefill_tokens=64, kv_target=EAGER_B, deadline_s=50.0, decision_id="d")
AHEAD = StepGiven("r", EAGER_B, index=1, kv_source=EAGER_A, decision_id="d")
# As the router gives it later, with what it predicts.
FOLLOWS = StepGiven("r", EAGER_B, index=1, kv_source=EAGER_A, decision_id="d", cached_tokens=32)
EAGER_ALONE = StepGiven("r", EAGER_B, index=2)


def sent_ahead(*, direct: bool = True, prefilled: bool = False) -> Choreography:
    machine = Choreography("r", LIMITS, direct=direct)
    machine.start(0.0)
    second = mv.Serve(AHEAD, ahead=True) if direct else mv.Pull(AHEAD, ahead=True)
    assert machine.handle(EAGER, 0.0) == [mv.Prefill(EAGER), second]
    assert machine.deadline == 20.0
    if prefilled:
        assert machine.handle(mv.PrefillEnded(), 1.0) == [mv.AwaitNext("r", 0, "")]
    return machine


def test_both_requests_go_at_once_only_where_both_instances_want_it() -> None:
    for p, d in ((EAGER_A, B), (A, EAGER_B), (A, B)):
        machine = begun()
        step = StepGiven("r", p, prefill_tokens=64, kv_target=d)
        assert machine.handle(step, 0.0) == [mv.Prefill(step)]


def test_the_step_sent_ahead_becomes_the_next_one() -> None:
    machine = sent_ahead(prefilled=True)
    assert machine.handle(FOLLOWS, 2.0) == [mv.TakeUp(FOLLOWS)]
    assert (machine.phase, machine.deadline) == (Phase.SERVING, 7.0)
    assert machine.handle(mv.AnswerBegan(), 3.0) == [mv.FirstToken("r")]
    machine = sent_ahead(direct=False, prefilled=True)
    assert machine.handle(FOLLOWS, 2.0) == [mv.TakeUp(FOLLOWS)]
    assert (machine.phase, machine.deadline) == (Phase.PULLING, 7.0)
    plain = StepGiven("r", EAGER_B, index=1, decision_id="d", cached_tokens=32)
    assert machine.handle(mv.PullEnded(), 3.0) == [mv.Serve(plain)]


def test_an_answer_may_begin_before_the_prefill_says_that_it_is_done() -> None:
    machine = sent_ahead()
    assert machine.handle(mv.AnswerBegan(), 1.0) == [mv.StepOver("r", 0), mv.TakeUp(AHEAD), mv.FirstToken("r")]
    assert machine.phase is Phase.STREAMING
    for late in (mv.PrefillEnded(), mv.PrefillEnded("broke"), FOLLOWS):
        assert machine.handle(late, 2.0) == []
    assert machine.handle(mv.AnswerEnded(), 3.0) == [mv.Finished("r", Outcome.OK)]
    machine = sent_ahead(direct=False)
    plain = StepGiven("r", EAGER_B, index=1, decision_id="d")
    assert machine.handle(mv.PullEnded(), 1.0) == [mv.StepOver("r", 0), mv.TakeUp(AHEAD), mv.Serve(plain)]
    assert machine.deadline == 31.0
    # Told, but not answered yet: the router has heard of the prefill's end.
    machine = sent_ahead(prefilled=True)
    assert machine.handle(mv.AnswerBegan(), 2.0) == [mv.TakeUp(AHEAD), mv.FirstToken("r")]
    assert machine.handle(FOLLOWS, 3.0) == []


def test_a_prefill_that_fails_while_the_other_instance_waits_ends_both() -> None:
    for direct in (True, False):
        for event, now, told in (
            (mv.PrefillEnded("broke", True), 1.0, ("broke", True)),
            (mv.PrefillEnded("stopped early"), 1.0, ("stopped early", False)),
            (mv.Tick(), 20.0, ("deadline", True)),
        ):
            machine = sent_ahead(direct=direct)
            assert machine.handle(event, now) == [mv.Abort(), mv.AwaitNext("r", 0, *told)]
            assert machine.handle(mv.AnswerBegan(), now) == []
            assert machine.handle(replace(FOLLOWS, index=2), now) == [
                mv.Serve(replace(EAGER_ALONE, decision_id="d", cached_tokens=32))
            ]


def test_an_instance_that_refuses_ahead_ends_the_prefill_and_is_asked_without_kv() -> None:
    cases: list[tuple[bool, mv.Event, str]] = [
        (True, mv.UpstreamFailed("status 500", 500), "status 500"),
        (True, mv.UpstreamFailed("no answer"), "no answer"),
        (True, mv.AnswerRejected(400), "status 400"),
        (False, mv.PullEnded("status 500"), "status 500"),
    ]
    for direct, event, error in cases:
        machine = sent_ahead(direct=direct)
        # Its instance is not to blame for the prefill.
        assert machine.handle(event, 1.0) == [mv.Abort(), mv.AwaitNext("r", 0, f"the other instance: {error}")]
        assert machine.handle(EAGER_ALONE, 2.0) == [mv.Serve(EAGER_ALONE)]
        assert machine.deadline == 32.0
        # Told while the router is asked for the step that failed: it is given, and then told.
        machine = sent_ahead(direct=direct, prefilled=True)
        assert machine.handle(event, 2.0) == []
        taken, *rest = machine.handle(FOLLOWS, 3.0)
        assert taken == mv.TakeUp(FOLLOWS)
        if error == "no answer":
            assert rest[-1] == mv.Ask("r.1", ("b",))
        else:
            assert rest[-1] == mv.AwaitNext("r", 1, error)


def test_without_the_router_what_was_sent_ahead_goes_on() -> None:
    for event, now in ((mv.RouterLost("r"), 2.0), (mv.Tick(), 11.0)):
        machine = sent_ahead(prefilled=True)
        (taken,) = machine.handle(event, now)
        assert taken == mv.TakeUp(replace(AHEAD, degraded=True))
        assert machine.phase is Phase.SERVING


def test_without_the_router_what_was_sent_ahead_and_failed_is_told_once_more_and_then_served_alone() -> None:
    machine = sent_ahead(direct=False, prefilled=True)
    assert machine.handle(mv.PullEnded("broke"), 2.0) == []
    taken = replace(AHEAD, degraded=True)
    assert machine.handle(mv.Tick(), 11.0) == [mv.TakeUp(taken), mv.AwaitNext("r", 1, "broke")]
    (effect,) = machine.handle(mv.Tick(), 21.0)
    assert effect == mv.Serve(StepGiven("r", EAGER_B, 2, degraded=True))


def test_another_step_than_the_one_sent_ahead_replaces_it() -> None:
    machine = sent_ahead(prefilled=True)
    other = StepGiven("r", A, index=1)
    assert machine.handle(other, 2.0) == [mv.Abort(), mv.Serve(other)]
    machine = sent_ahead(prefilled=True)
    assert machine.handle(mv.Refused("r", 14, "gone"), 2.0) == [mv.Abort(), mv.Fail(14, "gone")]


def test_a_client_that_leaves_ends_both() -> None:
    for prefilled in (False, True):
        machine = sent_ahead(prefilled=prefilled)
        assert machine.handle(mv.ClientGone(), 1.5) == [mv.Abort(), mv.Finished("r", Outcome.CANCELLED, "client left")]


EVENTS = st.one_of(
    st.builds(
        StepGiven,
        st.sampled_from(["r", "r.1", "r.2"]),
        st.sampled_from([A, B, EAGER_A, EAGER_B]),
        prefill_tokens=st.sampled_from([0, 16]),
        kv_target=st.sampled_from([None, B, EAGER_B]),
        kv_source=st.sampled_from([None, A, EAGER_A]),
    ),
    st.builds(mv.Refused, st.sampled_from(["r", "r.1", "r.2"]), st.sampled_from([5, 8, 14]), st.just("no")),
    st.builds(mv.RouterLost, st.sampled_from(["r", "r.1", "r.2"])),
    st.builds(mv.PrefillEnded, st.sampled_from(["", "broke"])),
    st.builds(mv.PullEnded, st.sampled_from(["", "broke"])),
    st.builds(mv.AnswerEnded, st.sampled_from(["", "broke"])),
    st.builds(mv.AnswerRejected, st.just(400)),
    st.builds(mv.UpstreamFailed, st.just("no"), st.sampled_from([0, 500])),
    st.sampled_from([mv.AnswerBegan(), mv.ClientGone(), mv.Tick()]),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=30), st.booleans())
def test_every_attempt_ends_exactly_once_whatever_happens(history: list[tuple[mv.Event, float]], direct: bool) -> None:
    machine = Choreography("r", LIMITS, direct=direct)
    now, asked, ended, refused, first = 0.0, set[str](), list[str](), 0, list[str]()
    effects = machine.start(now)
    # The client leaves in the end, so that every history comes to one.
    for event, passed in [*history, (mv.ClientGone(), 0.0), (mv.ClientGone(), 0.0)]:
        for effect in effects:
            if isinstance(effect, mv.Ask | mv.AskLocally):
                asked.add(effect.attempt_id)
            elif isinstance(effect, mv.Finished):
                ended.append(effect.attempt_id)
            elif isinstance(effect, mv.FirstToken):
                first.append(effect.attempt_id)
        assert len(asked) <= 1 + LIMITS.retries
        assert machine.deadline is not None or machine.phase in (Phase.STREAMING, Phase.DONE)
        open_before = machine.phase is not Phase.DONE
        now += passed
        effects = machine.handle(event, now)
        if open_before and machine.phase is Phase.DONE and isinstance(event, mv.Refused):
            refused += 1
    assert machine.phase is Phase.DONE
    assert effects == []
    assert len(ended) == len(set(ended)) == len(asked) - refused
    assert set(ended) <= asked
    assert len(first) == len(set(first)) <= 1


class Conversation(RuleBasedStateMachine):
    """Engines, a router, a client and a clock that do anything they can do, in any order; the machine's effects are carried out.

    Only what is open can end, as with real connections: the machine is held to have one thing open at most (and what is sent
    ahead of a PREFILL's end), to leave nothing open when it is done, and to give the client one answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = Choreography("r", LIMITS)
        self.waiting: mv.Effect | None = None  # what was asked of the router
        self.upstream: mv.Effect | None = None  # what is open at an engine
        self.ahead: mv.Serve | mv.Pull | None = None  # what is open at another one meanwhile
        self.early: mv.Serve | mv.Pull | None = None  # what was open there, and has failed
        self.answers: list[str] = []
        self.ended: list[str] = []
        self.plain_only: set[str] = set()

    @initialize(direct=st.booleans(), first=st.sampled_from([None, EAGER, SLICE]))
    def begin(self, direct: bool, first: StepGiven | None) -> None:
        self.machine = Choreography("r", LIMITS, direct=direct)
        self.carry_out(self.machine.start(self.now))
        if first is not None:
            self.tell(first)
        if first is SLICE:
            self.helper_ended("")

    def tell(self, event: mv.Event) -> None:
        self.carry_out(self.machine.handle(event, self.now))

    def carry_out(self, effects: list[mv.Effect]) -> None:
        for effect in effects:
            match effect:
                case mv.Ask() | mv.AskLocally() | mv.AwaitNext():
                    assert self.upstream is None, "asked for the next step while one runs"
                    if not isinstance(effect, mv.AwaitNext) or effect.error:
                        assert self.ahead is None, "a failure ends both"
                    if isinstance(effect, mv.AwaitNext) and effect.error:
                        self.plain_only.add(effect.attempt_id)
                    self.waiting = effect
                case mv.Serve(step, ahead=True) | mv.Pull(step, ahead=True):
                    assert isinstance(self.upstream, mv.Prefill)
                    assert self.upstream.step.kv_target == step.target != self.upstream.step.target
                    assert step.attempt_id not in self.plain_only
                    self.ahead = effect
                case mv.TakeUp(step):
                    # What computed the KV may still say so; nobody waits for it.
                    taken = self.ahead or self.early
                    assert taken is not None
                    assert taken.step.target == step.target
                    self.upstream, self.ahead, self.early, self.waiting = self.ahead, None, None, None
                case mv.StepOver(attempt_id):
                    assert isinstance(self.upstream, mv.Prefill)
                    assert attempt_id == self.machine.attempt_id
                case mv.Prefill(step) | mv.Pull(step) | mv.Serve(step):
                    assert self.upstream is None, "two requests at once"
                    assert self.ahead is None
                    assert step.attempt_id not in self.ended
                    if step.attempt_id in self.plain_only:
                        assert isinstance(effect, mv.Serve)
                        assert step.kv_source is None
                    self.waiting, self.upstream = None, effect
                case mv.Abort():
                    self.upstream = self.ahead = self.early = None
                case mv.FirstToken():
                    self.answers.append("stream")
                case mv.Finished(attempt_id, outcome):
                    assert attempt_id not in self.ended
                    self.ended.append(attempt_id)
                    if outcome is Outcome.REJECTED:
                        self.answers.append("rejection")
                    elif outcome is Outcome.CANCELLED and not self.answers and self.machine.phase is Phase.DONE:
                        self.answers.append("nobody listens")
                case mv.Fail():
                    self.answers.append("error")
                case mv.BreakStream():
                    assert self.answers == ["stream"]

    @precondition(lambda self: self.waiting is not None)
    @rule(
        where=st.sampled_from([A, B]),
        shape=st.sampled_from(["serve", "slice", "prefill", "fetch", "eager", "follows", "follows"]),
        own=st.booleans(),
    )
    def step_given(self, where: Target, shape: str, own: bool) -> None:
        step = StepGiven(
            self.machine.attempt_id,
            {"eager": EAGER_A, "follows": EAGER_B}.get(shape, where),
            prefill_tokens=64 * (shape in ("slice", "prefill", "eager")),
            kv_target={"prefill": B, "eager": EAGER_B}.get(shape),
            kv_source={"fetch": A, "follows": EAGER_A}.get(shape),
            deadline_s=2.0 * own,
        )
        self.tell(step)

    @precondition(lambda self: self.waiting is not None)
    @rule(code=st.sampled_from([5, 8, 14]))
    def refused(self, code: int) -> None:
        self.tell(mv.Refused(self.machine.attempt_id, code, "no"))

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def router_lost(self) -> None:
        self.tell(mv.RouterLost(self.machine.attempt_id))

    @precondition(lambda self: self.ahead is not None)
    @rule(
        event=st.sampled_from(["", mv.UpstreamFailed("broke"), mv.UpstreamFailed("broke", 500), mv.AnswerRejected(400)])
    )
    def ahead_ended(self, event: mv.Event | str) -> None:
        ahead = self.ahead
        good = event == ""
        if isinstance(ahead, mv.Pull):
            event = mv.PullEnded("" if good else "broke")
        elif good:
            event = mv.AnswerBegan()
        if not good or isinstance(ahead, mv.Pull):
            self.ahead, self.early = None, ahead
        assert not isinstance(event, str)
        self.tell(event)

    @precondition(lambda self: isinstance(self.upstream, mv.Prefill | mv.Pull))
    @rule(error=st.sampled_from(["", "broke"]))
    def helper_ends(self, error: str) -> None:
        self.helper_ended(error)

    def helper_ended(self, error: str) -> None:
        pulled = isinstance(self.upstream, mv.Pull)
        self.upstream = None
        self.tell(mv.PullEnded(error) if pulled else mv.PrefillEnded(error))

    @precondition(lambda self: isinstance(self.upstream, mv.Serve) and self.machine.phase is Phase.SERVING)
    @rule(event=st.sampled_from([mv.AnswerBegan(), mv.AnswerRejected(400)]))
    def answered(self, event: mv.Event) -> None:
        if isinstance(event, mv.AnswerRejected):
            self.upstream = None
        self.tell(event)

    @precondition(lambda self: isinstance(self.upstream, mv.Serve))
    @rule(status=st.sampled_from([0, 500]))
    def serve_failed(self, status: int) -> None:
        self.tell(mv.UpstreamFailed("broke", status))

    @precondition(lambda self: self.machine.phase is Phase.STREAMING)
    @rule(error=st.sampled_from(["", "its own"]))
    def answer_ended(self, error: str) -> None:
        self.upstream = None
        self.tell(mv.AnswerEnded(error))

    @rule(event=EVENTS)
    def something_stale(self, event: mv.Event) -> None:
        """What belongs to an attempt that is over changes nothing."""
        if isinstance(event, StepGiven | mv.Refused | mv.RouterLost) and event.attempt_id != self.machine.attempt_id:
            assert self.machine.handle(event, self.now) == []

    @rule()
    def client_gone(self) -> None:
        self.tell(mv.ClientGone())

    @rule(passed=st.sampled_from([0.0, 1.9, 5.0, 30.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.tell(mv.Tick())

    @precondition(lambda self: self.machine.deadline is not None)
    @rule()
    def deadline(self) -> None:
        assert self.machine.deadline is not None
        before = (self.machine.phase, self.machine.attempt_id, self.machine.step)
        self.now = max(self.now, self.machine.deadline)
        self.tell(mv.Tick())
        after = (self.machine.phase, self.machine.attempt_id, self.machine.step)
        assert after != before, "a deadline that changes nothing"

    @invariant()
    def one_answer_and_nothing_left(self) -> None:
        assert len(self.answers) <= 1
        if self.machine.phase is Phase.DONE:
            assert len(self.answers) == 1
            assert self.upstream is None
        elif self.machine.phase is not Phase.STREAMING:
            assert self.answers == []
            assert self.machine.deadline is not None

    def teardown(self) -> None:
        # Silence to the end: the deadlines alone bring every request to its one answer.
        for _ in range(40):
            if self.machine.deadline is None:
                break
            self.now = self.machine.deadline
            self.tell(mv.Tick())
        if self.machine.phase is Phase.STREAMING:
            self.tell(mv.ClientGone())
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
    allowed = [one for one in ids if one != "a"]
    if not allowed:
        assert chosen is None
    else:
        assert chosen in allowed
        assert inflight.get(chosen, 0) == min(inflight.get(one, 0) for one in allowed)


def test_equals_take_turns() -> None:
    assert [least_inflight(["a", "b"], {}, (), turn) for turn in range(3)] == ["a", "b", "a"]
