"""What goes over the wire and back is the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.types import Gpu, InstanceInfo, KvRole, KvTransfer, Load
from pointsman.router.io.convert import agent_messages, gateway_messages
from pointsman.router.io.convert.times import duration, seconds
from pointsman.router.v1 import placement_pb2

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
    kv_transfer=st.none()
    | st.builds(
        KvTransfer,
        protocol=st.sampled_from(["MOONCAKE", "NIXL"]),
        bootstrap_url=words,
        role=st.sampled_from(KvRole),
        cache_dtype=words,
        layerwise=st.booleans(),
    ),
)
gpus = st.builds(Gpu, index=counts, utilisation=st.floats(0, 1, width=32), memory_used=counts, memory_total=counts)
loads = st.builds(
    Load,
    sampled_at=st.just(7.0),
    running=counts,
    waiting=counts,
    kv_usage=st.floats(0, 1, width=32),
    generation_tokens=counts,
    prefix_cache_queries=counts,
    prefix_cache_hits=counts,
    external_prefix_cache_queries=counts,
    external_prefix_cache_hits=counts,
    preemptions=counts,
    healthy=st.booleans(),
    gpus=st.lists(gpus, max_size=2).map(tuple),
)
timings = st.fixed_dictionaries(
    {name: st.floats(0, 1e6, width=32) for name in ("placed", "sent", "first_token", "done")}
)
ends = st.builds(
    ev.Finished,
    request_id=words,
    outcome=st.sampled_from(["OK", "CANCELLED", "REJECTED", "FAILED"]),
    prompt_tokens=st.none() | counts,
    cached_tokens=st.none() | counts,
    output_tokens=st.none() | counts,
    error=words,
    http_status=st.integers(0, 599),
    timings_ms=st.none() | timings,
)


@given(instances)
def test_an_instance_comes_back(info: InstanceInfo) -> None:
    assert agent_messages.instance_info(agent_messages.instance_to_wire(info)) == info


@given(loads)
def test_a_load_comes_back(load: Load) -> None:
    assert agent_messages.load(agent_messages.load_to_wire(load, 7.0), 7.0) == load


@given(ends)
def test_an_end_comes_back(done: ev.Finished) -> None:
    assert gateway_messages.finished(gateway_messages.finished_to_wire(done)) == done


@given(st.floats(0, 1e9))
def test_a_duration_comes_back_to_the_nanosecond(value: float) -> None:
    assert abs(seconds(duration(value)) - value) < max(1e-9, value * 1e-15) * 1.01


@pytest.mark.parametrize("outcome", [placement_pb2.OUTCOME_UNSPECIFIED, 99])
def test_an_outcome_that_nobody_knows_is_a_failure(outcome: int) -> None:
    """What a newer gateway says must not end its stream."""
    wire = placement_pb2.Finished(request_id="r")
    wire.outcome = outcome  # type: ignore[assignment]
    sent = placement_pb2.Finished.FromString(wire.SerializeToString())
    assert gateway_messages.finished(sent).outcome == "FAILED"
