"""When an instance that fails is left alone, and when it is tried again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman_router.core.instances.engine_life import (
    CIRCUIT_OPEN,
    NOT_ANSWERING,
    PROGRESS_S,
    UNREACHED,
    EngineLife,
    LifeSettings,
    PoolAnswers,
    Wait,
)

SETTINGS = LifeSettings(failures=3, first_open_s=1.0, max_open_s=5.0)


def broken(now: float = 0.0) -> EngineLife:
    life = EngineLife()
    assert [life.failed(f"r{index}", now, SETTINGS) for index in range(3)] == [False, False, True]
    return life


def test_failures_in_a_row_open_it_and_an_answer_between_does_not_let_them_add_up() -> None:
    life = EngineLife()
    for _ in range(5):
        life.failed("r", 0.0, SETTINGS)
        life.failed("s", 0.0, SETTINGS)
        assert not life.answered("trial-2", 100.0)
    assert not life.open(0.0)
    assert broken().open(0.5)


def test_one_request_is_on_trial_at_a_time() -> None:
    life = broken()
    assert not life.open(1.0)
    life.placed("trial", 1.0)
    assert life.open(100.0), "the others wait for its end"
    life.left("other", 1.0, SETTINGS)
    assert life.open(100.0)
    life.left("trial", 2.0, SETTINGS)
    assert not life.open(100.0), "its client left: another one may try"
    life.placed("trial-2", 100.0)
    assert life.answered("trial-2", 100.0)
    assert not life.open(100.0)


def test_each_failed_trial_doubles_the_time_up_to_the_limit() -> None:
    life, now, waited = broken(), 0.0, []
    for index in range(6):
        start = now
        while life.open(now):
            now += 0.5
        waited.append(now - start)
        life.placed(f"t{index}", now)
        assert life.failed(f"t{index}", now, SETTINGS)
    assert waited == [1, 2, 4, 5, 5, 5]


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    life = broken()
    assert not life.failed("late", 0.9, SETTINGS)
    assert not life.open(1.0)
    life.placed("trial", 1.0)
    assert not life.failed("later", 1.1, SETTINGS)
    assert life.open(1.1), "the trial goes on"


def test_what_put_it_out_says_whether_others_have_answered() -> None:
    pool = PoolAnswers()
    alone, ill, well = EngineLife(), EngineLife(pool), EngineLife(pool)
    while not alone.errored("r", 404, 0.0, SETTINGS):
        pass
    assert alone.why().endswith(" requests in a row with status 404, and no other engine has answered")
    well.answered("w", 0.0)
    while not ill.errored("r", 404, 0.0, SETTINGS):
        well.answered("w", 0.0)
    assert ill.why().endswith(" requests in a row with status 404, and others answer")


def test_zero_failures_mean_never() -> None:
    never = EngineLife()
    assert not any(never.failed("r", 0.0, LifeSettings(failures=0)) for _ in range(50))
    assert not never.open(0.0)


@given(st.lists(st.sampled_from(["fail", "answer", "leave", "place", "wait"]), max_size=60))
def test_an_instance_is_never_left_alone_for_good(actions: list[str]) -> None:
    """In any order of events, an instance gets a request again once all its requests have ended and `max_open_s` has passed. An
    instance that answers gets requests without limit."""
    life, now, open_ones = EngineLife(), 0.0, []
    for number, action in enumerate(actions):
        if action == "wait":
            now += 0.7
        elif action == "place" and not life.open(now):
            life.placed(f"r{number}", now)
            open_ones.append(f"r{number}")
        elif open_ones and action in ("fail", "leave"):
            request = open_ones.pop(0)
            if action == "fail":
                life.failed(request, now, SETTINGS)
            else:
                life.left(request, now, SETTINGS)
        elif open_ones and action == "answer":
            open_ones.pop(0)
            life.answered("", now)
            assert not life.open(now)
    for request in open_ones:
        life.left(request, now, SETTINGS)
    assert not life.open(now + SETTINGS.max_open_s)


class LifeMachine(RuleBasedStateMachine):
    """Three engines of a pool, by the evidence alone: a working one, one that answers one status to everything, and one that
    answers nothing. The clock never goes back; requests are placed on whatever may get them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolAnswers()
        self.works, self.errs, self.hangs = (EngineLife(self.pool) for _ in range(3))
        self.now, self.number = 0.0, 0
        self.open: list[str] = []  # at the one that hangs
        self.lost = 0
        self.hanging_since: float | None = None

    def name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    @rule(passed=st.sampled_from([0.1, 0.6, 3.0]))
    def time_passes(self, passed: float) -> None:
        # A router's tick comes every half second.
        for _ in range(max(round(passed / 0.5), 1)):
            self.now += min(passed, 0.5)
            for life in (self.works, self.errs, self.hangs):
                if life.overdue(self.now):
                    life.silent(self.now, SETTINGS)

    @rule(count=st.integers(1, 8))
    def good_requests(self, count: int) -> None:
        """Each request goes to all three, as if each had its share of them."""
        for _ in range(count):
            request = self.name()
            self.works.placed(request, self.now)
            self.works.answered(request, self.now)
            if not self.errs.open(self.now):
                self.errs.placed(request, self.now)
                self.errs.errored(request, 404, self.now, SETTINGS)
                self.errs.gone(request)

    @rule(kind=st.sampled_from([400, 500, 0]))
    def bad_request(self, kind: int) -> None:
        """A client's own fault, which another working engine (that is not a part of the pool here) finds, too."""
        request = self.name()
        if kind:
            self.works.errored(request, kind, self.now, SETTINGS)
        else:
            self.works.failed(request, self.now, SETTINGS)
        self.works.excused(SETTINGS, broke=not kind, witness=True)

    @precondition(lambda self: not self.hangs.open(self.now))
    @rule()
    def place_on_the_silent_one(self) -> None:
        request = self.name()
        self.hangs.placed(request, self.now)
        self.hangs.waits(request, Wait(self.now, 0.1, 0.1), streamed=True)
        self.open.append(request)
        if self.hanging_since is None:
            self.hanging_since = self.now

    @precondition(lambda self: self.open)
    @rule()
    def a_client_leaves(self) -> None:
        request = self.open.pop(0)
        waited = self.now - self.hangs.streams[request].placed_at
        self.lost += waited >= 3.0
        self.hangs.left(request, self.now, SETTINGS)

    @invariant()
    def an_engine_that_answers_is_in(self) -> None:
        assert not self.works.opened

    @invariant()
    def one_that_answers_an_error_to_everything_is_out_within_20_requests(self) -> None:
        if self.errs.errors >= 20 and self.pool.answers >= 20 and self.pool.errors <= self.errs.errors + 3:
            assert self.errs.opened

    @invariant()
    def one_that_answers_nothing_is_out_in_time(self) -> None:
        if self.lost >= SETTINGS.failures:
            assert self.hangs.opened
        if (
            self.open
            and self.hanging_since is not None
            and self.now - self.hangs.streams[self.open[0]].placed_at > 11.0
        ):
            assert self.hangs.opened

    @invariant()
    def it_is_tried_again_by_one_at_a_time(self) -> None:
        for life in (self.errs, self.hangs):
            if life.opened:
                assert life.until <= self.now + SETTINGS.max_open_s
                assert not life.trial or life.open(self.now)


TestLife = LifeMachine.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def breaks(life: EngineLife, request_id: str, now: float = 0.0) -> bool:
    life.placed(request_id, now)
    life.began(request_id, now)
    changed = life.broke_off(request_id, now, SETTINGS)
    life.gone(request_id)
    return changed


def answers(life: EngineLife, request_id: str, now: float = 0.0) -> None:
    life.placed(request_id, now)
    life.began(request_id, now)
    life.answered(request_id, now)
    life.gone(request_id)


def test_streams_that_break_after_their_first_token_add_up_beside_others_that_end() -> None:
    pool = PoolAnswers()
    ill, well = EngineLife(pool), EngineLife(pool)
    number = 0
    while not breaks(ill, f"r{number}"):
        answers(well, f"w{number}")
        number += 1
        assert number < 20
    assert ill.opened
    assert not well.opened
    assert "by breaking the connection" in ill.why()
    ill.placed("trial", 100.0)
    assert not ill.began("trial", 100.0), "a first token shows nothing"
    assert ill.broke_off("trial", 100.0, SETTINGS), "the trial has failed"
    ill.placed("trial-2", 200.0)
    ill.began("trial-2", 200.0)
    assert ill.answered("trial-2", 200.0), "one that ends well puts it in"
    assert (ill.opened, ill.errors, ill.failures) == (0, 0, 0)


def test_first_tokens_of_streams_that_break_do_not_hide_answers_that_are_lost_whole() -> None:
    """An engine that spoils each answer: streams after some tokens, others before any byte of them is passed on."""
    life = EngineLife()
    assert not breaks(life, "s0")
    assert not life.failed("w0", 0.0, SETTINGS)
    assert not breaks(life, "s1")
    assert life.failed("w1", 0.0, SETTINGS)
    well = EngineLife()
    for number in range(30):
        breaks(well, f"s{number}")
        well.failed(f"w{number}", 0.0, SETTINGS)
        answers(well, f"a{number}")
        assert not well.opened


def test_breaks_that_another_engine_repeats_leave_only_answers_that_are_lost() -> None:
    life = EngineLife()
    life.failed("w0", 0.0, SETTINGS)
    for number in range(10):
        assert not breaks(life, f"s{number}")
        life.excused(SETTINGS, broke=True, witness=True)
    assert (life.failures <= 1, life.opened) == (True, 0)


def test_requests_that_every_engine_rejects_hide_no_breaks() -> None:
    pool = PoolAnswers()
    ill, well = EngineLife(pool), EngineLife(pool)
    for number in range(5):
        for other in range(4):
            answers(well, f"w{number}-{other}")
        well.errored(f"bad-{number}", 400, 0.0, SETTINGS)
        breaks(ill, f"r{number}")
    assert ill.opened
    assert not well.opened


def test_a_long_answer_on_trial_shows_by_its_bytes_that_answers_go_on() -> None:
    life = EngineLife()
    for number in range(3):
        life.began(f"r{number}", 0.0)
    assert [life.broke_off(f"r{number}", 0.0, SETTINGS) for number in range(3)] == [False, False, True]
    life.placed("trial", 1.0)
    life.began("trial", 1.5)
    assert not life.sign(1.5 + PROGRESS_S / 2, 1.5 + PROGRESS_S / 2)
    assert life.sign(1.5 + PROGRESS_S, 1.5 + PROGRESS_S)
    assert not life.opened


def test_an_answer_that_ends_between_breaks_and_pools_where_all_break_alike_put_nobody_out() -> None:
    life = EngineLife()
    for number in range(60):
        breaks(life, f"r{number}")
        breaks(life, f"s{number}")
        answers(life, f"t{number}")
        assert not life.opened
    pool = PoolAnswers()
    lives = [EngineLife(pool) for _ in range(3)]
    for number in range(16):
        assert not any(breaks(life, f"r{number}") for life in lives)


def test_a_break_that_another_engine_repeats_is_the_fault_of_the_request() -> None:
    pool = PoolAnswers()
    one, other = EngineLife(pool), EngineLife(pool)
    for number in range(60):
        answers(other, f"w{number}")
        assert not breaks(one, f"r{number}")
        one.excused(SETTINGS, broke=True, witness=True)
        assert (one.breaks, one.errors, one.failures) == (0, 0, 0)


def test_answers_that_stand_still_count_as_breaks_once_each() -> None:
    pool = PoolAnswers()
    ill, well = EngineLife(pool), EngineLife(pool)
    number = 0
    while not ill.opened:
        request = f"r{number}"
        ill.placed(request, 0.0)
        ill.began(request, 0.0)
        for _ in range(10):
            ill.stalled(request, 20.0, SETTINGS, idle=False)
        ill.left(request, 20.0, SETTINGS)
        answers(well, f"w{number}")
        number += 1
        assert number < 20
    assert number > 3
    assert not ill.standing
    ill.placed("trial", 100.0)
    assert not ill.began("trial", 100.0)
    assert ill.stalled("trial", 111.0, SETTINGS, idle=False), "the trial has failed"


def unreached_after_a_break() -> EngineLife:
    life = EngineLife()
    life.began("a", 0.0)
    life.broke_off("a", 1.0, SETTINGS)
    for number in range(3):
        life.failed(f"b{number}", 1.0, SETTINGS, UNREACHED)
    return life


def test_others_may_go_to_an_engine_whose_answer_on_trial_has_begun() -> None:
    """A pool of which answers arrive is not refused, whatever the engine did before and whether its agent is there."""
    life = unreached_after_a_break()
    assert life.excluded(1.5, agent_gone=True) == NOT_ANSWERING
    life.placed("trial", 2.5)
    assert life.excluded(3.0, agent_gone=True) == NOT_ANSWERING
    assert not life.began("trial", 3.0), "streams broke before: it is in when the answer has gone on"
    assert {life.excluded(3.5, agent_gone=gone) for gone in (False, True)} == {CIRCUIT_OPEN}
    life.failed("trial", 4.0, SETTINGS, UNREACHED)
    assert life.excluded(4.5, agent_gone=True) == NOT_ANSWERING


def test_an_engine_whose_last_trial_was_cancelled_in_mid_answer_is_not_gone() -> None:
    """Its client left, and the next trial waits for a whole answer; its agent is gone, and it is the last of its pool."""
    life = unreached_after_a_break()
    life.placed("trial", 5.0)
    life.began("trial", 5.5)
    life.left("trial", 6.0, SETTINGS)
    life.placed("next", 7.0)
    assert life.excluded(7.5, agent_gone=True) == CIRCUIT_OPEN
    life.failed("next", 8.0, SETTINGS, UNREACHED)
    assert life.excluded(8.5, agent_gone=True) == NOT_ANSWERING


def test_an_engine_that_generates_nothing_while_its_answers_stand_still_is_out_at_once() -> None:
    life = EngineLife()
    life.placed("r", 0.0)
    life.began("r", 0.0)
    assert not life.stalled("r", 10.0, SETTINGS, idle=False)
    life.sign(5.0, 5.0)
    assert not life.stalled("r", 12.0, SETTINGS, idle=True), "it has sent another answer's bytes"
    assert life.stalled("r", 16.0, SETTINGS, idle=True)
    assert (life.cause, life.why()) == ("silence", "its answers stand still, and it computes nothing")
    life.placed("trial", 20.0)
    assert not life.began("trial", 20.0)
    assert not life.sign(21.0, 21.0)
    assert life.answered("trial", 22.0)
    assert not life.opened
