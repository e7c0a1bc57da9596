"""Conversions of agents' messages: instances, load."""

from __future__ import annotations

import math

from msgspec.structs import asdict

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core.engine_identity_wire import identity_of, identity_to_wire
from pointsman_common.core.load_age import age_ms
from pointsman_common.core.printable import printable
from pointsman_router.core.instances.absent_engines import AbsentEngine
from pointsman_router.core.placement_types import (
    FIGURES,
    Gpu,
    InstanceInfo,
    KvRole,
    KvTransfer,
    Load,
    StepTotals,
    WrongKv,
)
from pointsman_router.io.convert.times import finite

# Maximum number of senders of wrong KV that are kept of one instance.
MAX_WRONG_SENDERS = 1000
# Maximum length of a problem's text that is kept, in characters.
MAX_PROBLEM = 500
_KV_ROLES = {
    KvRole.BOTH: agent_pb2.KV_ROLE_UNSPECIFIED,
    KvRole.PRODUCER: agent_pb2.KV_ROLE_PRODUCER,
    KvRole.CONSUMER: agent_pb2.KV_ROLE_CONSUMER,
}


def instance_info(wire: agent_pb2.Instance) -> InstanceInfo:
    """Return an agent's description of an instance."""
    return InstanceInfo(
        instance_id=wire.instance_id,
        incarnation=wire.incarnation,
        url=wire.url,
        model=wire.model,
        served_names=tuple(wire.served_names),
        lora_names=tuple(wire.lora_names),
        model_root=wire.model_root,
        block_size=wire.block_size,
        kv_capacity_tokens=wire.kv_capacity_tokens,
        max_model_len=wire.max_model_len,
        data_parallel_rank=wire.data_parallel_rank if wire.HasField("data_parallel_rank") else None,
        exact_prefix=wire.prefix_mode == agent_pb2.PREFIX_MODE_EXACT,
        prefix_reason=wire.prefix_reason,
        engine_version=wire.engine_version,
        node=wire.node,
        kv_transfer=_kv_transfer(wire),
        hardware=wire.hardware,
        long_prefill_token_threshold=wire.long_prefill_token_threshold,
        sparse_prefixes=wire.sparse_prefixes,
        events_unusable=wire.events_unusable,
        shared_storage=wire.shared_storage,
        kv_token_bytes=wire.kv_token_bytes,
        identity=identity_of(wire.identity),
        max_num_seqs=wire.max_num_seqs,
        uncertain_blocks=wire.uncertain_blocks,
    )


def instance_to_wire(info: InstanceInfo) -> agent_pb2.Instance:
    """The inverse of `instance_info`."""
    return agent_pb2.Instance(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        url=info.url,
        model=info.model,
        served_names=info.served_names,
        lora_names=info.lora_names,
        model_root=info.model_root,
        block_size=info.block_size,
        kv_capacity_tokens=info.kv_capacity_tokens,
        max_model_len=info.max_model_len,
        data_parallel_rank=info.data_parallel_rank,
        prefix_mode=agent_pb2.PREFIX_MODE_EXACT if info.exact_prefix else agent_pb2.PREFIX_MODE_NONE,
        prefix_reason=info.prefix_reason,
        engine_version=info.engine_version,
        node=info.node,
        kv_transfer=kv_to_wire(info.kv_transfer),
        hardware=info.hardware,
        long_prefill_token_threshold=info.long_prefill_token_threshold,
        sparse_prefixes=info.sparse_prefixes,
        events_unusable=info.events_unusable,
        shared_storage=info.shared_storage,
        kv_token_bytes=info.kv_token_bytes,
        identity=identity_to_wire(info.identity),
        max_num_seqs=info.max_num_seqs,
        uncertain_blocks=info.uncertain_blocks,
    )


def kv_to_wire(kv: KvTransfer | None) -> agent_pb2.KvTransfer | None:
    """Convert how an instance transfers KV; None if it does not."""
    if kv is None:
        return None
    protocol = agent_pb2.KvProtocol.Value(f"KV_PROTOCOL_{kv.protocol}")
    return agent_pb2.KvTransfer(
        protocol=protocol,
        bootstrap_url=kv.bootstrap_url,
        role=_KV_ROLES[kv.role],
        cache_dtype=kv.cache_dtype,
        layerwise=kv.layerwise,
        wrong_from=[agent_pb2.WrongKv(**asdict(sender)) for sender in kv.wrong_from],
        engine_id=kv.engine_id,
    )


def _kv_transfer(wire: agent_pb2.Instance) -> KvTransfer | None:
    # None for a protocol or role of a newer version, since this router cannot plan for it.
    kv = wire.kv_transfer
    if not kv.protocol or kv.protocol not in agent_pb2.KvProtocol.values():
        return None
    protocol = agent_pb2.KvProtocol.Name(kv.protocol).removeprefix("KV_PROTOCOL_")
    role = next((role for role, number in _KV_ROLES.items() if number == kv.role), None)
    if role is None:
        return None
    wrong_from = tuple(
        WrongKv(sender.bootstrap_url, sender.engine_id, sender.requests) for sender in kv.wrong_from[:MAX_WRONG_SENDERS]
    )
    return KvTransfer(protocol, kv.bootstrap_url, role, kv.cache_dtype, kv.layerwise, wrong_from, kv.engine_id)


def absent_engine(wire: agent_pb2.AbsentEngine) -> AbsentEngine:
    """Return an agent's description of an engine without an instance."""
    return AbsentEngine(
        *(printable(text[:MAX_PROBLEM]) for text in (wire.instance_id, wire.url, wire.problem, wire.node))
    )


def load(wire: agent_pb2.Load, now: float) -> Load:
    """Convert a load sample received at `now`, monotonic s."""
    # The decision log is JSON, which has neither infinity nor NaN.
    unknown = {*wire.unknown, *(() if math.isfinite(wire.kv_usage) else ("kv_usage",))}
    return Load(
        sampled_at=now - wire.sample_age_ms / 1e3,
        **{name: None if name in unknown else getattr(wire, name) for name in FIGURES},
        healthy=wire.healthy,
        suspended=wire.suspended,
        gpus=tuple(Gpu(gpu.index, gpu.utilisation, gpu.memory_used, gpu.memory_total) for gpu in wire.gpus),
        prefill_tokens_left=wire.prefill_tokens_left if wire.HasField("prefill_tokens_left") else None,
        steps=_step_totals(wire.steps) if wire.HasField("steps") else None,
        problem=wire.problem,
        events_problem=wire.events_problem[:MAX_PROBLEM],
    )


def _step_totals(wire: agent_pb2.StepTotals) -> StepTotals:
    return StepTotals(
        steps=wire.steps,
        seconds=finite(wire.seconds),
        decode_tokens=wire.decode_tokens,
        prefill_tokens=wire.prefill_tokens,
        prefill_pairs=wire.prefill_pairs,
        prefills=wire.prefills,
        prefill_seconds=finite(wire.prefill_seconds),
    )


def load_to_wire(sample: Load, now: float) -> agent_pb2.Load:
    """The inverse of `load`."""
    return agent_pb2.Load(
        sample_age_ms=age_ms(sample.sampled_at, now),
        **{name: getattr(sample, name) for name in FIGURES},
        unknown=sample.unknown,
        problem=sample.problem,
        healthy=sample.healthy,
        suspended=sample.suspended,
        gpus=[
            agent_pb2.Gpu(
                index=gpu.index,
                utilisation=gpu.utilisation,
                memory_used=gpu.memory_used,
                memory_total=gpu.memory_total,
            )
            for gpu in sample.gpus
        ],
        prefill_tokens_left=sample.prefill_tokens_left,
        steps=None if sample.steps is None else agent_pb2.StepTotals(**asdict(sample.steps)),
        events_problem=sample.events_problem,
    )
