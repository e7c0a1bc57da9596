"""Words of enums, and that those of the router's core all have a value."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.enum_words import values, word
from pointsman_router.core.events_and_effects import UNKNOWN
from pointsman_router.core.placement_types import route_class
from pointsman_router.io.telemetry.decision_log import DRY_RUN, OPEN


def test_words_have_no_prefix() -> None:
    assert values(fleet_pb2.RouteClass) == {"": 0, "LIGHT": 1, "MEDIUM": 2, "HEAVY": 3}
    assert [word(fleet_pb2.PlacementMode, value) for value in (0, 2, 99)] == ["", "OFFLOAD", "99"]


def test_the_cores_words_have_values() -> None:
    assert {route_class(new, 20_001) for new in (1_000, 19_999, 20_001)} == set(values(fleet_pb2.RouteClass)) - {""}
    ends = set(values(placement_pb2.Outcome)) - {""}
    assert ends | {OPEN, DRY_RUN, UNKNOWN} == set(values(fleet_pb2.DecisionOutcome)) - {""}


@pytest.mark.parametrize("kind", [fleet_pb2.RouteClass, fleet_pb2.PlacementMode, fleet_pb2.DecisionOutcome])
def test_zero_is_unspecified(kind: Any) -> None:
    assert kind.Name(0).endswith("_UNSPECIFIED")
