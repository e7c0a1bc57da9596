"""The cost of observing prefills, and which of them the curve learns from."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman.router.core.load.reservations import Reservation, Reservations
from tests.support.interpreter_steps import Steps
from tests.support.router_values import info


class Watched:
    """An observer and the reservations that it sees, of one instance."""

    def __init__(self, **engine: Any) -> None:
        self.reservations = Reservations()
        self.observer = PrefillObserver(self.reservations)
        self.info = info("a", hardware="gpu", **engine)

    def place(self, name: str, now: float, *, watched: bool = True) -> None:
        one = Reservation(name, "g", "a", "d", 1_000, 1_000, pool="m")
        self.reservations.put(one)
        if watched:
            self.observer.opened(one, self.info, now)

    def first_token(self, name: str, now: float) -> None:
        reservation = self.reservations.get(name)
        assert reservation is not None
        self.observer.done(reservation, self.info, now, doubtful=False)
        self.reservations.first_token(name)

    def end(self, name: str, now: float) -> None:
        reservation = self.reservations.release(name)
        assert reservation is not None
        self.observer.gone(reservation, now)

    def samples(self) -> int:
        self.observer.check_invariants()
        self.reservations.check_invariants()
        return self.observer.samples("m", "gpu")


@pytest.mark.parametrize("order", ["as they came", "the last first"])
@pytest.mark.parametrize("threshold", [0, 2_048])
@pytest.mark.parametrize("recovered", [False, True])
def test_many_open_prefills_of_one_instance_cost_as_much_each_as_few(
    order: str, threshold: int, recovered: bool
) -> None:
    def steps(count: int) -> int:
        one = Watched(long_prefill_token_threshold=threshold)
        if recovered:
            for number in range(count):
                one.place(f"old{number}", 0.0, watched=False)
        names = [f"r{number}" for number in range(count)]
        with Steps() as taken:
            for name in names:
                one.place(name, 0.0)
            for number, name in enumerate(names if order == "as they came" else reversed(names)):
                one.first_token(name, 1.0 + number)
        return taken.count

    assert steps(400) < 2.2 * steps(200)


def test_prefills_that_end_in_the_order_of_their_coming_teach() -> None:
    one = Watched()
    for name in ("r0", "r1", "r2"):
        one.place(name, 0.0)
    for number, name in enumerate(("r0", "r1", "r2"), 1):
        one.first_token(name, float(number))
        assert one.samples() == number


def test_one_that_overtakes_another_tells_nothing_of_any_that_was_there() -> None:
    one = Watched()
    for name in ("r0", "r1", "r2"):
        one.place(name, 0.0)
    one.first_token("r1", 1.0)
    one.place("r3", 1.5)
    for number, name in enumerate(("r0", "r2"), 2):
        one.first_token(name, float(number))
    assert one.samples() == 0
    one.first_token("r3", 4.0)
    assert one.samples() == 1


def test_prompts_that_an_engine_cuts_teach_only_alone() -> None:
    one = Watched(long_prefill_token_threshold=2_048)
    one.place("r0", 0.0)
    one.place("r1", 0.0)
    one.first_token("r0", 1.0)
    one.end("r1", 2.0)
    assert one.samples() == 0
    one.place("r2", 3.0)
    one.first_token("r2", 4.0)
    assert one.samples() == 1


def test_a_prefill_of_an_earlier_owner_is_waited_for_and_teaches_nothing() -> None:
    one = Watched()
    one.place("old", 0.0, watched=False)
    one.place("r0", 0.0)
    one.place("r1", 0.0)
    one.first_token("r0", 1.0)
    assert one.samples() == 0
    one.first_token("old", 2.0)
    one.first_token("r1", 3.0)
    assert one.samples() == 0  # r0 had overtaken the old prefill


@pytest.mark.parametrize("computed", [0, 400, 1_000])
def test_the_first_one_stays_the_first_while_it_is_computed(computed: int) -> None:
    one = Watched()
    one.place("r0", 0.0)
    one.place("r1", 0.0)
    one.reservations.prefilled("r0", computed)
    first = one.reservations.first_prefill("a")
    assert first is not None
    assert first.request_id == ("r1" if computed == 1_000 else "r0")
    one.first_token("r0", 1.0)
    assert one.samples() == 1


def test_what_is_to_be_computed_again_is_at_its_old_place() -> None:
    one = Watched()
    one.place("r0", 0.0)
    one.place("r1", 0.0)
    one.reservations.prefilled("r0", 1_000)
    one.reservations.prefilled("r0", 500)
    first = one.reservations.first_prefill("a")
    assert first is not None
    assert (first.request_id, one.samples()) == ("r0", 0)
