"""Adapters that are loaded on some instances only: their requests go to these, however they are placed."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_common.core.block_keys import prompt_keys
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import StepKind
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import hello, join, place, request, set_policy, state

LONG = list(range(30_000))


def fleet(**loaded: tuple[str, ...]) -> RouterState:
    router = state()
    for number, (name, adapters) in enumerate(loaded.items()):
        join(router, name, number, lora_names=adapters)
    return router


def where(answer: Any) -> list[str]:
    assert isinstance(answer, ev.Placed), answer
    return [step.instance_id for step in answer.decision.result.steps]


@pytest.mark.parametrize("policy", ["unified", "adaptive_offload", "elastic", "migrate", "foresight", "sticky"])
def test_both_sides_of_a_plan_have_the_adapter(policy: str) -> None:
    """The best caches of the prompt's keys, and the emptiest instances, are where the adapter is not."""
    router = fleet(a=(), b=("x",), c=("x",), d=("y",))
    set_policy(router, make_policy(policy))
    for number in range(12):
        answer = place(
            router, request(f"r{number}", prompt=LONG, model="x", session_id=f"s{number % 3}"), float(number)
        )
        assert set(where(answer)) <= {"b", "c"}
        router.handle(ev.FirstToken(f"r{number}"), number + 0.5)
    router.check_invariants()


def test_an_offload_uses_two_instances_with_the_adapter_or_none() -> None:
    router = fleet(a=(), b=("x",), c=("x",))
    set_policy(router, make_policy("adaptive_offload"))
    both = place(router, request("r", prompt=LONG, model="x"))
    assert isinstance(both, ev.Placed)
    assert ([step.kind for step in both.decision.result.steps], set(where(both))) == (
        [StepKind.PREFILL, StepKind.SERVE],
        {"b", "c"},
    )
    hello(router, "c", 7, 1.0)  # it has unloaded the adapter
    assert where(place(router, request("s", prompt=LONG[::-1], model="x"), 1.0)) == ["b"]


def test_a_continued_answer_and_a_retry_stay_with_the_adapter() -> None:
    router = fleet(a=(), b=("x",), c=("x",))
    resumed = request("r", 100, model="x", resumed=True, exclude=("b",))
    assert where(place(router, resumed)) == ["c"]
    gone = place(router, request("s", 100, model="x", exclude=("b", "c")))
    assert isinstance(gone, ev.Refused)


def test_the_owner_of_a_session_that_has_unloaded_the_adapter_is_left() -> None:
    router = fleet(a=("x",), b=("x",))
    keys = prompt_keys(LONG[:1_600], "m", "x")
    [owner] = where(place(router, request("r", 1_600, keys=tuple(keys), model="x", session_id="s")))
    router.handle(ev.FirstToken("r"), 1.0)
    router.handle(ev.Finished("r", "OK"), 2.0)
    hello(router, owner, 8, 3.0)
    [other] = {"a", "b"} - {owner}
    assert where(place(router, request("r2", 1_600, keys=tuple(keys), model="x", session_id="s"), 4.0)) == [other]


def held(router: RouterState, request_id: str, now: float) -> None:
    effects = router.handle(ev.PlaceRequested(request(request_id, 100, model="x"), "g"), now)
    assert not [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]


def answers(effects: list[ev.Effect]) -> list[ev.Effect]:
    return [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]


def test_what_waits_for_an_adapter_goes_where_it_is_loaded_next() -> None:
    router = fleet(a=("x",), b=())
    router.views.limits = SaturationLimits(max_requests=1)
    place(router, request("first", 100, model="x"))
    held(router, "waits", 1.0)
    assert not answers(hello(router, "a", 7, 2.0)), "nobody has it any more"
    assert not answers(router.handle(ev.Finished("first", "OK"), 3.0)), "the free instance cannot answer"
    [placed] = answers(hello(router, "b", 8, 4.0, lora_names=("x",)))
    assert where(placed) == ["b"]
    router.check_invariants()


def test_what_waits_for_an_adapter_that_nobody_loads_again_may_be_sent_again_later() -> None:
    router = fleet(a=("x",), b=())
    router.views.limits = SaturationLimits(max_requests=1)
    place(router, request("first", 100, model="x"))
    held(router, "waits", 1.0)
    hello(router, "a", 7, 2.0)
    [refused] = answers(router.handle(ev.Tick(), 40.0))
    assert isinstance(refused, ev.Refused)
    assert (refused.request_id, refused.code) == ("waits", "UNAVAILABLE")
    assert refused.retry_after_s
    assert isinstance(unknown := place(router, request("new", 100, model="x"), 41.0), ev.Refused)
    assert unknown.code == "NOT_FOUND"
