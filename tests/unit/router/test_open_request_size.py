"""What a router keeps of an open request."""

from __future__ import annotations

import gc
import tracemalloc
from array import array

import pytest

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import NO_FACTS, Phase
from pointsman_router.core.prefix.provisional_blocks import PROVISIONAL_S
from tests.support.interpreter_steps import Steps
from tests.support.router_values import join, place, request, set_policy, state

KEYS = 8_125  # of 130,000 tokens


@pytest.mark.parametrize("keys", [64, KEYS])
@pytest.mark.parametrize("instances", [10, 200])
def test_a_request_that_is_answered_takes_a_few_kilobytes(keys: int, instances: int) -> None:
    router = state()
    for number in range(instances):
        join(router, f"i{number:03}", number)

    def open_(first: int, count: int) -> None:
        for number in range(first, first + count):
            prompt = array("Q", range(number * KEYS, number * KEYS + keys))
            asked = request(f"r{number}", tokens=keys * 16, keys=prompt, session_id=f"s{number}")
            router.handle(ev.PlaceRequested(asked, "g"), 1.0)
            router.handle(ev.FirstToken(asked.request_id), 1.0)

    open_(0, 30)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        open_(30, 100)
        # Recent placements, which are bounded, and provisional keys, which count as cached for PROVISIONAL_S after a prefill,
        # must not be measured.
        for number in range(instances):
            router.prefix_knowledge.computed_prompts.drop(f"i{number:03}")
        router.handle(ev.Tick(), 1.0 + 2 * PROVISIONAL_S)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(router.reservations) == 130
    assert grown / 100 <= 8_000


@pytest.mark.parametrize("answered", [True, False])
def test_one_of_many_that_prefill_on_an_instance_takes_no_more(answered: bool) -> None:
    router = state()
    for number in range(2):
        join(router, f"i{number}", number)
    for number in range(30):
        router.handle(ev.PlaceRequested(request(f"first{number}", tokens=1_024), "g"), 1.0)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1_000):
            router.handle(ev.PlaceRequested(request(f"r{number}", tokens=1_024, session_id=f"s{number}"), "g"), 1.0)
        for number in range(1_000 if answered else 0):
            router.handle(ev.FirstToken(f"r{number}"), 1.0)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(router.reservations) == 1_030
    assert grown / 1_000 <= 8_000


@pytest.mark.parametrize("policy", ["unified", "foresight"])
def test_a_placement_costs_the_same_however_many_prefill(policy: str) -> None:
    router = state(policy)
    set_policy(router, router.policy.without_holds(NO_FACTS) or router.policy)
    for number in range(4):
        join(router, f"i{number}", number)
    steps = []
    for turn in range(2):
        for number in range(400 if turn else 100):
            router.handle(ev.PlaceRequested(request(f"r{turn}-{number}", tokens=1_024), "g"), 1.0)
        with Steps() as taken:
            for number in range(20):
                router.handle(ev.PlaceRequested(request(f"counted{turn}-{number}", tokens=1_024), "g"), 1.0)
        steps.append(taken.count)
    assert len(router.reservations) == 540
    assert steps[1] < 1.1 * steps[0]


def test_keys_are_kept_where_the_answer_still_corrects_what_is_assumed_to_be_cached() -> None:
    router = state()
    join(router, "events", 1)
    join(router, "none", 2, exact_prefix=False)
    kept = {}
    for number, name in enumerate(("r0", "r1")):
        prompt_keys = tuple(range(10 * number, 10 * number + 10))
        answer = place(router, request(name, tokens=160, keys=prompt_keys))
        assert isinstance(answer, ev.Placed)
        router.handle(ev.FirstToken(name), 1.0)
        request_state = router.requests.placed(name)
        assert request_state is not None
        kept[answer.step.instance_id] = len(request_state.keys)
    assert kept == {"events": 0, "none": 10}
    router.check_invariants()


def test_a_request_whose_keys_are_forgotten_ends_as_any_other() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", tokens=160, keys=tuple(range(10))))
    router.handle(ev.FirstToken("r"), 1.0)
    stream = ev.OpenStream(request("r", tokens=160), "a", Phase.DECODE, 0)
    router.handle(ev.GatewayHello("g", (stream,)), 1.0)
    router.handle(ev.Finished("r", "OK", cached_tokens=0), 2.0)
    router.check_invariants()
    # What it computed counts as cached all the same.
    again = place(router, request("s", tokens=160, keys=tuple(range(10))), 2.0)
    assert isinstance(again, ev.Placed)
    assert again.decision.cached_tokens == 144
