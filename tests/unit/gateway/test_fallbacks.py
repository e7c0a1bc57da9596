"""The instances that a proxy is given besides the chosen one."""

from __future__ import annotations

from dataclasses import replace

from pointsman.gateway.core.request.local_placement import fallbacks
from pointsman.gateway.core.request.placement_messages import target_of
from pointsman.gateway.core.request.request_events import StepAssigned
from pointsman.router.v1 import placement_pb2


def test_the_runner_up_and_the_emptiest_of_other_servers() -> None:
    refs = [
        placement_pb2.InstanceRef(instance_id=name, url=f"http://{name[0]}")
        for name in ("a/0", "a/1", "b", "c", "d", "e")
    ]
    load = {"b": 3, "c": 1, "d": 0, "e": 2}
    step = StepAssigned("r", target_of(refs[0]))
    assert [one.instance_id for one in fallbacks(step, refs, ["d"], load, 2)] == ["c", "e"]
    assert [one.instance_id for one in fallbacks(replace(step, runner_up="b"), refs, ["d"], load, 2)] == ["b", "c"]
    assert [one.instance_id for one in fallbacks(replace(step, runner_up="d"), refs, ["d"], load, 2)] == ["c", "e"]
    assert fallbacks(replace(step, runner_up="a/1"), refs[:2], [], {}, 2) == []
    assert [one.instance_id for one in fallbacks(step, refs, [], load, 9)] == ["d", "c", "e", "b"]
