"""Between the wire (protobuf) and the domain."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence

from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2
from google.rpc import code_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from services.router import events as ev
from services.router.domain import (
    Candidate,
    Decision,
    Gpu,
    InstanceInfo,
    InstanceState,
    KvTransfer,
    Load,
    Phase,
    PlacementRequest,
    PolicyRef,
    PrefixSource,
    Step,
    StepKind,
)
from services.router.fleet import InstanceRecord, PoolInfo
from services.router.hindsight import Revision, grouped
from services.router.io.decision_log import LoggedDecision
from services.router.ownership import Owner
from services.router.replay import inputs_digest
from services.router.state import RouterState
from services.router.sync import Bookmark, Delta, KeyMessage, SnapshotBegin, SnapshotChunk, SnapshotEnd

STEP_DEADLINE_S = 600.0
MAX_CHANGES = 100


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a protobuf duration; negative ones become 0."""
    nanos = max(int(seconds * 1e9), 0)
    return duration_pb2.Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def seconds(wire: duration_pb2.Duration) -> float:
    """The inverse of `duration`; without the detour over an integer that ToNanoseconds takes."""
    return wire.seconds + wire.nanos / 1e9


def timestamp(unix_s: float) -> timestamp_pb2.Timestamp:
    """Unix seconds as a protobuf timestamp."""
    nanos = int(unix_s * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def _finite(value: float) -> float:
    # The decision log is JSON, which has neither infinity nor NaN; a peer that sends them says nothing.
    return value if math.isfinite(value) else 0.0


# ---- agents ----


def instance_info(wire: agent_pb2.Instance) -> InstanceInfo:
    """An agent's description of an instance."""
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
    )


def key_message(wire: agent_pb2.ReportRequest) -> KeyMessage | None:
    """The message about keys in `wire`, or None when it carries something else."""
    match wire.WhichOneof("kind"):
        case "snapshot_begin":
            return SnapshotBegin(wire.snapshot_begin.seq)
        case "snapshot_chunk":
            return SnapshotChunk(wire.snapshot_chunk.tier, wire.snapshot_chunk.keys)
        case "snapshot_end":
            end = wire.snapshot_end
            return SnapshotEnd(end.seq, end.key_count, end.digest)
        case "delta":
            delta = wire.delta
            return Delta(delta.seq, delta.tier, delta.added, delta.removed, delta.cleared)
        case "bookmark":
            mark = wire.bookmark
            return Bookmark(mark.seq, mark.key_count, mark.digest)
        case _:
            return None


def load(wire: agent_pb2.Load, now: float) -> Load:
    """A load sample received at `now`."""
    return Load(
        sampled_at=now - wire.sample_age_ms / 1e3,
        running=wire.running,
        waiting=wire.waiting,
        kv_usage=_finite(wire.kv_usage),
        generation_tokens=wire.generation_tokens,
        prefix_cache_queries=wire.prefix_cache_queries,
        prefix_cache_hits=wire.prefix_cache_hits,
        external_prefix_cache_queries=wire.external_prefix_cache_queries,
        external_prefix_cache_hits=wire.external_prefix_cache_hits,
        preemptions=wire.preemptions,
        healthy=wire.healthy,
        gpus=tuple(Gpu(gpu.index, gpu.utilisation, gpu.memory_used, gpu.memory_total) for gpu in wire.gpus),
    )


# ---- gateways ----


def _keys(wire: placement_pb2.PlacementRequest) -> array[int]:
    # A packed field is an array of little-endian words already: 20 times faster than one Python int for each key.
    alone = placement_pb2.PlacementRequest()
    alone.keys.MergeFrom(wire.keys)
    keys = array("Q")
    keys.frombytes(alone.SerializeToString()[-8 * len(wire.keys) :] if wire.keys else b"")
    if sys.byteorder != "little":
        keys.byteswap()
    return keys


def placement_request(wire: placement_pb2.PlacementRequest) -> PlacementRequest:
    """A gateway's request."""
    return PlacementRequest(
        request_id=wire.request_id,
        model=wire.model,
        input_tokens=wire.input_tokens,
        keys=_keys(wire),
        tenant=wire.tenant,
        session_id=wire.session_id,
        max_output_tokens=wire.max_output_tokens,
        exclude=tuple(wire.exclude),
        deadline_s=seconds(wire.deadline) if wire.HasField("deadline") else None,
        age_s=max(seconds(wire.age), 0.0) if wire.HasField("age") else 0.0,
    )


def gateway_hello(wire: placement_pb2.GatewayHello) -> ev.GatewayHello:
    """A gateway's hello with the streams it has open."""
    return ev.GatewayHello(
        wire.gateway_id,
        tuple(
            ev.OpenStream(
                placement_request(stream.request),
                stream.instance_id,
                Phase.DECODE if stream.phase == placement_pb2.PHASE_DECODE else Phase.PREFILL,
                stream.cached_tokens,
            )
            for stream in wire.open_streams
        ),
        frozenset(wire.waiting_request_ids),
        frozenset(wire.known_instance_ids),
    )


def finished(wire: placement_pb2.Finished) -> ev.Finished:
    """How a request ended."""
    timings = wire.timings
    return ev.Finished(
        request_id=wire.request_id,
        outcome=placement_pb2.Outcome.Name(wire.outcome).removeprefix("OUTCOME_"),
        prompt_tokens=wire.prompt_tokens if wire.HasField("prompt_tokens") else None,
        cached_tokens=wire.cached_tokens if wire.HasField("cached_tokens") else None,
        output_tokens=wire.output_tokens if wire.HasField("output_tokens") else None,
        error=wire.error,
        http_status=wire.http_status,
        timings_ms={
            "placed": _finite(timings.placed_ms),
            "sent": _finite(timings.sent_ms),
            "first_token": _finite(timings.first_token_ms),
            "done": _finite(timings.done_ms),
        }
        if wire.HasField("timings")
        else None,
    )


def finished_to_wire(done: ev.Finished) -> placement_pb2.Finished:
    """The inverse of `finished`."""
    wire = placement_pb2.Finished(
        request_id=done.request_id,
        outcome=placement_pb2.Outcome.Value(f"OUTCOME_{done.outcome}"),
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        output_tokens=done.output_tokens,
        error=done.error,
        http_status=done.http_status,
    )
    if done.timings_ms is not None:
        wire.timings.CopyFrom(placement_pb2.Timings(**{f"{name}_ms": value for name, value in done.timings_ms.items()}))
    return wire


def instance_ref(info: InstanceInfo) -> placement_pb2.InstanceRef:
    """What a gateway needs to reach an instance."""
    return placement_pb2.InstanceRef(
        instance_id=info.instance_id,
        url=info.url,
        incarnation=info.incarnation,
        data_parallel_rank=info.data_parallel_rank,
        kv_transfer=_kv_to_wire(info.kv_transfer),
    )


def _kv_to_wire(kv: KvTransfer | None) -> agent_pb2.KvTransfer | None:
    if kv is None:
        return None
    protocol = agent_pb2.KvProtocol.Value(f"KV_PROTOCOL_{kv.protocol}")
    return agent_pb2.KvTransfer(protocol=protocol, bootstrap_url=kv.bootstrap_url)


def _kv_transfer(wire: agent_pb2.Instance) -> KvTransfer | None:
    # A protocol of a later version is one that this router cannot plan for.
    kv = wire.kv_transfer
    if not kv.protocol or kv.protocol not in agent_pb2.KvProtocol.values():
        return None
    return KvTransfer(agent_pb2.KvProtocol.Name(kv.protocol).removeprefix("KV_PROTOCOL_"), kv.bootstrap_url)


def _ref(state: RouterState, instance_id: str) -> placement_pb2.InstanceRef:
    record = state.fleet.get(instance_id)
    return instance_ref(record.info) if record else placement_pb2.InstanceRef(instance_id=instance_id)


_KINDS = {kind: placement_pb2.StepKind.Value(f"STEP_KIND_{kind}") for kind in StepKind}
_STEP_DEADLINE = duration(STEP_DEADLINE_S)


def step_to_wire(state: RouterState, plan: Sequence[Step], index: int) -> placement_pb2.Step:
    """A step of a plan with the addresses that its instances have now."""
    step = plan[index]
    wire = placement_pb2.Step(
        index=index,
        kind=_KINDS[step.kind],
        instance=_ref(state, step.instance_id),
        prefix_tokens=step.prefix_tokens,
        reason=step.reason,
        deadline=_STEP_DEADLINE,
    )
    if step.kv_source:
        wire.kv_source.CopyFrom(_ref(state, step.kv_source))
    follows = plan[index + 1] if index + 1 < len(plan) else None
    if follows is not None and follows.kv_source == step.instance_id:
        wire.kv_target.CopyFrom(_ref(state, follows.instance_id))
    return wire


def placement_to_wire(state: RouterState, placed: ev.Placed) -> placement_pb2.Placement:
    """A request's next step."""
    return placement_pb2.Placement(
        request_id=placed.request_id,
        decision_id=placed.decision.decision_id,
        step=step_to_wire(state, placed.decision.ruling.steps, placed.step_index),
        last=placed.last,
        cached_tokens=placed.decision.cached_tokens,
        degraded=placed.decision.degraded,
    )


def refusal_to_wire(refused: ev.Refused, owner: Owner | None) -> placement_pb2.Refusal:
    """Why a request is not placed, for its gateway, and the `owner` to ask instead."""
    retry = refused.retry_after_s
    return placement_pb2.Refusal(
        request_id=refused.request_id,
        code=int(code_pb2.Code.Value(refused.code)),
        message=refused.message,
        retry_after=None if retry is None else duration(retry),
        owner=owner_to_wire(owner),
        not_now=refused.not_now,
    )


def owner_to_wire(owner: Owner | None) -> placement_pb2.Owner | None:
    """A pool's owner; None when nobody owns it."""
    if owner is None:
        return None
    return placement_pb2.Owner(router_id=owner.router_id, address=owner.address, epoch=owner.epoch)


def fleet_to_wire(
    pools: list[PoolInfo], owner: Callable[[str], Owner | None], *, warming: bool, owner_within_s: float
) -> placement_pb2.Fleet:
    """The pools for gateways, each with its owner."""
    return placement_pb2.Fleet(
        warming=warming,
        owner_within=duration(owner_within_s),
        pools=[
            placement_pb2.Pool(
                model=pool.model,
                served_names=pool.served_names,
                lora_names=pool.lora_names,
                model_root=pool.model_root,
                max_model_len=pool.max_model_len,
                instances=[instance_ref(info) for info in pool.instances],
                owner=owner_to_wire(owner(pool.model)),
            )
            for pool in pools
        ],
    )


# ---- operators ----


def policy_to_wire(ref: PolicyRef) -> fleet_pb2.Policy:
    """A policy's name and settings."""
    settings = struct_pb2.Struct()
    settings.update(dict(ref.settings))
    return fleet_pb2.Policy(name=ref.name, settings=settings)


def policy_settings(wire: struct_pb2.Struct) -> dict[str, object]:
    """Settings as they were sent; None for what no setting can be (null, a list, a message)."""
    scalars = ("number_value", "string_value", "bool_value")
    kinds = {name: value.WhichOneof("kind") for name, value in wire.fields.items()}
    return {name: getattr(wire.fields[name], kind) if kind in scalars else None for name, kind in kinds.items()}


def what_if_to_wire(made_again: Sequence[Revision]) -> fleet_pb2.WhatIfResponse:
    """What another policy would have changed, in all, by class and reason, and one by one."""
    changed = [one for one in made_again if one.changed]
    return fleet_pb2.WhatIfResponse(
        decided=len(made_again),
        changed=len(changed),
        held=sum(not one.would.ruling.steps for one in changed),
        cached_tokens_change=sum(one.cached_tokens_change for one in made_again),
        groups=[
            fleet_pb2.WhatIfResponse.Group(
                route_class=group.route_class,
                reason=group.reason,
                decided=group.decided,
                changed=group.changed,
                cached_tokens_change=group.cached_tokens_change,
            )
            for group in grouped(made_again)
        ],
        changes=[
            fleet_pb2.WhatIfResponse.Change(
                decision_id=one.was.decision_id,
                from_instance_id=one.was.instance_id,
                to_instance_id=one.would.instance_id,
                cached_tokens_change=one.would.cached_tokens - one.was.cached_tokens,
                reason=one.would.ruling.reason,
                from_mode=one.was.mode,
                to_mode=one.would.mode,
                to_prefill_instance_id=_prefills_elsewhere(one.would),
            )
            for one in changed[:MAX_CHANGES]
        ],
    )


def _prefills_elsewhere(decision: Decision) -> str:
    first = decision.ruling.steps[0].instance_id if decision.ruling.steps else ""
    return first if first != decision.instance_id else ""


def state_to_wire(state: InstanceState) -> fleet_pb2.InstanceState.ValueType:
    """An instance's state."""
    return fleet_pb2.InstanceState.Value(f"INSTANCE_STATE_{state}")


def _source(source: PrefixSource) -> fleet_pb2.PrefixSource.ValueType:
    return fleet_pb2.PrefixSource.Value(f"PREFIX_SOURCE_{source}")


def instance_status(state: RouterState, record: InstanceRecord, now: float) -> fleet_pb2.InstanceStatus:
    """An instance as the router sees it at `now`."""
    info, counters = record.info, state.reservations.counters(record.info.instance_id)
    wire = fleet_pb2.InstanceStatus(
        instance=agent_pb2.Instance(
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
            kv_transfer=_kv_to_wire(info.kv_transfer),
        ),
        state=state_to_wire(record.state),
        circuit_open=bool(record.circuit.opened),
        num_requests=counters.num_requests,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        ongoing_decode_tokens=counters.ongoing_decode_tokens,
        ongoing_tokens=counters.ongoing_tokens,
        keys=state.index.count(info.instance_id),
        report_age=duration(now - record.heard_at),
        sessions=state.affinity.sessions_of(info.instance_id),
        prefix_source=_source(state.truth.source(record, now)),
        prefix_reason=record.prefix_reason,
        believed_keys=state.truth.approximate.count(info.instance_id),
        credited_keys=state.truth.credit.count(info.instance_id),
        distrusts=record.trust.distrusts,
    )
    if (sample := record.load) is not None:
        wire.load.CopyFrom(
            agent_pb2.Load(
                sample_age_ms=max(int((now - sample.sampled_at) * 1e3), 0),
                running=sample.running,
                waiting=sample.waiting,
                kv_usage=sample.kv_usage,
                generation_tokens=sample.generation_tokens,
                prefix_cache_queries=sample.prefix_cache_queries,
                prefix_cache_hits=sample.prefix_cache_hits,
                external_prefix_cache_queries=sample.external_prefix_cache_queries,
                external_prefix_cache_hits=sample.external_prefix_cache_hits,
                preemptions=sample.preemptions,
                healthy=sample.healthy,
                gpus=[
                    agent_pb2.Gpu(
                        index=gpu.index,
                        utilisation=gpu.utilisation,
                        memory_used=gpu.memory_used,
                        memory_total=gpu.memory_total,
                    )
                    for gpu in sample.gpus
                ],
            )
        )
    return wire


def _candidate(candidate: Candidate, age_s: float | None, score: float | None) -> fleet_pb2.Candidate:
    return fleet_pb2.Candidate(
        instance_id=candidate.instance_id,
        incarnation=candidate.incarnation,
        state=state_to_wire(candidate.state),
        cached_tokens=candidate.cached_tokens,
        new_tokens=candidate.new_tokens,
        num_requests=candidate.num_requests,
        pending_prefill_tokens=candidate.pending_prefill_tokens,
        ongoing_decode_tokens=candidate.ongoing_decode_tokens,
        ongoing_tokens=candidate.ongoing_tokens,
        running=candidate.running,
        waiting=candidate.waiting,
        kv_usage=candidate.kv_usage,
        report_age=None if age_s is None else duration(age_s),
        score=score,
        excluded=candidate.excluded,
        exact=candidate.exact,
        recent_migrations=candidate.recent_migrations,
        kv_capacity_tokens=candidate.kv_capacity_tokens,
        stale=candidate.stale,
        credited_tokens=candidate.credited_tokens,
        prefix_source=_source(candidate.prefix_source),
    )


def decision_to_wire(state: RouterState, logged: LoggedDecision, *, candidates: bool = True) -> fleet_pb2.Decision:
    """A logged decision, with or without its candidates."""
    decision = logged.decision
    request, ruling = decision.request, decision.ruling
    wire = fleet_pb2.Decision(
        decision_id=decision.decision_id,
        request_id=request.request_id,
        time=timestamp(logged.unix_s),
        policy=policy_to_wire(decision.policy),
        model=decision.pool,
        tenant=request.tenant,
        session_id=request.session_id,
        input_tokens=request.input_tokens,
        key_count=decision.key_count,
        route_class=decision.route_class,
        mode=decision.mode,
        reason=ruling.reason,
        steps=[step_to_wire(state, ruling.steps, index) for index in range(len(ruling.steps))],
        cached_tokens=decision.cached_tokens,
        session_owner=decision.view.session_owner,
        runner_up=decision.runner_up,
        margin=decision.margin,
        inputs_digest=inputs_digest(decision),
        degraded=decision.degraded,
        outcome=logged.outcome,
        decide_time=duration(logged.decide_s),
        held=duration(decision.held_s),
        notes=decision.notes,
        figures=ruling.figures,
        next_owner=decision.next_owner if request.session else "",
    )
    if candidates:
        view = decision.view
        wire.candidates.extend(
            _candidate(one, view.report_age_s(one), ruling.scores.get(one.instance_id)) for one in view.candidates
        )
    if logged.finished is not None:
        wire.finished.CopyFrom(finished_to_wire(logged.finished))
    return wire
