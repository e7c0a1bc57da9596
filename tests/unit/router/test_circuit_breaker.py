"""When an instance that fails is left alone, and when it is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.instances.circuit_breaker import Circuit, CircuitSettings

SETTINGS = CircuitSettings(failures=3, first_open_s=1.0, max_open_s=5.0)


def broken(now: float = 0.0) -> Circuit:
    circuit = Circuit()
    assert [circuit.failed(f"r{index}", now, SETTINGS) for index in range(3)] == [False, False, True]
    return circuit


def test_failures_in_a_row_open_it_and_an_answer_between_does_not_let_them_add_up() -> None:
    circuit = Circuit()
    for _ in range(5):
        circuit.failed("r", 0.0, SETTINGS)
        circuit.failed("s", 0.0, SETTINGS)
        assert not circuit.answered()
    assert not circuit.open(0.0)
    assert broken().open(0.5)


def test_one_request_is_on_trial_at_a_time() -> None:
    circuit = broken()
    assert not circuit.open(1.0)
    circuit.placed("trial", 1.0)
    assert circuit.open(100.0), "the others wait for its end"
    circuit.left("other")
    assert circuit.open(100.0)
    circuit.left("trial")
    assert not circuit.open(100.0), "its client left: another one may try"
    circuit.placed("trial-2", 100.0)
    assert circuit.answered()
    assert not circuit.open(100.0)


def test_each_failed_trial_doubles_the_time_up_to_the_limit() -> None:
    circuit, now, waited = broken(), 0.0, []
    for index in range(6):
        start = now
        while circuit.open(now):
            now += 0.5
        waited.append(now - start)
        circuit.placed(f"t{index}", now)
        assert circuit.failed(f"t{index}", now, SETTINGS)
    assert waited == [1, 2, 4, 5, 5, 5]


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    circuit = broken()
    assert not circuit.failed("late", 0.9, SETTINGS)
    assert not circuit.open(1.0)
    circuit.placed("trial", 1.0)
    assert not circuit.failed("later", 1.1, SETTINGS)
    assert circuit.open(1.1), "the trial goes on"


def test_zero_failures_mean_never() -> None:
    never = Circuit()
    assert not any(never.failed("r", 0.0, CircuitSettings(failures=0)) for _ in range(50))
    assert not never.open(0.0)


@given(st.lists(st.sampled_from(["fail", "answer", "leave", "place", "wait"]), max_size=60))
def test_an_instance_is_never_left_alone_for_good(actions: list[str]) -> None:
    """In any order of events, an instance gets a request again once all its requests have ended and `max_open_s` has passed. An
    instance that answers gets requests without limit."""
    circuit, now, open_ones = Circuit(), 0.0, []
    for number, action in enumerate(actions):
        if action == "wait":
            now += 0.7
        elif action == "place" and not circuit.open(now):
            circuit.placed(f"r{number}", now)
            open_ones.append(f"r{number}")
        elif open_ones and action in ("fail", "leave"):
            request = open_ones.pop(0)
            if action == "fail":
                circuit.failed(request, now, SETTINGS)
            else:
                circuit.left(request)
        elif open_ones and action == "answer":
            open_ones.pop(0)
            circuit.answered()
            assert not circuit.open(now)
    for request in open_ones:
        circuit.left(request)
    assert not circuit.open(now + SETTINGS.max_open_s)
