"""A request counts as what its engine runs: each answer (`n`) to each of its prompts is a sequence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.pool_backlog import PoolBacklogs
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import (
    Candidate,
    Decision,
    FleetView,
    Phase,
    PlacementRequest,
    PrefixSource,
)
from pointsman_router.core.prefill_curve import DEFAULT_CURVE
from pointsman_router.core.requests.deadlines import SURE_SAMPLES, SURE_SHARE, least_prefill_s
from pointsman_router.core.requests.request_table import UNLEARNED_FACTOR
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.convert.gateway_messages import instance_ref, placement_request
from tests.support.router_values import candidate, finish, info, join, place, request, set_policy, state

PROMPT = list(range(200))
CHOICES: dict[str, Any] = {"sequences": 16, "sequence_tokens": 3200}


def seen(router: RouterState, name: str = "a") -> Candidate:
    decision = router.explain(request("another", prompt=[1] * 40), 0.0)
    assert isinstance(decision, Decision)
    found = decision.view.find(name)
    assert found is not None
    return found


def test_the_load_is_that_of_the_sequences_and_the_prompt_is_computed_and_kept_once() -> None:
    router = state()
    join(router, "a", 1)
    place(router, request("r", prompt=PROMPT, **CHOICES))
    here = seen(router)
    assert (here.num_requests, here.pending_prefill_tokens, here.ongoing_tokens) == (16, 200, 200)
    assert here.prefill_backlog.requests == 16, "none of them decodes yet"
    router.handle(ev.FirstToken("r"), 1.0)
    here = seen(router)
    assert (here.num_requests, here.pending_prefill_tokens, here.ongoing_tokens) == (16, 0, 200)
    assert (here.ongoing_decode_tokens, here.prefill_backlog.requests) == (3200, 0), "each attends to the whole prompt"
    router.check_invariants()
    router.handle(ev.Finished("r", "OK"), 2.0)
    assert seen(router).num_requests == 0
    router.check_invariants()


@pytest.mark.parametrize("policy", ["unified", "least_requests", "lmetric1", "foresight"])
def test_the_next_request_goes_elsewhere(policy: str) -> None:
    router = state(policy)
    join(router, "a", 1)
    join(router, "b", 2)
    first = place(router, request("r", 40, **CHOICES))
    assert isinstance(first, ev.Placed)
    router.handle(ev.FirstToken("r"), 1.0)
    for number in range(8):
        again = place(router, request(f"{number}", 40), 2.0)
        assert isinstance(again, ev.Placed)
        assert again.step.instance_id != first.step.instance_id
        router.handle(ev.FirstToken(f"{number}"), 2.0)


def test_a_limit_of_requests_counts_sequences_and_an_instance_below_it_takes_a_whole_request() -> None:
    router = state()
    router.views.limits = SaturationLimits(max_requests=8)
    join(router, "a", 1)
    assert isinstance(place(router, request("r", 40, **CHOICES)), ev.Placed), "it is more than the limit by itself"
    effects = router.handle(ev.PlaceRequested(request("s", 40), "g"), 0.0)
    assert not [effect for effect in effects if isinstance(effect, ev.Placed)]
    effects = router.handle(ev.Finished("r", "OK"), 1.0)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Placed)] == ["s"]


def test_of_an_offload_only_the_answer_runs_the_sequences() -> None:
    router = state()
    set_policy(router, make_policy("adaptive_offload"))
    join(router, "a", 1)
    join(router, "b", 2)
    first = place(router, request("r", prompt=list(range(30_000)), sequences=4, sequence_tokens=120_000))
    assert isinstance(first, ev.Placed)
    assert len(first.decision.result.steps) == 2
    assert router.reservations.counters(first.step.instance_id).num_requests == 1
    router.handle(ev.StepDone("r", 0, True), 1.0)
    assert router.reservations.counters(first.decision.instance_id).num_requests == 4
    router.check_invariants()


def test_an_announced_request_counts_the_same() -> None:
    router = state()
    join(router, "a", 1)
    stream = ev.OpenStream(request("r", 200, **CHOICES), "a", Phase.DECODE, 0)
    router.handle(ev.GatewayHello("g", (stream,)), 0.0)
    finish(router)
    counters = router.reservations.counters("a")
    assert (counters.num_requests, counters.ongoing_decode_tokens, counters.ongoing_tokens) == (16, 3200, 200)


def test_a_prefill_cost_is_not_learned_from_several_sequences() -> None:
    """An answer to several prompts begins when the first of them is computed."""
    router = state()
    join(router, "a", 1)
    for number, several in enumerate((1, 2)):
        name = f"r{number}"
        place(router, request(name, 4_000, sequences=several, sequence_tokens=4_000 * several), 10.0 * number)
        router.handle(ev.FirstToken(name), 10.0 * number + 1.0)
        router.handle(ev.Finished(name, "OK"), 10.0 * number + 2.0)
        assert router.prefill_observer.samples("m", "") == 1


PROMPTS: dict[str, Any] = {"sequences": 1_000, "sequence_tokens": 1_000_000}
ONE_BY_ONE_S = DEFAULT_CURVE.base_s + 1_000 * (DEFAULT_CURVE.cost_s(1_000, 0) - DEFAULT_CURVE.base_s)


def test_the_prompts_of_a_list_do_not_attend_to_each_other() -> None:
    router = state("foresight")
    join(router, "a", 1)
    answer = place(router, request("r", 1_000_000, streamed=True, **PROMPTS))
    assert isinstance(answer, ev.Placed)
    assert answer.decision.result.figures["prefill_s"] == pytest.approx(ONE_BY_ONE_S)
    assert DEFAULT_CURVE.work_s(router.prefill_observer.mean_work("m")) == pytest.approx(ONE_BY_ONE_S)
    assert router.instances.records()[0].life.streams["r"].alone_s == pytest.approx(UNLEARNED_FACTOR * ONE_BY_ONE_S)
    backlogs = PoolBacklogs(
        router.instances,
        router.reservations,
        router.prefill_observer,
        router.held_requests.queue,
        router.parked_requests.queue,
    ).at(0.0)
    assert backlogs["m"]["HEAVY"] == pytest.approx(ONE_BY_ONE_S)
    router.check_invariants()
    view = FleetView((candidate("a", new=1_000_000, prefix_source=PrefixSource.EVENTS),), curves={"": DEFAULT_CURVE})
    least_s = least_prefill_s(request(tokens=1_000_000, keys=(1,), **PROMPTS), "m", view, lambda *_: SURE_SAMPLES)
    assert least_s == pytest.approx(SURE_SHARE * ONE_BY_ONE_S)


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(1, 128))
def test_several_answers_to_one_prompt_change_nothing_of_its_cost(new: int, cached: int, answers: int) -> None:
    tokens = new + cached
    several = request(tokens=tokens, sequences=answers, sequence_tokens=answers * tokens)
    assert DEFAULT_CURVE.cost_s(new, cached, several.sequence_length) == DEFAULT_CURVE.cost_s(new, cached)
    one = Reservation("r", "g", "i", "d", tokens, new, cached_tokens=cached)
    assert replace(one, sequences=answers, sequence_tokens=answers * tokens).pending_pairs == one.pending_pairs
    assert one.pending_pairs == new * (2 * cached + new)


def test_older_gateways_and_absurd_numbers() -> None:
    def read(**fields: Any) -> PlacementRequest:
        return placement_request(placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=100, **fields))

    assert (read().sequences, read().sequence_tokens) == (1, 0)
    assert read(sequences=(1 << 32) - 1).sequences == 1 << 16
    assert Reservation("r", "g", "a", "d", 100, 100).decode_tokens == 100
    assert list(instance_ref(info(lora_names=("x",))).lora_names) == ["x"]


def test_sums_follow_reservations_of_several_sequences() -> None:
    reservations = Reservations()
    for name, sequences in (("a", 3), ("b", 1), ("c", 7)):
        reservations.put(
            Reservation(name, "g", "i", "d", 100, 50, sequences=sequences, sequence_tokens=100 * sequences)
        )
        reservations.check_invariants()
    assert reservations.num_prefills("i") == 11
    reservations.prefilled("a", 50)
    assert reservations.num_prefills("i") == 11, "it has no first token yet"
    reservations.first_token("c", 1.0)
    reservations.check_invariants()
    assert (reservations.num_prefills("i"), reservations.counters("i").ongoing_decode_tokens) == (4, 700)
    for name in "abc":
        reservations.release(name)
        reservations.check_invariants()
    assert reservations.num_prefills("i") == 0


def test_keys_of_the_first_of_several_prompts_give_credit() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2, prompt_keys(PROMPT[:160], "m"))
    keys = tuple(prompt_keys(PROMPT, "m"))
    several = request("r", 240, keys=keys, sequences=3, sequence_tokens=560)
    answer = place(router, several)
    assert isinstance(answer, ev.Placed)
    assert (answer.step.instance_id, answer.decision.cached_tokens) == ("b", 160)
    assert router.reservations.counters("b").pending_prefill_tokens == 80
