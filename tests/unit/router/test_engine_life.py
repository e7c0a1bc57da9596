"""When an instance that fails is left alone, and when it is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.instances.engine_life import EngineLife, LifeSettings

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
