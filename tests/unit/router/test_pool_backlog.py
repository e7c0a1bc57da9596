"""The backlog of a pool in seconds: what is in it, of which class, and over how many instances."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.pool_backlog import PoolBacklogs
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import Load
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurve
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state

COST = DEFAULT_CURVE.cost_s


def backlog(state_: RouterState, now: float = 0.0) -> dict[str, dict[str, float]]:
    backlogs = PoolBacklogs(
        state_.instances,
        state_.reservations,
        state_.prefill_observer,
        state_.held_requests.queue,
        state_.parked_requests.queue,
    ).at(now)
    return {pool: dict(classes) for pool, classes in backlogs.items()}


def all_classes(seconds: float) -> dict[str, object]:
    return {name: pytest.approx(seconds) for name in ("LIGHT", "MEDIUM", "HEAVY")}


def full(*names: str, **queue: Any) -> RouterState:
    """A pool whose instances take one request each; further ones are held."""
    made = state(limits=SaturationLimits(max_requests=1), queue=QueueSettings(**queue))
    for stream_id, name in enumerate(names, 1):
        join(made, name, stream_id)
    return made


def test_an_idle_pool_has_none_and_an_unknown_one_is_not_reported() -> None:
    made = state()
    assert backlog(made) == {}
    join(made, "a", 1)
    assert backlog(made) == {"m": all_classes(0.0)}


def test_what_is_placed_waits_for_every_class_and_is_shared_by_the_instances() -> None:
    made = state()
    join(made, "a", 1)
    place(made, request("r1", 8_000))
    assert backlog(made) == {"m": all_classes(COST(8_000, 0))}
    join(made, "b", 2)
    assert backlog(made) == {"m": all_classes(COST(8_000, 0) / 2)}
    # The second request goes to the other instance.
    place(made, request("r2", 30_000))
    assert backlog(made) == {"m": all_classes((COST(8_000, 0) + COST(30_000, 0)) / 2)}


def test_time_and_the_first_token_take_off_what_is_computed() -> None:
    made = state()
    join(made, "a", 1)
    place(made, request("r1", 8_000))
    place(made, request("r2", 8_000))
    one = COST(8_000, 0)
    assert backlog(made, now=one / 2)["m"] == all_classes(1.5 * one)
    # A prefill does not count as done before it is reported: a tenth of it remains.
    assert backlog(made, now=100.0)["m"] == all_classes(1.1 * one)
    # It took longer than the default curve says, so that the other one will, too.
    made.handle(ev.FirstToken("r1"), 1.0)
    learned = made.prefill_observer.curve("m", "").cost_s(8_000, 0)
    assert learned > 1.5 * one
    assert backlog(made, now=1.0)["m"] == all_classes(learned)
    made.handle(ev.Finished("r2", "CANCELLED"), 1.0)
    assert backlog(made, now=1.0)["m"] == all_classes(0.0)


def test_a_held_request_is_waited_for_by_its_class_and_heavier_ones() -> None:
    made = full("a")
    place(made, request("r1", 1_000))
    placed = COST(1_000, 0)
    for name, tokens in (("light", 4_000), ("medium", 10_000), ("heavy", 50_000)):
        assert made.handle(ev.PlaceRequested(request(name, tokens), "g"), 0.0) == []
    assert backlog(made)["m"] == {
        "LIGHT": pytest.approx(placed + COST(4_000, 0)),
        "MEDIUM": pytest.approx(placed + COST(4_000, 0) + COST(10_000, 0)),
        "HEAVY": pytest.approx(placed + COST(4_000, 0) + COST(10_000, 0) + COST(50_000, 0)),
    }


def test_what_is_cached_costs_as_little_as_where_it_is_cached() -> None:
    prompt = list(range(32_000))
    keys = list(request(prompt=prompt).keys)
    made = state(limits=SaturationLimits(max_requests=1))
    join(made, "a", 1, keys[:1_500])
    place(made, request("r1", 100))
    made.handle(ev.PlaceRequested(request("r2", prompt=prompt), "g"), 0.0)
    # Of 32,000 tokens 24,000 are cached: a light request.
    assert backlog(made)["m"] == all_classes(COST(100, 0) + COST(8_000, 24_000))


def test_without_an_instance_it_is_reported_as_if_there_were_one() -> None:
    made = full("a")
    place(made, request("r1", 1_000))
    made.handle(ev.PlaceRequested(request("r2", 4_000), "g"), 0.0)
    held = all_classes(COST(4_000, 0))
    made.handle(ev.LoadReported(1, "a", Load(0.0, suspended="asleep")), 0.0)
    assert backlog(made) == {"m": held}, "prefills placed on a suspended instance do not count"
    made.handle(ev.AgentGoodbye(1, "a"), 0.0)
    assert backlog(made) == {"m": held}
    made.handle(ev.Finished("r2", "CANCELLED"), 0.0)
    assert backlog(made) == {}


def test_an_instance_that_drains_counts_neither_way() -> None:
    made = state()
    join(made, "a", 1)
    place(made, request("r1", 8_000))
    join(made, "b", 2)
    made.handle(ev.DrainsChanged({"a": "1"}), 0.0)
    assert backlog(made)["m"] == all_classes(0.0)


def test_the_rest_of_a_sliced_prompt_is_waited_for_once() -> None:
    made = state("foresight")
    join(made, "a", 1)
    for number in range(10):
        place(made, request(f"small{number}", 1_000))
        made.handle(ev.Finished(f"small{number}", "OK"), 0.0)
    big = request("big", prompt=list(range(64_000)), sliceable_tokens=64_000)
    first = place(made, big)
    assert isinstance(first, ev.Placed)
    done = first.step.prefix_tokens
    assert 0 < done < 44_000
    rest = COST(64_000 - done, done)
    seconds = backlog(made)["m"]
    assert seconds["LIGHT"] == pytest.approx(COST(done, 0))
    assert seconds["HEAVY"] == pytest.approx(COST(done, 0) + rest)
    # Enough light requests are open at the end of the slice that the rest of the prompt is held.
    for number in range(2):
        place(made, request(f"light{number}", 3_000))
    made.handle(ev.StepDone("big", 0, ok=True), 0.0)
    assert made.held_requests.queue.get("big") is not None
    seconds = backlog(made)["m"]
    assert seconds["LIGHT"] == pytest.approx(2 * COST(3_000, 0))
    assert seconds["HEAVY"] == pytest.approx(2 * COST(3_000, 0) + rest)


def test_seconds_are_those_of_each_hardware_and_of_their_mean_for_what_is_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = state(limits=SaturationLimits(max_requests=1))
    join(made, "slow", 1, hardware="old")
    join(made, "fast", 2, hardware="new")
    curves = {"old": PrefillCurve(0.0, 1e-3, 0.0), "new": PrefillCurve(0.0, 1e-4, 0.0)}
    monkeypatch.setattr(made.prefill_observer, "curve", lambda _, kind: curves[kind])
    for name in ("r1", "r2", "r3"):
        made.handle(ev.PlaceRequested(request(name, 1_000), "g"), 0.0)
    assert len(made.held_requests.queue) == 1
    assert backlog(made)["m"] == all_classes((1.0 + 0.1 + 0.55) / 2)


def test_pools_are_told_apart() -> None:
    made = state()
    join(made, "a", 1)
    join(made, "b", 2, model="n", served_names=("n",))
    place(made, replace(request("r1", 8_000), model="n"))
    assert backlog(made) == {"m": all_classes(0.0), "n": all_classes(COST(8_000, 0))}
