"""What goes over the wire and back is the same."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import duration_pb2, json_format
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core import key_report_wire
from pointsman_common.core.key_report_types import SnapshotChunk, Tier
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import (
    Gpu,
    InstanceInfo,
    KvRole,
    KvTransfer,
    Load,
    PlacementRequest,
    StepTotals,
    WrongKv,
)
from pointsman_router.core.priority import Priority
from pointsman_router.io.convert import gateway_messages, instance_and_load_messages
from pointsman_router.io.convert.times import duration, seconds

words = st.text(max_size=20)
counts = st.integers(0, 2**31 - 1)
instances = st.builds(
    InstanceInfo,
    instance_id=words,
    incarnation=words,
    url=words,
    model=words,
    served_names=st.lists(words, max_size=3).map(tuple),
    lora_names=st.lists(words, max_size=3).map(tuple),
    model_root=words,
    block_size=counts,
    kv_capacity_tokens=counts,
    max_model_len=counts,
    data_parallel_rank=st.none() | st.integers(0, 64),
    exact_prefix=st.booleans(),
    prefix_reason=words,
    engine_version=words,
    node=words,
    hardware=words,
    long_prefill_token_threshold=counts,
    sparse_prefixes=st.booleans(),
    events_unusable=st.booleans(),
    shared_storage=st.sampled_from(["", "store"]),
    kv_token_bytes=st.integers(0, 2**40),
    kv_transfer=st.none()
    | st.builds(
        KvTransfer,
        protocol=st.sampled_from(["MOONCAKE", "NIXL"]),
        bootstrap_url=words,
        role=st.sampled_from(KvRole),
        cache_dtype=words,
        layerwise=st.booleans(),
        wrong_from=st.lists(st.builds(WrongKv, words, words, counts), max_size=2).map(tuple),
        engine_id=words,
    ),
)
gpus = st.builds(Gpu, index=counts, utilisation=st.floats(0, 1, width=32), memory_used=counts, memory_total=counts)
loads = st.builds(
    Load,
    sampled_at=st.just(7.0),
    running=st.none() | counts,
    waiting=st.none() | counts,
    kv_usage=st.none() | st.floats(0, 1, width=32),
    generation_tokens=st.none() | counts,
    prefix_cache_queries=st.none() | counts,
    prefix_cache_hits=st.none() | counts,
    external_prefix_cache_queries=st.none() | counts,
    external_prefix_cache_hits=st.none() | counts,
    preemptions=st.none() | counts,
    healthy=st.booleans(),
    suspended=words,
    problem=words,
    gpus=st.lists(gpus, max_size=2).map(tuple),
    prefill_tokens_left=st.none() | counts,
    steps=st.none()
    | st.builds(
        StepTotals,
        steps=counts,
        seconds=st.floats(0, 1e9),
        decode_tokens=counts,
        prefill_tokens=counts,
        prefill_pairs=st.integers(0, 2**63),
        prefills=counts,
        prefill_seconds=st.floats(0, 1e9),
    ),
)
timings = st.fixed_dictionaries(
    {name: st.floats(0, 1e6, width=32) for name in ("placed", "sent", "first_token", "done")}
)
ends = st.builds(
    ev.Finished,
    request_id=words,
    outcome=st.sampled_from(["OK", "CANCELLED", "REJECTED", "FAILED", ev.UNKNOWN]),
    prompt_tokens=st.none() | counts,
    cached_tokens=st.none() | counts,
    output_tokens=st.none() | counts,
    error=words,
    http_status=st.integers(0, 599),
    timings_ms=st.none() | timings,
    finish_reason=st.sampled_from(["", "STOP", "LENGTH", "TOOL_CALLS"]),
)
# Their sum is a field of 32 bits, too.
TIERS = st.dictionaries(
    st.sampled_from([agent_pb2.TIER_DEVICE, agent_pb2.TIER_HOST, agent_pb2.TIER_STORAGE]),
    st.integers(0, 2**30),
    min_size=1,
)


@given(instances)
def test_an_instance_comes_back(info: InstanceInfo) -> None:
    assert instance_and_load_messages.instance_info(instance_and_load_messages.instance_to_wire(info)) == info


@given(loads)
def test_a_load_comes_back(load: Load) -> None:
    assert instance_and_load_messages.load(instance_and_load_messages.load_to_wire(load, 7.0), 7.0) == load


@pytest.mark.parametrize("age_s", [315_576_000_001, 2**63 - 1])
def test_a_decision_is_shown_whatever_a_request_says_of_its_age(age_s: int) -> None:
    wire = placement_pb2.PlacementRequest(request_id="r", age=duration_pb2.Duration(seconds=age_s, nanos=999_999_999))
    held_s = gateway_messages.placement_request(wire).age_s + 1.0
    assert json_format.MessageToDict(fleet_pb2.Decision(held=duration(held_s))) == {"held": "315576000000s"}


def test_a_load_may_be_older_than_its_message_can_say() -> None:
    oldest = instance_and_load_messages.load(agent_pb2.Load(sample_age_ms=2**32 - 1), 7.0)
    assert instance_and_load_messages.load_to_wire(oldest, 8.0).sample_age_ms == 2**32 - 1


@given(ends)
def test_an_end_comes_back(done: ev.Finished) -> None:
    assert gateway_messages.finished(gateway_messages.finished_to_wire(done)) == done


@given(ends, TIERS, st.integers(-1, 1))
def test_tiers_of_cached_tokens_come_back_where_they_fit_the_sum(
    done: ev.Finished, tiers: dict[int, int], more: int
) -> None:
    cached = sum(tiers.values()) + more
    ended = structs.replace(done, cached_tokens=max(cached, 0), cached_by_tier=tiers)
    expected = tiers if sum(tiers.values()) <= max(cached, 0) else None
    assert gateway_messages.finished(gateway_messages.finished_to_wire(ended)).cached_by_tier == expected


@pytest.mark.parametrize("tiers", [[(0, 1)], [(9, 1)], [(1, 1), (1, 1)]])
def test_tiers_that_cannot_be_are_not_taken(tiers: list[tuple[Any, int]]) -> None:
    wire = placement_pb2.Finished(request_id="r", cached_tokens=5)
    for tier, tokens in tiers:
        wire.cached_by_tier.add(tokens=tokens).tier = tier
    assert gateway_messages.finished(wire).cached_by_tier is None


@given(st.floats(0, 1e9))
def test_a_duration_comes_back_to_the_nanosecond(value: float) -> None:
    assert abs(seconds(duration(value)) - value) < max(1e-9, value * 1e-15) * 1.01


@pytest.mark.parametrize("outcome", [placement_pb2.OUTCOME_UNSPECIFIED, 99])
def test_an_outcome_that_nobody_knows_is_neither_an_answer_nor_a_failure(outcome: Any) -> None:
    """What a newer gateway says must not end its stream, nor blame an instance."""
    wire = placement_pb2.Finished(request_id="r")
    wire.outcome = outcome
    wire.finish_reason = outcome
    sent = placement_pb2.Finished.FromString(wire.SerializeToString())
    finished = gateway_messages.finished(sent)
    assert (finished.outcome, finished.finish_reason) == (ev.UNKNOWN, "")
    assert gateway_messages.finished(gateway_messages.finished_to_wire(finished)) == finished


def asked(**fields: Any) -> PlacementRequest:
    """As it comes through the wire, where a field of an enum may have any number."""
    wire = placement_pb2.PlacementRequest(request_id="r", model="m", **fields)
    return gateway_messages.placement_request(placement_pb2.PlacementRequest.FromString(wire.SerializeToString()))


def test_what_gateways_of_other_versions_say_of_classes_is_understood() -> None:
    """An older one says nothing, a newer one may know more classes."""
    old = asked()
    assert (old.priority, old.weight, old.ttft_deadline_s) == (Priority.STANDARD, 1.0, None)
    assert asked(priority=77).priority is Priority.STANDARD
    assert [asked(weight=weight).weight for weight in (0, 1, 1_000, 2**32 - 1)] == [1.0, 1.0, 1_000.0, 1_000.0]
    assert asked(ttft_deadline=duration(0.0)).ttft_deadline_s == 0.0
    assert asked(ttft_deadline=duration(2.5)).ttft_deadline_s == 2.5


@pytest.mark.parametrize("priority", Priority)
def test_classes_go_over_the_wire_and_back(priority: Priority) -> None:
    assert asked(priority=gateway_messages.priority_to_wire(priority)).priority is priority


@pytest.mark.parametrize(("tokens", "keys", "fits"), [(100, 6, True), (100, 7, False), (15, 1, False), (0, 0, True)])
def test_a_prompt_has_no_more_keys_than_full_blocks(tokens: int, keys: int, fits: bool) -> None:
    wire = placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=tokens, keys=range(keys))
    fault = gateway_messages.request_fault(wire)
    assert (fault is None) == fits
    assert fits or (fault is not None and fault[0] == "keys")


def test_a_request_has_an_id() -> None:
    fault = gateway_messages.request_fault(placement_pb2.PlacementRequest(model="m"))
    assert fault is not None
    assert fault[0] == "request_id"


@given(st.integers(0, 2_000))
def test_a_snapshots_chunk_in_pieces_has_all_its_keys_in_their_order(count: int) -> None:
    chunk = agent_pb2.SnapshotChunk(tier=agent_pb2.TIER_DEVICE, keys=range(count))
    wire = agent_pb2.ReportRequest(snapshot_chunk=chunk)
    pieces = [key_report_wire.key_message(wire, piece) for piece in range(key_report_wire.pieces(wire))]
    assert all(isinstance(piece, SnapshotChunk) and piece.tier == Tier.DEVICE for piece in pieces)
    assert [key for piece in pieces if isinstance(piece, SnapshotChunk) for key in piece.keys] == list(range(count))
    assert all(isinstance(piece, SnapshotChunk) and len(piece.keys) <= key_report_wire.PIECE_KEYS for piece in pieces)
    assert key_report_wire.pieces(agent_pb2.ReportRequest(load=agent_pb2.Load(healthy=True))) == 1
