"""The instances that a proxy is given besides the chosen one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.request.local_placement import fallbacks
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_events import StepAssigned


def ref(name: str, **fields: Any) -> placement_pb2.InstanceRef:
    return placement_pb2.InstanceRef(instance_id=name, url=f"http://{name[0]}", **fields)


REFS = [ref(name) for name in "abcde"]
LOAD = {"b": 3, "c": 1, "d": 0, "e": 2}


def names(step: StepAssigned, refs: list[placement_pb2.InstanceRef], exclude: set[str], count: int = 2) -> list[str]:
    return [fallback.instance_id for fallback in fallbacks(step, refs, exclude, LOAD, count)]


def test_the_runner_up_and_the_emptiest_of_other_servers() -> None:
    step = StepAssigned("r", target_of(REFS[0]))
    assert names(step, REFS, {"d"}) == ["c", "e"]
    assert names(replace(step, runner_up="b"), REFS, {"d"}) == ["b", "c"]
    assert names(replace(step, runner_up="d"), REFS, {"d"}) == ["c", "e"]
    assert names(step, REFS[:1], set()) == []
    assert names(step, REFS, set(), 9) == ["d", "c", "e", "b"]


def test_no_instance_that_takes_a_rank_or_answers_nobody() -> None:
    ranks = [ref("x/0", data_parallel_rank=0), ref("x/1", data_parallel_rank=1)]
    prefills = ref("p", kv_transfer=agent_pb2.KvTransfer(role=agent_pb2.KV_ROLE_PRODUCER))
    step = StepAssigned("r", target_of(REFS[0]))
    assert names(step, [*REFS[:2], *ranks, prefills], set(), 9) == ["b"]
    assert names(StepAssigned("r", target_of(ranks[0])), [*REFS, *ranks], set()) == []
