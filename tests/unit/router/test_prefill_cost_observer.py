"""The cost of observing prefills, and which of them the curve learns from."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import StepTotals
from pointsman_router.core.prefill_curve import PrefillCurve, PrefillCurveFit
from tests.support.interpreter_steps import Steps
from tests.support.router_values import info


class Watched:
    """An observer and the reservations that it sees, of one instance."""

    def __init__(self, **engine: Any) -> None:
        self.reservations = Reservations()
        self.observer = PrefillObserver(self.reservations)
        self.info = info("a", hardware="gpu", **engine)

    def place(self, name: str, now: float, *, watched: bool = True, whole: bool = False) -> None:
        one = Reservation(name, "g", "a", "d", 1_000, 1_000, pool="m")
        self.reservations.put(one)
        if watched:
            self.observer.opened(one, self.info, now, whole=whole)

    def first_token(self, name: str, now: float) -> None:
        reservation = self.reservations.get(name)
        assert reservation is not None
        self.observer.done(reservation, self.info, now, doubtful=False)
        self.reservations.first_token(name, now)

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


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ends_at", [10.0, 20.0])
def test_an_answer_that_is_not_streamed_makes_no_sample_too_short_and_stands_in_no_ones_way(
    told: bool, ends_at: float
) -> None:
    """`told`: its instance's events say that its prompt is computed."""
    one = Watched()
    one.place("whole", 0.0, whole=True)
    if told:
        one.reservations.prefilled("whole", 992)
        one.observer.moved("a", ["whole"], 4.0)
    one.place("beside", 8.0)
    if ends_at < 12.0:
        one.end("whole", ends_at)
    one.first_token("beside", 12.0)
    assert one.samples() == (told and ends_at > 12.0)
    one.place("next", 13.0)
    one.first_token("next", 17.0)
    assert one.samples() == 1 + (told and ends_at > 12.0)
    assert one.observer.curve("m", "gpu").cost_s(1_000, 0) == pytest.approx(4.0, rel=0.1)
    if ends_at > 12.0:
        one.end("whole", ends_at)
    assert one.samples() == 1 + (told and ends_at > 12.0)


def test_a_curve_that_slow_first_prefills_have_taught_comes_down_again() -> None:
    one, now = Watched(), 0.0

    def taught(seconds: float) -> None:
        nonlocal now
        one.place("r", now)
        now += seconds
        one.first_token("r", now)
        one.end("r", now)

    for _ in range(PrefillCurveFit.TRUSTED_AFTER):
        taught(60.0)
    for _ in range(100):
        taught(1.0)
    assert one.observer.curve("m", "gpu").cost_s(1_000, 0) == pytest.approx(1.0, rel=0.1)


def test_prefills_of_one_step_teach_only_by_the_first_of_them() -> None:
    one = Watched()
    for number in range(100):
        names = [f"r{number}/{part}" for part in range(4 if number >= PrefillCurveFit.TRUSTED_AFTER else 1)]
        for name in names:
            one.place(name, 10.0 * number)
        for part, name in enumerate(names):
            one.first_token(name, 10.0 * number + 1.0 + 0.01 * part)
            one.end(name, 10.0 * number + 2.0)
    assert one.observer.curve("m", "gpu").cost_s(1_000, 0) == pytest.approx(1.0, rel=0.1)


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


def test_an_engine_that_reports_its_steps_teaches_by_them_alone() -> None:
    one = Watched()
    one.observer.steps_reported(one.info, StepTotals(), 0.0)
    one.place("r0", 0.0)
    one.place("r1", 0.0)
    one.first_token("r0", 5.0)
    assert one.samples() == 0, "the time until a first token is not that of its steps"
    truth, totals, rng = PrefillCurve(0.02, 3e-5, 6e-9), StepTotals(), random.Random(1)
    now = 5.0
    for _ in range(40):
        prompt, done = rng.randint(200, 60_000), 0
        while done < prompt:
            chunk = min(4_096, prompt - done)
            ends = done + chunk == prompt
            seconds = truth.cost_s(chunk, done) - (0.0 if ends else truth.base_s)
            totals = StepTotals(
                steps=totals.steps + 1,
                seconds=totals.seconds + seconds,
                prefill_tokens=totals.prefill_tokens + chunk,
                prefill_pairs=totals.prefill_pairs + chunk * (2 * done + chunk),
                prefills=totals.prefills + ends,
                prefill_seconds=totals.prefill_seconds + seconds,
            )
            done, now = done + chunk, now + seconds
            one.observer.steps_reported(one.info, totals, now)
    curve = one.observer.curve("m", "gpu")
    for new, cached in ((4_096, 60_000), (30_000, 0), (100_000, 0)):
        assert curve.cost_s(new, cached) == pytest.approx(truth.cost_s(new, cached), rel=0.1)
    assert curve.cost_s(500, 0) == pytest.approx(truth.cost_s(500, 0), rel=0.4)


def test_reports_without_a_prompt_or_of_a_restarted_engine_teach_nothing() -> None:
    one = Watched()
    first = StepTotals(steps=5, prefill_tokens=900, prefill_pairs=810_000, prefills=3, prefill_seconds=0.5)
    for at, steps in enumerate((first, first, StepTotals(steps=9, prefill_tokens=900), StepTotals(prefill_tokens=10))):
        one.observer.steps_reported(one.info, steps, float(at))
    assert one.samples() == 0


def test_a_pool_of_many_instances_learns_no_more_often_than_one() -> None:
    one = Watched()
    for number in range(1_000):
        steps = StepTotals(1, 1.0, 0, 1_000, 1_000_000, 1, 1.0)
        instance = info(f"i{number}", hardware="gpu")
        one.observer.steps_reported(instance, StepTotals(), 0.0)
        one.observer.steps_reported(instance, steps, 1.0 + number * 1e-4)
    assert 4 <= one.samples() <= 6
