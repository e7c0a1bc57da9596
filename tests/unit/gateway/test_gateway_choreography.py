"""The request machine: exactly one Finished for each attempt, bounded attempts, a deadline at every arrow."""

from __future__ import annotations

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
    assert effects == [mv.Abort(), mv.Finished("r", Outcome.FAILED, "reset"), mv.BreakStream("The instance failed.")]


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


EVENTS = st.one_of(
    st.builds(
        StepGiven,
        st.sampled_from(["r", "r.1", "r.2"]),
        st.sampled_from([A, B]),
        prefill_tokens=st.sampled_from([0, 16]),
        kv_target=st.sampled_from([None, B]),
        kv_source=st.sampled_from([None, A]),
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

    Only what is open can end, as with real connections: the machine is held to have one thing open at most, to leave nothing
    open when it is done, and to give the client one answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = Choreography("r", LIMITS)
        self.waiting: mv.Effect | None = None  # what was asked of the router
        self.upstream: mv.Effect | None = None  # what is open at an engine
        self.answers: list[str] = []
        self.ended: list[str] = []
        self.plain_only: set[str] = set()

    @initialize(direct=st.booleans())
    def begin(self, direct: bool) -> None:
        self.machine = Choreography("r", LIMITS, direct=direct)
        self.carry_out(self.machine.start(self.now))

    def tell(self, event: mv.Event) -> None:
        self.carry_out(self.machine.handle(event, self.now))

    def carry_out(self, effects: list[mv.Effect]) -> None:
        for effect in effects:
            match effect:
                case mv.Ask() | mv.AskLocally() | mv.AwaitNext():
                    assert self.upstream is None, "asked for the next step while one runs"
                    if isinstance(effect, mv.AwaitNext) and effect.error:
                        self.plain_only.add(effect.attempt_id)
                    self.waiting = effect
                case mv.Prefill(step) | mv.Pull(step) | mv.Serve(step):
                    assert self.upstream is None, "two requests at once"
                    assert step.attempt_id not in self.ended
                    if step.attempt_id in self.plain_only:
                        assert isinstance(effect, mv.Serve)
                        assert step.kv_source is None
                    self.waiting, self.upstream = None, effect
                case mv.Abort():
                    self.upstream = None
                case mv.FirstToken():
                    self.answers.append("stream")
                case mv.Finished(attempt_id, outcome):
                    assert attempt_id not in self.ended
                    self.ended.append(attempt_id)
                    if outcome is Outcome.REJECTED:
                        self.answers.append("rejection")
                    elif outcome is Outcome.CANCELLED and not self.answers:
                        self.answers.append("nobody listens")
                case mv.Fail():
                    self.answers.append("error")
                case mv.BreakStream():
                    assert self.answers == ["stream"]

    @precondition(lambda self: self.waiting is not None)
    @rule(
        where=st.sampled_from([A, B]), shape=st.sampled_from(["serve", "slice", "prefill", "fetch"]), own=st.booleans()
    )
    def step_given(self, where: Target, shape: str, own: bool) -> None:
        step = StepGiven(
            self.machine.attempt_id,
            where,
            prefill_tokens=64 * (shape in ("slice", "prefill")),
            kv_target=B if shape == "prefill" else None,
            kv_source=A if shape == "fetch" else None,
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

    @precondition(lambda self: isinstance(self.upstream, mv.Prefill | mv.Pull))
    @rule(error=st.sampled_from(["", "broke"]))
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
        before = (self.machine.phase, self.machine.attempt_id)
        self.now = max(self.now, self.machine.deadline)
        self.tell(mv.Tick())
        assert (self.machine.phase, self.machine.attempt_id) != before, "a deadline that changes nothing"

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
TestConversation.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


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
