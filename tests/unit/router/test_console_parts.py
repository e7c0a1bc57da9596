"""The console's parts that need no router: JSON in pieces, viewers' queues, sessions by their last use, policies in words."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.io.console.console import _names_loopback
from pointsman_router.io.console.decision_stream import NOTHING, WAITING, Viewer
from pointsman_router.io.console.json_text import json_chunks
from pointsman_router.io.convert.operator_messages import policy_description

PAGE = Path(__file__).resolve().parents[3] / "services/router/pointsman_router/io/console/page"

SERIES = fleet_pb2.PoolSeries(measure=fleet_pb2.POOL_MEASURE_TTFT_P50, values=[0.1235, math.nan, 0.0])
TWO_OK = fleet_pb2.SummarizeDecisionsResponse.OutcomeCount(outcome=fleet_pb2.DECISION_OUTCOME_OK, decided=2)


def decision(candidates: int) -> fleet_pb2.Decision:
    wire = fleet_pb2.Decision(
        decision_id='<b>"d"</b>',
        figures={"gain_s": 0.5},
        notes=["a", "b"],
        steps=[placement_pb2.Step(kind=placement_pb2.STEP_KIND_SERVE, instance=placement_pb2.InstanceRef(url="u"))],
        candidates=[fleet_pb2.Candidate(instance_id=f"i{number}", score=0.0) for number in range(candidates)],
    )
    wire.policy.settings.update({"alpha": 1.0, "on": True})
    wire.time.FromJsonString("2026-01-02T03:04:05.000678Z")
    return wire


@pytest.mark.parametrize(
    "message",
    [
        fleet_pb2.ListInstancesResponse(),
        fleet_pb2.ListInstancesResponse(instances=[fleet_pb2.InstanceStatus()]),
        fleet_pb2.ListInstancesResponse(
            instances=[fleet_pb2.InstanceStatus(load=agent_pb2.Load(gpus=[agent_pb2.Gpu(), agent_pb2.Gpu(index=1)]))]
            * 3,
            router_id="r",
        ),
        fleet_pb2.GetDecisionResponse(decision=decision(3)),
        fleet_pb2.GetDecisionResponse(decision=decision(0)),
        fleet_pb2.ListDecisionsResponse(decisions=[decision(0), decision(2)]),
        fleet_pb2.ListPoolHistoriesResponse(
            pools=[fleet_pb2.PoolHistory(model="m", series=[SERIES, SERIES])],
            total=fleet_pb2.PoolHistory(series=[SERIES]),
        ),
        fleet_pb2.SummarizeDecisionsResponse(groups=[fleet_pb2.SummarizeDecisionsResponse.Group(outcomes=[TWO_OK])]),
    ],
)
def test_the_pieces_are_protobufs_json(message: Message) -> None:
    assert json.loads("".join(json_chunks(message))) == json_format.MessageToDict(message)


def test_no_piece_is_long() -> None:
    message = fleet_pb2.GetDecisionResponse(decision=decision(500))
    assert len(list(json_chunks(message))) > 500


async def test_a_viewer_gets_what_waits_and_a_word_when_nothing_does() -> None:
    viewer = Viewer(lambda: None)
    assert await viewer.next(0.001) == NOTHING
    viewer.tell("a")
    viewer.tell("b")
    assert await viewer.next(60.0) == "ab"
    waiting = asyncio.ensure_future(viewer.next(60.0))
    await asyncio.sleep(0)
    viewer.tell("c")
    assert await waiting == "c"


async def test_a_viewer_that_leaves_as_news_comes_is_gone() -> None:
    viewer = Viewer(lambda: None)
    waiting = asyncio.ensure_future(viewer.next(60.0))
    await asyncio.sleep(0)
    viewer.tell("a")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_a_slow_viewer_is_dropped_once_its_queue_is_full() -> None:
    dropped: list[bool] = []
    viewer = Viewer(lambda: dropped.append(True))
    for _ in range(WAITING):
        viewer.tell("x")
    assert not viewer.dropped
    viewer.tell("x")
    assert (viewer.dropped, dropped, await viewer.next(60.0)) == (True, [True], "")


def test_sessions_are_listed_by_their_last_use() -> None:
    affinity = Affinity(ttl_s=10.0)
    affinity.assign("m", "t/old", "a", 0.0)
    affinity.assign("m", "t/s", "a", 2.0)
    affinity.assign("m", "t/r", "b", 3.0)
    affinity.assign("m", "t/s", "b", 5.0)
    assert list(affinity.newest(11.0)) == [("m", "t/s", "b", 5.0), ("m", "t/r", "b", 3.0)]


def test_policies_are_described_in_a_sentence_with_all_their_settings() -> None:
    for name, kind in POLICIES.items():
        described = policy_description(kind)
        assert described.name == name
        assert described.summary.endswith(".")
        assert "\n" not in described.summary
        for setting in described.settings:
            assert setting.default_value.WhichOneof("kind") in ("number_value", "string_value", "bool_value")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost:80", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:8080", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:80", False),
        ("10.0.0.1:80", False),
        ("", False),
    ],
)
def test_only_names_of_this_machine_are_its_own(host: str, local: bool) -> None:
    assert _names_loopback(host) is local


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("c", fleet_pb2.Candidate),
        ("change", fleet_pb2.WhatIfResponse.Change),
        ("d", fleet_pb2.Decision),
        ("decision", fleet_pb2.Decision),
        ("done", placement_pb2.Finished),
        ("gpu", agent_pb2.Gpu),
        ("group", fleet_pb2.SummarizeDecisionsResponse.Group),
        ("instance", agent_pb2.Instance),
        ("load", agent_pb2.Load),
        ("kvLoad", fleet_pb2.KvLoad),
        ("router", fleet_pb2.RouterStatus),
        ("status", fleet_pb2.InstanceStatus),
        ("step", placement_pb2.Step),
        ("taken", fleet_pb2.PolicyChange),
        ("timings", placement_pb2.Timings),
    ],
)
def test_the_page_reads_only_fields_that_there_are(variable: str, message: type[Message]) -> None:
    """A field that was renamed shows as missing in JavaScript, without an error."""
    script = "\n".join(path.read_text() for path in sorted(PAGE.glob("*.js")))
    read = set(re.findall(rf"(?<![.\w]){variable}\??\.(\w+)", script))
    assert read, "no script reads this variable: put the new variable of this message here"
    assert read <= {field.json_name for field in message.DESCRIPTOR.fields}
