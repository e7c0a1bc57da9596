"""What a router's /metrics say: of its state, and of what it did."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pointsman_common.core.engine_identity import EngineIdentity
from pointsman_common.io.metrics_page import PIECE, pieces
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.gone_pools import KEPT_S
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Counters
from pointsman_router.core.placement_types import Decision, KvRole, KvTransfer, Load, WrongKv
from pointsman_router.core.prefill_curve import DEFAULT_CURVE
from pointsman_router.core.priority import Priority
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.telemetry.event_metrics import EventMetrics
from pointsman_router.io.telemetry.state_metrics import StateCollector
from tests.support.router_values import join, place, request, state

Told = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(telemetry: EventMetrics) -> Told:
    """Every sample of the page by its name and labels."""
    families = text_string_to_metric_families(generate_latest(telemetry.registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def at(samples: Told, name: str, **labels: str) -> float:
    return samples["pointsman_router_" + name, frozenset(labels.items())]


def with_state(state_: RouterState, now: float = 0.0) -> EventMetrics:
    telemetry = EventMetrics()
    telemetry.registry.register(StateCollector(state_, lambda: True, clock=lambda: now))
    return telemetry


def decided(state_: RouterState, request_id: str) -> Decision:
    effects = state_.handle(ev.PlaceRequested(request(request_id, 100), "g"), 0.0)
    [decision] = [effect.decision for effect in effects if isinstance(effect, ev.DecisionMade)]
    return decision


def finished(**changes: Any) -> ev.Finished:
    values: dict[str, Any] = {"request_id": "r", "outcome": "OK", "cached_tokens": 32, "output_tokens": 5}
    return ev.Finished(**{**values, **changes})


def test_the_state_is_reported_as_it_is_when_asked() -> None:
    fleet = state()
    telemetry = with_state(fleet, now=7.0)
    join(fleet, "a", 1, [1, 2, 3], now=2.0)
    fleet.handle(ev.LoadReported(1, "a", Load(2.0, running=4, waiting=1, kv_usage=0.5)), 3.0)
    decided(fleet, "r")
    both = InstanceOrder(cordoned=True, weight=0.5)
    fleet.handle(ev.OrdersChanged({"gone": both, "b": InstanceOrder(weight=0.0)}), 4.0)
    samples = read(telemetry)
    assert [at(samples, "instance_orders", kind=kind) for kind in ("cordon", "weight")] == [1, 2]
    assert at(samples, "prefill_curve_samples", model="m", hardware="") == 0
    assert at(samples, "instances", model="m", state="READY") == 1
    assert at(samples, "instances", model="m", state="LOST") == 0
    assert at(samples, "pool_owned", model="m") == 1
    assert [at(samples, "held_requests", model="m", priority=priority) for priority in Priority] == [0, 0, 0]
    assert at(samples, "open_requests", instance="a") == 1
    assert at(samples, "pending_prefill_tokens", instance="a") == 100
    assert at(samples, "keys", instance="a") == 3
    assert at(samples, "report_age_seconds", instance="a") == 4
    assert at(samples, "running_requests", instance="a") == 4
    assert at(samples, "waiting_requests", instance="a") == 1
    assert at(samples, "kv_usage_ratio", instance="a") == 0.5
    assert at(samples, "unknown_load_figures", instance="a") == 0
    assert at(samples, "prediction_audit_failures_total", instance="a") == 0
    assert (at(samples, "ready"), at(samples, "store_degraded")) == (1, 0)


def test_a_request_with_many_answers_is_one_reservation() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    assert at(read(telemetry), "reservations") == 0
    fleet.handle(ev.PlaceRequested(request("r", 100, sequences=16), "g"), 0.0)
    samples = read(telemetry)
    assert (at(samples, "open_requests", instance="a"), at(samples, "reservations")) == (16, 1)


async def test_a_large_fleet_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = state()
    for number in range(3 * PIECE):
        join(fleet, f"i{number}", number)
    read_now, counters = 0, fleet.reservations.counters

    def counted(instance_id: str) -> Counters:
        nonlocal read_now
        read_now += 1
        return counters(instance_id)

    collector = StateCollector(fleet, lambda: True, clock=lambda: 0.0)
    monkeypatch.setattr(fleet.reservations, "counters", counted)
    at_once, series = [], 0
    async for piece in pieces(collector.collect()):
        at_once.append(read_now)
        read_now = 0
        series += len(piece.series) if piece.name == "pointsman_router_open_requests" else 0
    assert series == 3 * PIECE
    assert 0 < max(at_once) <= PIECE


def test_the_engines_that_an_instance_refuses_are_counted_while_they_run() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    wrong = (WrongKv("http://a:8998", "a1", 2), WrongKv("http://gone:8998", "gone", 1))
    join(fleet, "b", 1, kv_transfer=KvTransfer("MOONCAKE", "http://b:8998", wrong_from=wrong, engine_id="b1"))
    assert at(read(telemetry), "wrong_kv_senders", instance="b") == 0
    for number, (engine_id, refused) in enumerate([("a1", 1), ("a2", 0)]):
        kv = KvTransfer("MOONCAKE", "http://a:8998", engine_id=engine_id)
        join(fleet, "a", 2, incarnation=str(number), kv_transfer=kv)
        samples = read(telemetry)
        assert at(samples, "wrong_kv_senders", instance="b") == refused
        assert at(samples, "wrong_kv_senders", instance="a") == 0


def test_the_backlog_of_every_class_is_reported_by_the_pools_owner_alone() -> None:
    fleet = state(owns_all=False)
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    assert not [name for name, _ in read(telemetry) if name.endswith("backlog_seconds")]
    fleet.handle(ev.PoolTaken("m", ()), 0.0)
    classes = ("LIGHT", "MEDIUM", "HEAVY")
    # A figure, and no gap, for a scaler to read.
    assert [at(read(telemetry), "backlog_seconds", model="m", route_class=route_class) for route_class in classes] == [
        0,
        0,
        0,
    ]
    fleet.handle(ev.PlaceRequested(request("r", 8_000), "g"), 0.0)
    backlogs = [at(read(telemetry), "backlog_seconds", model="m", route_class=route_class) for route_class in classes]
    assert backlogs == [pytest.approx(DEFAULT_CURVE.cost_s(8_000, 0))] * 3
    fleet.handle(ev.PoolLost("m"), 0.0)
    assert not [name for name, _ in read(telemetry) if name.endswith("backlog_seconds")]


def test_an_instance_that_is_gone_leaves_no_series() -> None:
    fleet = state(lost_instance_s=1.0)
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    join(fleet, "b", 2)
    for request_id in ("r", "s"):
        telemetry.decided(decided(fleet, request_id), 2e-4)
    samples = read(telemetry)
    assert (at(samples, "keys", instance="a"), at(samples, "placements_total", instance="a")) == (0, 1)
    fleet.handle(ev.AgentGoodbye(1, "a"), 0.0)
    telemetry.keep_instances(fleet.instances)
    assert not [labels for _, labels in read(telemetry) if ("instance", "a") in labels]
    assert at(read(telemetry), "placements_total", instance="b") == 1
    # It counts from 0 when it is back.
    join(fleet, "a", 3)
    fleet.handle(ev.AgentGoodbye(2, "b"), 0.0)
    telemetry.decided(decided(fleet, "t"), 2e-4)
    assert at(read(telemetry), "placements_total", instance="a") == 1


def test_a_pool_that_is_gone_has_no_instances_for_a_while_and_then_no_series() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    telemetry.decided(decided(fleet, "r"), 2e-4)
    assert at(read(telemetry), "answering_instances", model="m") == 1
    fleet.handle(ev.AgentGoodbye(1, "a"), 0.0)
    fleet.handle(ev.Tick(), 0.0)
    samples = read(telemetry)
    assert at(samples, "answering_instances", model="m") == at(samples, "instances", model="m", state="READY") == 0
    assert ("pointsman_router_pool_owned", frozenset({("model", "m")})) not in samples, "nobody need own it"
    fleet.handle(ev.Finished("r", "CANCELLED"), 0.0)
    fleet.handle(ev.Tick(), KEPT_S)
    assert not [name for name, labels in read(telemetry) if ("model", "m") in labels]


def test_instances_that_only_produce_kv_answer_nothing_beside_others() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    for stream, name in enumerate(("p1", "p2"), 1):
        join(fleet, name, stream, kv_transfer=KvTransfer("MOONCAKE", f"http://{name}:8998", role=KvRole.PRODUCER))
    assert at(read(telemetry), "answering_instances", model="m") == 2
    join(fleet, "c", 3)
    assert at(read(telemetry), "answering_instances", model="m") == 1
    fleet.handle(ev.OrdersChanged({"c": InstanceOrder(cordoned=True)}), 1.0)
    samples = read(telemetry)
    assert at(samples, "instances", model="m", state="READY") == 2
    assert at(samples, "answering_instances", model="m") == 0
    assert isinstance(place(fleet, request("r", 100), 1.0), ev.Refused)


def test_requests_that_wait_for_a_pool_whose_last_instance_left_are_counted() -> None:
    fleet = state(limits=SaturationLimits(1))
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    for request_id in ("r", "waits"):
        fleet.handle(ev.PlaceRequested(request(request_id, 100), "g"), 0.0)
    for left in (False, True):
        if left:
            fleet.handle(ev.AgentGoodbye(1, "a"), 0.0)
        assert at(read(telemetry), "held_requests", model="m", priority="STANDARD") == 1
    fleet.handle(ev.Finished("waits", "CANCELLED"), 0.0)
    assert not [labels for name, labels in read(telemetry) if name == "pointsman_router_held_requests"]


def test_decisions_and_ends_are_counted() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    decision = decided(fleet, "r")
    telemetry.decided(decision, 2e-4)
    telemetry.closed(decision, finished(timings_ms={"placed": 1.0, "sent": 2.0, "first_token": 40.0, "done": 80.0}))
    telemetry.closed(None, finished(outcome="FAILED"))
    telemetry.refused("UNAVAILABLE")
    samples = read(telemetry)
    reason = decision.result.reason
    assert at(samples, "decisions_total", route_class="LIGHT", reason=reason) == 1
    assert at(samples, "placements_total", instance="a") == 1
    assert at(samples, "decide_seconds_count") == 1
    assert at(samples, "ttft_seconds_sum", route_class="LIGHT") == 0.04
    assert (at(samples, "outcomes_total", outcome="OK"), at(samples, "outcomes_total", outcome="FAILED")) == (1, 1)
    assert (at(samples, "predicted_cached_tokens_total"), at(samples, "reported_cached_tokens_total")) == (0, 32)
    assert (at(samples, "refusals_total", code="UNAVAILABLE"), at(samples, "refusals_total", code="NOT_FOUND")) == (
        1,
        0,
    )


def test_tokens_that_earlier_parts_of_a_prompt_computed_are_no_hits() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    last = replace(decided(fleet, "r"), previous_id="r-0")
    # Gateways of earlier versions do not tell which of the cached tokens the slices before have computed.
    telemetry.closed(last, finished(cached_tokens=5_000))
    assert at(read(telemetry), "reported_cached_tokens_total") == 0
    telemetry.closed(last, finished(cached_tokens=5_000, own_cached_tokens=4_000))
    assert at(read(telemetry), "reported_cached_tokens_total") == 1_000


def test_offloads_are_counted_apart_and_so_are_those_that_one_instance_answered_in_the_end() -> None:
    fleet = state("elastic")
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    decision = decided(fleet, "r")
    telemetry.fell_back(decision)
    telemetry.closed(decision, finished())
    offloaded = replace(decision, mode="OFFLOAD")
    telemetry.fell_back(offloaded)
    telemetry.closed(offloaded, finished())
    samples = read(telemetry)
    assert (at(samples, "offloads_total", outcome="OK"), at(samples, "offloads_total", outcome="FAILED")) == (1, 0)
    assert at(samples, "offload_fallbacks_total") == 1


def test_an_answer_that_never_began_has_no_time_to_its_first_token() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1)
    none = {"placed": 1.0, "sent": 0.0, "first_token": 0.0, "done": 9.0}
    telemetry.closed(decided(fleet, "r"), finished(outcome="FAILED", timings_ms=none))
    assert not [name for name, _ in read(telemetry) if name == "pointsman_router_ttft_seconds_count"]


def test_names_that_several_models_answer_to_are_reported_and_go_to_the_first() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    join(fleet, "a", 1, model="n", served_names=("n", "alias", "both"), lora_names=("m",))
    join(fleet, "b", 2, model="m", served_names=("m", "both"))
    assert [fleet.instances.pool_of(name) for name in ("m", "n", "alias", "both")] == ["m", "n", "n", "m"]
    assert fleet.instances.shared_names == {"both": ["m", "n"], "m": ["m", "n"]}
    assert at(read(telemetry), "shared_names") == 2
    fleet.handle(ev.AgentGoodbye(1, "a"), 1.0)
    assert fleet.instances.shared_names == {}
    assert at(read(telemetry), "shared_names") == 0


def test_how_many_prefills_taught_a_curve_is_reported_by_its_owner() -> None:
    fleet, other = state(), state(owns_all=False)
    for router in (fleet, other):
        join(router, "a", 1, hardware="H")
    for number in range(3):
        decided(fleet, f"r{number}")
        fleet.handle(ev.FirstToken(f"r{number}"), 1.0 + number)
    decided(fleet, "whole")
    fleet.handle(finished(request_id="whole"), 5.0)
    assert at(read(with_state(fleet)), "prefill_curve_samples", model="m", hardware="H") == 3
    assert not [name for name, _ in read(with_state(other)) if "curve_samples" in name]


def test_the_policy_of_a_pool_is_reported_by_its_owner_with_the_reason() -> None:
    fleet, chosen, other = state("auto"), state("lpwl"), state("auto", owns_all=False)
    for router in (fleet, chosen, other):
        join(router, "a", 1)
    samples = read(with_state(fleet))
    assert at(samples, "pool_policy", model="m", policy="unified", reason="curve_not_learned") == 1
    assert at(read(with_state(chosen)), "pool_policy", model="m", policy="lpwl", reason="") == 1
    assert not [name for name, _ in samples if "admission_armed" in name], "no sessions are admitted in any pool"
    assert not [name for name, _ in read(with_state(other)) if "pool_policy" in name]


def test_instances_that_differ_are_counted_by_what_they_differ_in() -> None:
    fleet = state()
    telemetry = with_state(fleet)
    for stream, name in enumerate("abc", 1):
        join(fleet, name, stream, identity=EngineIdentity(dtype="float16" if name == "c" else "bfloat16"))
    samples = read(telemetry)
    assert at(samples, "instances_differing", model="m", what="dtype") == 1.0
    assert at(samples, "instances_differing", model="m", what="rival") == 0.0
