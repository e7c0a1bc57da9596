"""The instances that a gateway does not place on itself, and that it lets no answer go on at."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity
from pointsman_common.core.vllm_versions import fits_context
from pointsman_gateway.core.pool_state import PoolState
from pointsman_gateway.core.request import local_placement
from pointsman_gateway.core.request.local_placement import unfit
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_context import RequestContext

HALF, BRAIN = (agent_pb2.EngineIdentity(dtype=dtype) for dtype in ("float16", "bfloat16"))


def ref(name: str, **fields: Any) -> placement_pb2.InstanceRef:
    return placement_pb2.InstanceRef(instance_id=name, url=f"http://{name}", incarnation="1", **fields)


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        ({"input_tokens": 100}, []),
        ({"input_tokens": 5_000}, ["small"]),
        ({"input_tokens": 4_096}, ["small"]),
        ({"input_tokens": 100, "max_output_tokens": 4_096}, []),
        ({"input_tokens": 100, "max_output_tokens": 5_000}, ["small"]),
        ({"input_tokens": 5_000, "longest_prompt_tokens": 100}, []),
        ({"input_tokens": 100, "begun_by": BRAIN}, ["large"]),
        ({"input_tokens": 5_000, "begun_by": HALF}, ["small"]),
    ],
)
def test_what_no_router_would_place_there(request_: dict[str, Any], found: list[str]) -> None:
    instances = [ref("large", max_model_len=32_768, identity=HALF), ref("small", max_model_len=4_096, identity=BRAIN)]
    assert unfit(placement_pb2.PlacementRequest(**request_), instances) == found


def test_a_prompt_that_none_holds_goes_to_any() -> None:
    asked = placement_pb2.PlacementRequest(input_tokens=5_000)
    assert unfit(asked, [ref("a", max_model_len=4_096), ref("b", max_model_len=2_048)]) == []
    assert unfit(asked, [ref("a", max_model_len=4_096), ref("b")]) == ["a"]


def test_the_instances_of_a_large_pool_are_not_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = mock.Mock(wraps=fits_context)
    monkeypatch.setattr(local_placement, "fits_context", judged)
    instances = [ref(f"i{at}", max_model_len=4_096 if at % 2 else 32_768) for at in range(1_000)]
    for _ in range(100):
        assert len(unfit(placement_pb2.PlacementRequest(input_tokens=5_000), instances)) == 500
    assert judged.call_count == 200


def context() -> Any:
    made: Any = object.__new__(RequestContext)
    made.state = PoolState(placement_pb2.Pool(model="m"))
    made.answered_by, made.answered_exactly = UNKNOWN_IDENTITY, None
    return made


def test_an_engine_that_is_known_to_differ_does_not_go_on() -> None:
    asked = context()
    asked.answer_begun(target_of(ref("a", identity=HALF)))
    assert asked.answered_by == EngineIdentity(dtype="float16")
    assert not asked.may_go_on(target_of(ref("b", identity=BRAIN)))
    assert asked.may_go_on(target_of(ref("b", identity=HALF)))
    assert asked.may_go_on(target_of(ref("b")))


@pytest.mark.parametrize(("differs", "may"), [("neither", True), ("first", False), ("second", False), ("both", True)])
def test_an_engine_whose_tokens_were_compared_does_not_get_those_of_another(differs: str, may: bool) -> None:
    asked = context()
    for name, is_first in (("a", True), ("b", False)):
        one_differs = differs in ("both", "first" if is_first else "second")
        (asked.state.differed if one_differs else asked.state.verified).add((f"http://{name}", "1"))
    asked.answer_begun(target_of(ref("a")))
    # It is known no longer once the instance is gone.
    asked.state.verified.discard(("http://a", "1"))
    assert asked.may_go_on(target_of(ref("b"))) is may
