"""Chooses instances by the open requests of this gateway, for what no router places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.core.engine_identity import Use, compatible
from pointsman_common.core.vllm_versions import fits_context
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_events import StepAssigned, Target


def least_inflight(
    ids: list[str], inflight: Mapping[str, int], exclude: tuple[str, ...], round_robin: int
) -> str | None:
    """Return the instance with the fewest open requests; None if all are excluded. Among several with the fewest, `round_robin`
    selects one."""
    ready = [instance_id for instance_id in ids if instance_id not in exclude]
    least = min((inflight.get(instance_id, 0) for instance_id in ready), default=0)
    best = [instance_id for instance_id in ready if inflight.get(instance_id, 0) == least]
    return best[round_robin % len(best)] if best else None


def unfit(request: placement_pb2.PlacementRequest, instances: Collection[placement_pb2.InstanceRef]) -> list[str]:
    """Return the instances that a request must not be placed on, as routers exclude them: their context does not hold the prompt,
    while another's does, or they are known to differ from the engines that began the answer."""
    tokens, output = request.longest_prompt_tokens or request.input_tokens, request.max_output_tokens
    contexts = {instance.max_model_len for instance in instances}
    # Gateways know of no versions: an engine that counts the output refuses the request itself.
    too_small = {context for context in contexts if not fits_context(tokens, output, context, counts_output=False)}
    if too_small == contexts:
        too_small = set()
    begun = request.begun_by if request.HasField("begun_by") else None
    return [
        instance.instance_id
        for instance in instances
        if instance.max_model_len in too_small
        or (begun is not None and not compatible(begun, instance.identity, Use.ANSWER))
    ]


def fallbacks(
    step: StepAssigned,
    instances: Iterable[placement_pb2.InstanceRef],
    exclude: Collection[str],
    inflight: Mapping[str, int],
    count: int,
) -> list[Target]:
    """Return `count` instances to which a proxy may send a request that the step's does not answer: the runner-up, then those
    with the fewest open requests.

    None has ranks, since a proxy sends the rank of the first. Instances that only prefill for others answer nobody.
    """
    if step.target.rank is not None:
        return []
    others = [
        instance
        for instance in instances
        if instance.url != step.target.url
        and not instance.HasField("data_parallel_rank")
        and instance.kv_transfer.role != agent_pb2.KV_ROLE_PRODUCER
        and instance.instance_id not in exclude
    ]

    def order(one: placement_pb2.InstanceRef) -> tuple[bool, int, str]:
        return one.instance_id != step.runner_up, inflight.get(one.instance_id, 0), one.instance_id

    return [target_of(instance) for instance in nsmallest(count, others, key=order)]
