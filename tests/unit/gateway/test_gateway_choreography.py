"""The request machine: exactly one Finished for each attempt, bounded attempts, a deadline at every arrow."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway import choreography as ch
from services.gateway.choreography import Choreography, Limits, Outcome, Phase, StepGiven, Target

LIMITS = Limits(place_s=10, prefill_s=20, first_byte_s=30, retries=2)
A, B = Target("a", "http://a"), Target("b", "http://b", 1)


def begun() -> Choreography:
    machine = Choreography("r", LIMITS)
    assert machine.start(0.0) == [ch.Ask("r", ())]
    return machine


def serving(target: Target = A, **step: Any) -> Choreography:
    machine = begun()
    given = StepGiven("r", target, **step)
    assert machine.handle(given, 1.0) == [ch.Serve(given)]
    return machine


def test_the_plain_way() -> None:
    machine = serving()
    assert machine.deadline == 31.0
    assert machine.handle(ch.AnswerBegan(), 2.0) == [ch.FirstToken("r")]
    assert machine.deadline is None
    assert machine.handle(ch.AnswerEnded(), 3.0) == [ch.Finished("r", Outcome.OK)]
    assert machine.phase is Phase.DONE


def test_a_steps_own_deadline_is_kept() -> None:
    assert serving(deadline_s=5.0).deadline == 6.0
    assert serving(deadline_s=500.0).deadline == 31.0


def test_prefill_then_serve() -> None:
    machine = begun()
    first = StepGiven("r", A, prefill_tokens=64)
    assert machine.handle(first, 1.0) == [ch.Prefill(first)]
    assert machine.deadline == 21.0
    assert machine.handle(ch.PrefillEnded(), 2.0) == [ch.AwaitNext("r", 0, "")]
    second = StepGiven("r", B, index=1)
    assert machine.handle(second, 3.0) == [ch.Serve(second)]


def test_a_late_prefill_is_aborted_and_the_router_asked_what_now() -> None:
    machine = begun()
    machine.handle(StepGiven("r", A, prefill_tokens=64), 0.0)
    assert machine.handle(ch.Tick(), 19.9) == []
    assert machine.handle(ch.Tick(), 20.0) == [ch.Abort(), ch.AwaitNext("r", 0, "deadline")]


def test_without_a_next_step_the_prefilled_instance_serves() -> None:
    for event, now in ((ch.Tick(), 99.0), (ch.RouterLost("r"), 3.0)):
        machine = begun()
        machine.handle(StepGiven("r", A, prefill_tokens=64), 1.0)
        machine.handle(ch.PrefillEnded("broke"), 2.0)
        (effect,) = machine.handle(event, now)
        assert isinstance(effect, ch.Serve)
        assert (effect.step.target, effect.step.index, effect.step.degraded) == (A, 1, True)


def test_a_failure_before_the_first_byte_goes_elsewhere_at_most_twice() -> None:
    machine = serving()
    for attempt, excluded in ((1, ("a",)), (2, ("a", "a1"))):
        abort, finished, ask = machine.handle(ch.UpstreamFailed("no", 500), 2.0)
        assert abort == ch.Abort()
        assert isinstance(finished, ch.Finished)
        assert (finished.outcome, finished.status) == (Outcome.FAILED, 500)
        assert ask == ch.Ask(f"r.{attempt}", excluded)
        machine.handle(StepGiven(f"r.{attempt}", Target(f"a{attempt}", "")), 3.0)
    *_, last = machine.handle(ch.UpstreamFailed("no"), 4.0)
    assert isinstance(last, ch.Fail)
    assert last.code == ch.FAILED
    assert machine.phase is Phase.DONE


def test_silence_before_the_first_byte_counts_as_a_failure() -> None:
    machine = serving()
    assert machine.handle(ch.Tick(), 31.0)[-1] == ch.Ask("r.1", ("a",))


def test_after_the_first_byte_the_stream_breaks() -> None:
    machine = serving()
    machine.handle(ch.AnswerBegan(), 2.0)
    effects = machine.handle(ch.UpstreamFailed("reset"), 3.0)
    assert effects == [ch.Abort(), ch.Finished("r", Outcome.FAILED, "reset"), ch.BreakStream("The instance failed.")]


def test_a_failure_that_the_engine_told_the_client_is_not_told_twice() -> None:
    machine = serving()
    machine.handle(ch.AnswerBegan(), 2.0)
    assert machine.handle(ch.AnswerEnded("its own"), 3.0) == [ch.Abort(), ch.Finished("r", Outcome.FAILED, "its own")]


def test_a_rejection_is_final() -> None:
    machine = serving()
    assert machine.handle(ch.AnswerRejected(422), 2.0) == [ch.Finished("r", Outcome.REJECTED, "rejected", 422)]


def test_a_refusal_reserves_nothing() -> None:
    machine = begun()
    assert machine.handle(ch.Refused("r", 8, "full", 3.0), 1.0) == [ch.Fail(8, "full", 3.0)]


def test_a_lost_router_leads_to_a_placement_of_our_own() -> None:
    machine = begun()
    assert machine.handle(ch.RouterLost("r"), 1.0) == [ch.AskLocally("r", ())]
    given = StepGiven("r", A, degraded=True)
    assert machine.handle(given, 2.0) == [ch.Serve(given)]
    # The next attempt asks the router again: it may be back.
    assert machine.handle(ch.UpstreamFailed("no"), 3.0)[-1] == ch.Ask("r.1", ("a",))


def test_a_client_that_leaves_ends_every_phase() -> None:
    machine = begun()
    assert machine.handle(ch.ClientGone(), 1.0) == [ch.Abort(), ch.Finished("r", Outcome.CANCELLED, "client left")]
    assert machine.handle(StepGiven("r", A), 2.0) == []


def test_no_step_in_time_is_an_error() -> None:
    machine = begun()
    abort, finished, fail = machine.handle(ch.Tick(), 10.0)
    assert (abort, finished) == (ch.Abort(), ch.Finished("r", Outcome.FAILED, "no step in time"))
    assert isinstance(fail, ch.Fail)
    assert fail.code == ch.TIMED_OUT


EVENTS = st.one_of(
    st.builds(
        StepGiven,
        st.sampled_from(["r", "r.1", "r.2"]),
        st.sampled_from([A, B]),
        prefill_tokens=st.sampled_from([0, 16]),
    ),
    st.builds(ch.Refused, st.sampled_from(["r", "r.1", "r.2"]), st.sampled_from([5, 8, 14]), st.just("no")),
    st.builds(ch.RouterLost, st.sampled_from(["r", "r.1", "r.2"])),
    st.builds(ch.PrefillEnded, st.sampled_from(["", "broke"])),
    st.builds(ch.AnswerEnded, st.sampled_from(["", "broke"])),
    st.builds(ch.AnswerRejected, st.just(400)),
    st.builds(ch.UpstreamFailed, st.just("no")),
    st.sampled_from([ch.AnswerBegan(), ch.ClientGone(), ch.Tick()]),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=30))
def test_every_attempt_ends_exactly_once_whatever_happens(history: list[tuple[ch.Event, float]]) -> None:
    machine = Choreography("r", LIMITS)
    now, asked, ended, refused, first = 0.0, set[str](), list[str](), 0, list[str]()
    effects = machine.start(now)
    # The client leaves in the end, so that every history comes to one.
    for event, passed in [*history, (ch.ClientGone(), 0.0), (ch.ClientGone(), 0.0)]:
        for effect in effects:
            if isinstance(effect, ch.Ask | ch.AskLocally):
                asked.add(effect.attempt_id)
            elif isinstance(effect, ch.Finished):
                ended.append(effect.attempt_id)
            elif isinstance(effect, ch.FirstToken):
                first.append(effect.attempt_id)
        assert len(asked) <= 1 + LIMITS.retries
        assert machine.deadline is not None or machine.phase in (Phase.STREAMING, Phase.DONE)
        open_before = machine.phase is not Phase.DONE
        now += passed
        effects = machine.handle(event, now)
        if open_before and machine.phase is Phase.DONE and isinstance(event, ch.Refused):
            refused += 1
    assert machine.phase is Phase.DONE
    assert effects == []
    assert len(ended) == len(set(ended)) == len(asked) - refused
    assert set(ended) <= asked
    assert len(first) == len(set(first)) <= 1


@given(
    st.lists(st.sampled_from("abc"), unique=True),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    st.integers(0, 9),
)
def test_least_inflight_takes_one_of_the_emptiest(ids: list[str], inflight: dict[str, int], turn: int) -> None:
    chosen = ch.least_inflight(ids, inflight, ("a",), turn)
    allowed = [one for one in ids if one != "a"]
    if not allowed:
        assert chosen is None
    else:
        assert chosen in allowed
        assert inflight.get(chosen, 0) == min(inflight.get(one, 0) for one in allowed)


def test_equals_take_turns() -> None:
    assert [ch.least_inflight(["a", "b"], {}, (), turn) for turn in range(3)] == ["a", "b", "a"]
