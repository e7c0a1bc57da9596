"""RouterState by example: what each event does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_SCHEME, prompt_keys
from pointsman_common.core.key_report_types import ConsistencyCheck, Delta
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import redecide
from pointsman_router.core.apply_agent_reports import key_interval_s, load_interval_s
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import (
    Decision,
    InstanceState,
    KvRole,
    KvTransfer,
    Load,
    Phase,
    PrefixSource,
    StepKind,
)
from pointsman_router.core.policy.base import RESUMED
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.placement_plans import MAX_STEPS
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.router_state import ENDS_AT_ONCE, RouterState
from pointsman_router.io.convert.gateway_messages import placement_request
from tests.support.interpreter_steps import Steps
from tests.support.router_values import finish, hello, info, join, place, request, state

PROMPT = list(range(200))


def test_a_prompt_goes_to_the_instance_that_holds_its_prefix() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2, prompt_keys(PROMPT[:160], "m"))
    answer = place(router, request(prompt=PROMPT))
    assert isinstance(answer, ev.Placed)
    assert answer.step.instance_id == "b"
    assert answer.decision.cached_tokens == 160
    router.check_invariants()


@pytest.mark.parametrize(
    ("length", "held", "block", "cached"),
    [
        (128, 128, 32, 96),  # the last token is always computed, so the last block is not reused
        (129, 128, 32, 128),
        (129, 112, 32, 96),  # floored to the engine's own blocks
        (200, 192, 128, 128),
        (10, 0, 16, 0),
    ],
)
def test_predicted_hits_follow_the_engines_rules(length: int, held: int, block: int, cached: int) -> None:
    router = state()
    prompt = list(range(length))
    join(router, "a", 1, prompt_keys(prompt[:held], "m"), block_size=block)
    decision = router.explain(request(prompt=prompt), 0.0)
    assert isinstance(decision, Decision)
    assert decision.cached_tokens == cached


def test_counters_follow_a_request_through_its_life() -> None:
    router = state()
    join(router, "a", 1, prompt_keys(PROMPT[:96], "m"))
    place(router, request("r", prompt=PROMPT))
    counters = router.reservations.counters("a")
    assert (counters.num_requests, counters.pending_prefill_tokens, counters.ongoing_tokens) == (1, 104, 200)
    assert counters.ongoing_decode_tokens == 0
    for _ in range(2):
        router.handle(ev.FirstToken("r"), 1.0)
        counters = router.reservations.counters("a")
        assert (counters.num_requests, counters.pending_prefill_tokens, counters.ongoing_decode_tokens) == (1, 0, 200)
    effects = router.handle(ev.Finished("r", "OK"), 2.0)
    [released, closed] = effects
    assert isinstance(released, ev.Released)
    assert isinstance(closed, ev.DecisionClosed)
    assert closed.decision is not None, "no log need have it any more"
    assert (closed.decision.decision_id, closed.decision.route_class) == (closed.decision_id, "LIGHT")
    assert router.handle(ev.Finished("r", "OK"), 2.0) == []
    assert router.reservations.counters("a").num_requests == 0
    router.check_invariants()


def test_two_big_prompts_never_see_the_same_idle_instance() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2)
    placed = [place(router, request(f"r{n}", tokens=100_000)) for n in range(2)]
    assert {answer.step.instance_id for answer in placed if isinstance(answer, ev.Placed)} == {"a", "b"}


def test_the_same_request_id_gets_the_same_placement_and_one_reservation() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2)
    first, again = place(router, request("r", tokens=100)), place(router, request("r", tokens=100))
    assert isinstance(first, ev.Placed)
    assert isinstance(again, ev.Placed)
    assert (again.step, again.last, again.decision.decision_id) == (first.step, first.last, first.decision.decision_id)
    assert len(router.reservations) == 1
    router.handle(ev.Finished("r", "OK"), 1.0)
    assert len(router.reservations) == 0


def test_a_session_returns_to_its_owner() -> None:
    router = state()
    keys = prompt_keys(PROMPT, "m")
    join(router, "a", 1, keys)
    join(router, "b", 2, keys)
    first = place(router, request("r1", prompt=PROMPT, tenant="t", session_id="s"))
    assert isinstance(first, ev.Placed)
    router.handle(ev.Finished("r1", "OK"), 1.0)
    second = place(router, request("r2", prompt=PROMPT, tenant="t", session_id="s"), 2.0)
    assert isinstance(second, ev.Placed)
    assert (second.step.instance_id, second.step.reason) == (first.step.instance_id, "session_affinity")
    other_tenant = place(router, request("r3", prompt=PROMPT, tenant="u", session_id="s"), 2.0)
    assert isinstance(other_tenant, ev.Placed)
    assert other_tenant.step.reason == "least_load_x_work"


def test_a_session_has_an_owner_for_each_model_that_it_asks() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2, model="n", served_names=("n",))
    for turn, (model, owner) in enumerate([("m", "a"), ("n", "b")] * 2):
        answer = place(router, request(f"r{turn}", tokens=1, session_id="s", model=model))
        assert isinstance(answer, ev.Placed)
        assert answer.decision.view.session_owner == (owner if turn > 1 else "")
    assert [router.affinity.sessions_of(name) for name in ("a", "b")] == [1, 1]
    router.affinity.forget_pool("n")
    assert [router.affinity.owner(pool, "/s", 0.0) for pool in ("m", "n")] == ["a", ""]
    router.check_invariants()


def test_affinity_ends_with_its_time() -> None:
    router = state(affinity_ttl_s=10.0)
    join(router, "a", 1)
    place(router, request("r", tokens=1, session_id="s"))
    assert router.affinity.owner("m", "/s", 9.0) == "a"
    assert router.affinity.owner("m", "/s", 10.0) == ""
    router.handle(ev.Tick(), 10.0)
    assert router.affinity.sessions_of("a") == 0


def test_unknown_models_and_empty_fleets_are_refused_and_reserve_nothing() -> None:
    router = state()
    said = "no instance serves a model 'm'"
    assert place(router, request(model="m", tokens=1)) == ev.Refused("r", "NOT_FOUND", said, gateway_id="g")
    join(router, "a", 1)
    router.handle(ev.LoadReported(1, "a", Load(0.0, suspended="asleep")), 0.0)
    refused = place(router, request(tokens=1))
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.retry_after_s) == ("UNAVAILABLE", 1.0)
    assert len(router.reservations) == 0
    router.handle(ev.LoadReported(1, "a", Load(1.0)), 1.0)
    assert isinstance(place(router, request("r2", tokens=1, model="alias")), ev.Placed)


def test_a_suspended_engine_gets_nothing_until_it_computes() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2)
    for number in (1, 2):
        assert router.handle(ev.LoadReported(number, "ab"[number - 1], Load(0.0)), 0.0) == []
    asleep = Load(1.0, suspended="asleep (level 1)")
    assert router.handle(ev.LoadReported(1, "a", asleep), 1.0) == [ev.FleetChanged()]
    assert router.handle(ev.LoadReported(1, "a", asleep), 1.0) == [], "gateways are told of changes only"
    record = router.instances.get("a")
    assert record is not None
    assert record.state is InstanceState.SUSPENDED
    assert [*router.instances.pools()[0].instances] == ["b"]
    for number in range(3):
        placed = place(router, request(f"r{number}", tokens=1))
        assert isinstance(placed, ev.Placed)
        assert placed.step.instance_id == "b"
    router.handle(ev.LoadReported(2, "b", Load(1.0, suspended="paused")), 1.0)
    refused = place(router, request("none", tokens=1))
    assert isinstance(refused, ev.Refused)
    assert refused.code == "UNAVAILABLE"
    assert router.handle(ev.LoadReported(1, "a", Load(2.0)), 2.0) == [ev.FleetChanged()]
    assert isinstance(place(router, request("again", tokens=1)), ev.Placed)
    router.check_invariants()


def test_failed_instances_are_avoided_for_that_request() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2)
    answer = place(router, request(tokens=1, exclude=("a",)))
    assert isinstance(answer, ev.Placed)
    assert answer.step.instance_id == "b"
    assert isinstance(place(router, request("r2", tokens=1, exclude=("a", "b"))), ev.Refused)


def test_a_drained_instance_gets_nothing_until_its_incarnation_ends() -> None:
    """This holds also if the drain was ordered before its agent connected, or if the agent reconnects."""
    router = state()
    router.handle(ev.DrainsChanged({"a": "1"}), 0.0)
    join(router, "a", 1)
    assert isinstance(place(router, request(tokens=1)), ev.Refused)
    router.handle(ev.AgentGoodbye(1, "a"), 0.0)
    join(router, "a", 2)
    assert isinstance(place(router, request("r2", tokens=1)), ev.Refused)
    join(router, "a", 3, incarnation="2")
    assert isinstance(place(router, request("r3", tokens=1)), ev.Placed)
    router.handle(ev.DrainsChanged({"a": "2"}), 0.0)
    assert isinstance(place(router, request("r4", tokens=1)), ev.Refused)
    router.handle(ev.DrainsChanged({}), 0.0)
    assert isinstance(place(router, request("r5", tokens=1)), ev.Placed)


@pytest.mark.parametrize(
    ("changes", "scheme", "said"),
    [
        ({}, "sha256/16", "key scheme"),
        ({"block_size": 24}, KEY_SCHEME, "block size 24"),
        ({"block_size": 0}, KEY_SCHEME, "block size 0"),
        ({"url": ""}, KEY_SCHEME, "must not be empty"),
    ],
)
def test_agents_that_cannot_be_used_are_refused_with_the_reason(
    changes: dict[str, object], scheme: str, said: str
) -> None:
    router = state()
    [effect] = router.handle(ev.AgentHello(1, info("a", **changes), scheme, 1, 0), 0.0)
    assert isinstance(effect, ev.RefuseReport)
    assert said in effect.reason
    assert not router.instances.records()


def test_a_restarted_engine_loses_its_keys() -> None:
    router = state()
    join(router, "a", 1, prompt_keys(PROMPT, "m"))
    assert router.index.count("a") == 12
    effects = hello(router, "a", 2, incarnation="2")
    assert any(isinstance(effect, ev.Welcome) and effect.snapshot for effect in effects)
    assert router.index.count("a") == 0
    record = router.instances.get("a")
    assert record is not None
    assert record.state is InstanceState.SYNCING
    # What still arrives on the old stream is about the old incarnation.
    router.handle(ev.KeysReported(1, "a", Delta(1, 1, added=[5])), 0.0)
    router.handle(ev.AgentLost(1, "a"), 0.0)
    assert record.lost_at is None
    router.check_invariants()


def test_an_agent_that_reconnects_resumes_without_a_snapshot() -> None:
    router = state()
    join(router, "a", 1)
    for seq in (1, 2, 3):
        router.handle(ev.KeysReported(1, "a", Delta(seq, 1, added=[seq])), 0.0)
    router.handle(ev.AgentLost(1, "a"), 1.0)
    record = router.instances.get("a")
    assert record is not None
    assert (record.state, router.prefix_knowledge.source(record, 1.0)) == (InstanceState.LOST, PrefixSource.APPROXIMATE)
    effects = router.handle(ev.AgentHello(2, info("a"), KEY_SCHEME, 2, 5), 2.0)
    assert ev.Welcome(2, snapshot=False, resume_from_seq=4) in effects
    assert router.prefix_knowledge.source(record, 2.0) is PrefixSource.EVENTS


def test_a_lost_instance_is_placeable_by_the_keys_it_had_then_gone() -> None:
    router = state(lost_instance_s=30.0)
    join(router, "a", 1, prompt_keys(PROMPT, "m"))
    join(router, "b", 2)
    router.handle(ev.AgentLost(1, "a"), 10.0)
    answer = place(router, request(prompt=PROMPT), 11.0)
    assert isinstance(answer, ev.Placed)
    assert answer.decision.cached_tokens == 192
    assert not answer.decision.view.candidates[0].exact
    router.handle(ev.Tick(), 39.9)
    assert router.instances.get("a") is not None
    assert ev.FleetChanged() in router.handle(ev.Tick(), 40.0)
    assert router.instances.get("a") is None
    router.handle(ev.Finished("r", "OK"), 41.0)
    router.check_invariants()


def test_a_wrong_bookmark_costs_the_credit_until_the_next_snapshot() -> None:
    router = state()
    keys = prompt_keys(PROMPT, "m")
    join(router, "a", 1, keys)
    effects = router.handle(ev.KeysReported(1, "a", ConsistencyCheck(0, len(keys), 12345)), 0.0)
    assert [type(effect) for effect in effects] == [ev.Resync, ev.FleetChanged]
    assert router.index.count("a") == 0


def test_agents_of_many_instances_are_told_to_send_loads_and_keys_less_often() -> None:
    router = state()

    def paces() -> list[ev.Pace]:
        return [effect for effect in router.handle(ev.Tick(), 1.0) if isinstance(effect, ev.Pace)]

    for number in range(62):
        join(router, f"{number}", number)
    assert set(paces()) == {ev.Pace(number, 0.0, 0.1) for number in range(62)}
    assert paces() == []
    for number in range(62, 75):
        join(router, f"{number}", number)
    assert set(paces()) == {ev.Pace(number, 0.0, 0.1) for number in range(62, 75)}
    join(router, "more", 75)
    assert set(paces()) == {ev.Pace(number, 0.1, 0.1) for number in range(76)}
    assert paces() == []
    # An agent that does not understand it is told nothing.
    router.handle(ev.AgentHello(98, info("old"), KEY_SCHEME, 1, 0), 1.0)
    assert paces() == []
    router.handle(ev.AgentGoodbye(98, "old"), 1.0)
    # A new stream begins without a limit.
    router.handle(ev.AgentLost(3, "3"), 1.0)
    assert paces() == []
    join(router, "3", 99)
    assert paces() == [ev.Pace(99, 0.1, 0.1)]
    for number in (0, 1):
        router.handle(ev.AgentGoodbye(number, f"{number}"), 1.0)
    assert {(pace.load_interval_s, pace.key_interval_s) for pace in paces()} == {(0.0, 0.1)}
    assert [load_interval_s(count) for count in (300, 1_000, 10_000)] == [0.2, 0.8, 1.6]
    assert [key_interval_s(count) for count in (300, 1_000, 10_000)] == [0.2, 0.4, 0.8]


def test_a_gateway_that_stays_away_loses_its_reservations_after_the_lease() -> None:
    router = state(gateway_lease_s=15.0)
    join(router, "a", 1)
    place(router, request("r", tokens=10))
    router.handle(ev.GatewayLost("g"), 100.0)
    router.handle(ev.Tick(), 114.9)
    assert len(router.reservations) == 1
    effects = router.handle(ev.Tick(), 115.0)
    assert any(isinstance(effect, ev.DecisionClosed) and effect.finished.outcome == "CANCELLED" for effect in effects)
    assert len(router.reservations) == 0


def test_a_gateway_that_returns_keeps_what_it_lists_and_only_that() -> None:
    router = state()
    join(router, "a", 1)
    for name in ("kept", "dropped"):
        place(router, request(name, tokens=100))
    router.handle(ev.GatewayLost("g"), 1.0)
    listed = (
        ev.OpenStream(request("kept", tokens=100), "a", Phase.DECODE, 0),
        ev.OpenStream(request("unknown", tokens=50), "a", Phase.PREFILL, 20),
    )
    router.handle(ev.GatewayHello("g", listed), 2.0)
    counters = router.reservations.counters("a")
    assert (counters.num_requests, counters.ongoing_decode_tokens, counters.pending_prefill_tokens) == (2, 100, 30)
    router.handle(ev.Tick(), 1_000.0)
    assert len(router.reservations) == 2
    router.check_invariants()


def test_a_unary_placement_ends_with_its_lease() -> None:
    router = state(place_lease_s=5.0)
    join(router, "a", 1)
    place(router, request("r", tokens=1), gateway="")
    router.handle(ev.Tick(), 5.0)
    assert len(router.reservations) == 0


def test_a_decision_on_the_rest_of_a_stream_is_noted() -> None:
    wire = placement_pb2.PlacementRequest(request_id="r.1", model="m", input_tokens=100, exclude=["a"], resumed=True)
    router = state()
    for number, name in enumerate(("a", "b"), 1):
        join(router, name, number)
    answer = place(router, placement_request(wire))
    assert isinstance(answer, ev.Placed)
    assert answer.decision.notes == (RESUMED,)
    assert answer.decision.instance_id == "b"
    assert redecide(answer.decision).notes == (RESUMED,)


def test_a_new_owner_starts_from_what_the_store_kept() -> None:
    before, after = state(), state()
    for router in (before, after):
        join(router, "a", 1)
    place(before, request("q", tokens=0, session_id="s"))
    before.handle(ev.Finished("q", "OK"), 0.0)
    place(before, request("r", tokens=100, session_id="s"))
    after.handle(ev.PoolTaken("m", tuple(before.reservations)), 50.0)
    after.handle(ev.SessionsRead("m", dict(filter(None, before.affinity.returning("m")))), 50.0)
    assert after.reservations.counters("a").ongoing_tokens == 100
    assert after.affinity.owner("m", "/s", 51.0) == "a"
    after.handle(ev.PoolLost("m"), 60.0)
    assert len(after.reservations) == 0
    after.check_invariants()


def test_a_new_owner_knows_what_is_usual() -> None:
    before, after = state(), state()
    mean_works: list[ev.MeanWorkSet] = []
    for router in (before, after):
        join(router, "a", 1)
    for number in range(40):
        effects = before.handle(ev.PlaceRequested(request(f"r{number}", tokens=100), "g"), 1.0)
        mean_works += [effect for effect in effects if isinstance(effect, ev.MeanWorkSet)]
    assert [effect.mean_work.requests for effect in mean_works] == [1, 2, 4, 8, 16, 32]
    after.handle(ev.PoolTaken("m", mean_work=mean_works[-1].mean_work), 50.0)
    assert after.prefill_observer.mean_work("m") == before.prefill_observer.mean_work("m")
    # The next MeanWorkSet is sent only when the number of requests has doubled.
    effects = after.handle(ev.PlaceRequested(request("next", tokens=100), "g"), 51.0)
    assert not [effect for effect in effects if isinstance(effect, ev.MeanWorkSet)]


def test_a_failed_step_that_an_earlier_owner_gave_is_followed_by_a_serve() -> None:
    before, after = state(), state()
    for router in (before, after):
        join(router, "a", 1)
    place(before, request("r", tokens=100, session_id="s"))
    [kept] = before.reservations
    after.handle(ev.PoolTaken("m", (kept,)), 50.0)
    reserved, placed = after.handle(ev.StepDone("r", 2, ok=False, error="broke"), 51.0)
    assert isinstance(placed, ev.Placed)
    assert (placed.step_index, placed.step.kind, placed.step.instance_id) == (3, StepKind.SERVE, "a")
    assert placed.last
    assert placed.decision.decision_id == kept.decision_id
    assert isinstance(reserved, ev.Reserved)
    assert reserved.reservation.step_index == 3
    # A second report of the same step gets no answer, and neither does one of an unknown request.
    assert after.handle(ev.StepDone("r", 2, ok=True), 52.0) == []
    assert after.handle(ev.StepDone("x", 0, ok=True), 52.0) == []
    after.check_invariants()


def kv_of(role: KvRole) -> KvTransfer:
    """How an instance with this role moves KV."""
    usual = info("a").kv_transfer
    assert usual is not None
    return replace(usual, role=role)


def taken_over(step_index: int, role: KvRole = KvRole.BOTH) -> RouterState:
    """A router that has r from an earlier owner of the pool, at that step, on a."""
    router = state(owns_all=False)
    join(router, "a", 1, kv_transfer=kv_of(role))
    router.handle(ev.PoolTaken("m", (Reservation("r", "g", "a", "d", 100, 10, step_index=step_index, pool="m"),)), 0.0)
    return router


@pytest.mark.parametrize("step_index", [0, 1, 3])
def test_a_later_step_of_an_earlier_owner_is_answered_again_as_that_step(step_index: int) -> None:
    router = taken_over(step_index)
    for _ in range(2):
        again = place(router, request("r", tokens=100))
        assert isinstance(again, ev.Placed)
        assert (again.step_index, again.step.kind, again.last) == (step_index, StepKind.SERVE, True)
    # A SERVE by itself is followed by nothing.
    assert router.handle(ev.StepDone("r", step_index, ok=False), 1.0) == []
    router.check_invariants()


@pytest.mark.parametrize("others", [0, 1])
def test_what_an_earlier_owner_prefills_on_a_producer_is_answered_by_another_where_there_is_one(others: int) -> None:
    router = taken_over(0, role=KvRole.PRODUCER)
    if others:
        join(router, "d", 2)
    failed = router.handle(ev.StepDone("r", 0, ok=False, instance_failed=True), 1.0)
    if others:
        # The gateway asks again, since it knows the target of the KV.
        [refused] = failed
        assert isinstance(refused, ev.Refused)
        assert (refused.not_serving, refused.gateway_id) == (True, "g")
    else:
        assert [effect.step.instance_id for effect in failed if isinstance(effect, ev.Placed)] == ["a"]
    again = place(router, request("r", tokens=100), 1.0)
    assert isinstance(again, ev.Placed)
    assert (again.step.kind, again.step.instance_id) == (StepKind.SERVE, "d" if others else "a")
    assert [reservation.instance_id for reservation in router.reservations] == [again.step.instance_id]
    router.check_invariants()


def test_an_answer_that_a_producer_was_to_give_for_want_of_others_is_given_by_another_that_has_come() -> None:
    router = state()
    join(router, "a", 1, kv_transfer=kv_of(KvRole.PRODUCER))
    first = place(router, request("r", tokens=100))
    assert isinstance(first, ev.Placed)
    assert first.step.instance_id == "a"
    join(router, "d", 2)
    again = place(router, request("r", tokens=100), 1.0)
    assert isinstance(again, ev.Placed)
    assert again.step.instance_id == "d"
    router.check_invariants()


def test_a_gateway_that_says_again_and_again_where_a_request_runs_is_told_that_step() -> None:
    router = state()
    for number, name in enumerate("ab"):
        join(router, name, number)
    for name in "aab":
        router.handle(ev.StreamOpened("g", ev.OpenStream(request("r", tokens=50), name, Phase.PREFILL, 0)), 1.0)
        for _ in range(2):
            again = place(router, request("r", tokens=50), 1.0)
            assert isinstance(again, ev.Placed)
            assert again.step.instance_id == name
        router.check_invariants()
    [decision] = router.requests.decisions()
    assert len(decision.result.steps) == 2


def test_the_number_of_a_step_that_no_plan_has_is_passed_over() -> None:
    router = taken_over(0)
    assert router.handle(ev.StepDone("r", 2**32 - 1, ok=False), 1.0) == []
    for _ in range(MAX_STEPS + 2):
        router.handle(ev.StreamOpened("g", ev.OpenStream(request("r", tokens=100), "a", Phase.PREFILL, 0)), 1.0)
    assert isinstance(place(router, request("r", tokens=100), 1.0), ev.Placed)
    router.check_invariants()


def test_a_request_that_another_pools_owner_has_under_the_same_id_is_that_ones() -> None:
    router = state(owns_all=False)
    join(router, "a", 1)
    join(router, "c", 2, model="n", served_names=())
    router.handle(ev.PoolTaken("m"), 0.0)
    place(router, request("r", tokens=10))
    effects = router.handle(ev.PoolTaken("n", (Reservation("r", "g", "c", "d", 100, 10, 2, pool="n"),)), 1.0)
    assert ev.Released("r", "m") in effects
    again = place(router, request("r", tokens=100, model="n"), 1.0)
    assert isinstance(again, ev.Placed)
    assert (again.step.instance_id, again.step_index) == ("c", 2)
    router.check_invariants()


def test_a_prefill_of_a_pool_that_is_lost_is_watched_no_longer_where_its_instance_has_another_model() -> None:
    router = state(owns_all=False)
    for pool in "mn":
        router.handle(ev.PoolTaken(pool), 0.0)
    join(router, "b", 1)
    place(router, request("r0", tokens=500), 1.0)
    join(router, "b", 2, model="n", served_names=())
    router.handle(ev.PoolLost("m"), 1.0)
    router.check_invariants()
    place(router, request("r1", tokens=500, model="n"), 2.0)
    router.handle(ev.FirstToken("r1"), 3.0)
    assert router.prefill_observer.samples("n", "") == 1


def test_an_idle_instances_reports_look_at_its_own_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    router = state()
    for number, name in enumerate("ab"):
        join(router, name, number)
    streams = [ev.OpenStream(request(f"{name}{n}", tokens=9), name, Phase.DECODE, 0) for name in "ab" for n in range(5)]
    router.handle(ev.GatewayHello("g", tuple(streams)), 0.0)
    router.handle(ev.GatewayLost("g"), 0.0)
    looked: list[str] = []
    opened_at = router.requests.opened_at
    monkeypatch.setattr(Reservations, "__iter__", lambda self: pytest.fail("all are looked at"))

    def noted(_: RequestTable, request_id: str) -> float | None:
        looked.append(request_id)
        return opened_at(request_id)

    monkeypatch.setattr(RequestTable, "opened_at", noted)
    for number in range(4):
        router.handle(ev.LoadReported(0, "a", Load(1.0 + number)), 1.0 + number)
    assert set(looked) == {f"a{n}" for n in range(5)}


def test_explain_and_what_if_change_nothing() -> None:
    router = state("random")
    for number, name in enumerate("abcd"):
        join(router, name, number)
    dry = [router.explain(request(tokens=10), 0.0) for _ in range(2)]
    assert dry[0] == dry[1]
    real = place(router, request(tokens=10))
    assert isinstance(dry[0], Decision)
    assert isinstance(real, ev.Placed)
    assert dry[0].instance_id == real.step.instance_id
    again = router.what_if(real.decision, make_policy("least_requests"))
    assert again.result.reason == "least_requests"
    assert len(router.reservations) == 1


def test_adapters_go_only_where_they_are_loaded() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2, lora_names=("fine",))
    answers = [place(router, request(f"r{n}", tokens=10, model="fine")) for n in range(3)]
    assert {answer.step.instance_id for answer in answers if isinstance(answer, ev.Placed)} == {"b"}


def test_what_was_cancelled_is_decided_again_when_it_is_asked_for_again() -> None:
    """A gateway cancels a placement that came too late, and may still ask for another, which must have a reservation."""
    router = state()
    join(router, "a", 1)
    place(router, request("r", tokens=100))
    router.handle(ev.Finished("r", "CANCELLED"), 1.0)
    assert len(router.reservations) == 0
    assert isinstance(place(router, request("r", tokens=100)), ev.Placed)
    assert len(router.reservations) == 1


def test_a_stream_announced_before_its_pools_agents_are_back_is_in_its_pool_once_they_are() -> None:
    router = state()
    stream = ev.OpenStream(request("r", tokens=100, tenant="t", session_id="s"), "a", Phase.DECODE, 0)
    for pool in ("", "m"):
        # The gateway sends a hello to the owner of each pool that it learns of.
        router.handle(ev.GatewayHello("g", (stream,)), 0.0)
        finish(router)
        assert [reservation.pool for reservation in router.reservations.of_instance("a")] == [pool]
        router.check_invariants()
        join(router, "a", 1)
    assert set(router.admission.pools) == {"m"}


def test_what_a_lost_gateway_had_open_ends_a_part_at_a_time() -> None:
    router = state()
    join(router, "a", 0)
    count = 2 * ENDS_AT_ONCE + 1
    streams = tuple(ev.OpenStream(request(f"r{n}", tokens=10), "a", Phase.DECODE, 0) for n in range(count))
    router.handle(ev.GatewayHello("g", streams), 0.0)
    finish(router)
    router.handle(ev.GatewayLost("g"), 1.0)
    left = []
    for tick in range(4):
        router.handle(ev.Tick(), 100.0 + tick)
        left.append(len(router.reservations))
    assert left == [ENDS_AT_ONCE + 1, 1, 0, 0]


def refusal(answer: ev.Placed | ev.Refused) -> str:
    assert isinstance(answer, ev.Refused), answer
    return answer.code


@pytest.mark.parametrize("outcome", ["OK", "REJECTED", "FAILED", ev.UNKNOWN])
def test_the_id_of_a_finished_request_is_used_up(outcome: str) -> None:
    """The placement of an ended request has no reservation. A request that ran by it would not be counted."""
    router = state()
    join(router, "a", 1)
    place(router, request("r", tokens=100))
    router.handle(ev.Finished("r", outcome), 1.0)
    answer = place(router, request("r", tokens=100), 2.0)
    assert refusal(answer) == "ABORTED"
    assert len(router.reservations) == 0
    router.check_invariants()


@pytest.mark.parametrize("gateway", ["g", ""])
def test_an_id_belongs_to_one_model(gateway: str) -> None:
    router = state()
    join(router, "a", 1, lora_names=("l",))
    join(router, "b", 2, model="n", served_names=("n",))
    join(router, "c", 3)
    placed = place(router, request("r", tokens=100, model="l"), gateway=gateway)
    for model in ("n", "unknown"):
        assert refusal(place(router, request("r", tokens=100, model=model), gateway=gateway)) == "INVALID_ARGUMENT"
    again = place(router, request("r", tokens=100, model="l"), gateway=gateway)
    assert isinstance(placed, ev.Placed)
    assert isinstance(again, ev.Placed)
    assert again.step == placed.step
    on_c = place(router, request("s", tokens=100, exclude=("a",)), gateway=gateway)
    assert isinstance(on_c, ev.Placed)
    assert on_c.step.instance_id == "c"
    assert refusal(place(router, request("s", tokens=100, model="l"), gateway=gateway)) == "INVALID_ARGUMENT"
    assert isinstance(place(router, request("s", tokens=100, model="alias"), gateway=gateway), ev.Placed)
    assert len(router.reservations) == 2


def test_the_id_of_a_held_request_belongs_to_its_model() -> None:
    router = state(limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=4))
    join(router, "a", 1)
    join(router, "b", 2, model="n", served_names=("n",))
    place(router, request("first", tokens=100))
    assert router.handle(ev.PlaceRequested(request("r", tokens=100), "g"), 0.0) == []
    assert refusal(place(router, request("r", tokens=100, model="n"))) == "INVALID_ARGUMENT"
    answers = [effect for effect in router.handle(ev.Finished("first", "OK"), 1.0) if isinstance(effect, ev.Placed)]
    assert [(answer.request_id, answer.step.instance_id) for answer in answers] == [("r", "a")]


def test_a_new_owner_knows_whose_model_a_recovered_request_is_for() -> None:
    router = state(owns_all=False)
    join(router, "a", 1)
    join(router, "b", 2, model="n", served_names=("n",))
    kept = Reservation("r", "g", "a", "d", 100, 100, pool="m")
    for taken in (ev.PoolTaken("m", (kept,)), ev.PoolTaken("n")):
        router.handle(taken, 0.0)
        finish(router)
    assert refusal(place(router, request("r", tokens=100, model="n"))) == "INVALID_ARGUMENT"
    for model in ("alias", "m"):
        answer = place(router, request("r", tokens=100, model=model))
        assert isinstance(answer, ev.Placed)
        assert answer.step.instance_id == "a"


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_a_request_whose_gateway_waits_no_longer_is_not_placed(left_s: float) -> None:
    router = state()
    join(router, "a", 1)
    refused = place(router, request("r", tokens=100, deadline_s=left_s))
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.pool) == ("DEADLINE_EXCEEDED", "m")
    assert len(router.reservations) == 0
    assert isinstance(place(router, request("r", tokens=100, deadline_s=0.001)), ev.Placed)
    assert isinstance(place(router, request("r", tokens=100, deadline_s=left_s)), ev.Placed), "it is placed already"


def large_pool(size: int) -> RouterState:
    router = state()
    for number in range(size):
        join(router, f"i{number:03d}", number)
    place(router, request("r"))
    router.handle(ev.Tick(), 0.0)
    return router


def test_a_tick_looks_at_an_idle_instance_in_few_steps() -> None:
    """It looks at all of them in one turn of the event loop."""
    steps = []
    for size in (20, 120):
        router = large_pool(size)
        with Steps() as taken:
            router.handle(ev.Tick(), 0.5)
        steps.append(taken.count)
    assert (steps[1] - steps[0]) / 100 < 175


def test_contexts_cost_the_same_however_many_engines_there_are() -> None:
    """They are looked at again after each change of an instance, and there may be a thousand restarts."""
    steps = []
    for size in (20, 120):
        router = large_pool(size)
        join(router, "i000", 0, incarnation="2")
        with Steps() as taken:
            assert len(router.instances.contexts("m", "m")) == 1
        steps.append(taken.count)
    assert steps[0] == steps[1]
    join(router, "i000", 0, incarnation="2", engine_version="0.31.0", max_model_len=9_000)
    assert {context.max_model_len for context in router.instances.contexts("m", "m")} == {0, 9_000}
    router.check_invariants()
