"""Endpoints as a proxy names them. The cases of subsets are those of the reference picker's handler tests, and some more."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from pointsman_gateway.core.ext_proc.endpoints import (
    served_endpoint,
    subset_of,
    target_at,
)
from pointsman_gateway.core.request.request_events import Target

NAMESPACE, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
PODS = [("10.0.0.1", 8080), ("10.0.0.2", 8080), ("10.0.0.3", 8080)]
PODS_OF_PORTS = [("10.0.0.1", 8080), ("10.0.0.1", 9090), ("10.0.0.2", 8080), ("10.0.0.2", 9090)]


def metadata(namespace: str, **values: Any) -> dict[str, Struct]:
    found = Struct()
    found.update({name.replace("_", "-"): value for name, value in values.items()})
    return {namespace: found}


def subset(value: Any) -> dict[str, Struct]:
    return metadata(NAMESPACE, **{KEY: value})


@pytest.mark.parametrize(
    ("filter_metadata", "pods", "candidates"),
    [
        pytest.param({}, PODS, PODS, id="no metadata"),
        pytest.param(metadata(NAMESPACE, another="value"), PODS, PODS, id="the namespace without the key"),
        pytest.param(metadata("envoy.lb", **{KEY: ["10.0.0.3:8080"]}), PODS, PODS, id="another namespace"),
        pytest.param(subset(["10.0.0.3:8080"]), PODS, PODS[2:], id="a list"),
        pytest.param(subset("10.0.0.2:8080,10.0.0.3:8080"), PODS, PODS[1:], id="text"),
        pytest.param(subset("  10.0.0.2:8080 ,  ,  10.0.0.3:8080  "), PODS, PODS[1:], id="text with blanks"),
        pytest.param(subset(["10.0.0.2:8080, 10.0.0.3:8080"]), PODS, PODS[1:], id="text in a list"),
        pytest.param(subset([]), PODS, [], id="an empty list"),
        pytest.param(subset(""), PODS, [], id="empty text"),
        pytest.param(subset("192.168.1.1:8080"), PODS, [], id="no match"),
        pytest.param(subset(7), PODS, [], id="a number"),
        pytest.param(subset([{"a": "10.0.0.1:8080"}, None]), PODS, [], id="a list of other values"),
        pytest.param(subset({"10.0.0.1:8080": True}), PODS, [], id="an object"),
        pytest.param(subset("10.0.0.1:8080"), PODS_OF_PORTS, PODS_OF_PORTS[:1], id="one port"),
        pytest.param(subset("10.0.0.1"), PODS_OF_PORTS, PODS_OF_PORTS[:2], id="all ports of an address"),
        pytest.param(
            subset("10.0.0.1:8080,10.0.0.2"),
            PODS_OF_PORTS,
            [PODS_OF_PORTS[0], *PODS_OF_PORTS[2:]],
            id="with and without a port",
        ),
        pytest.param(subset("10.0.0.1:3000"), PODS_OF_PORTS, [], id="another port"),
        pytest.param(subset("10.0.0.1:²"), PODS_OF_PORTS, [], id="no port"),
        pytest.param(subset("10.0.0.1:" + "9" * 5_000), PODS_OF_PORTS, [], id="a port that is too long"),
        pytest.param(subset(["[fd00::1]:8000"]), [("fd00::1", 8000), ("fd00::1", 8001)], [("fd00::1", 8000)], id="IPv6"),
        pytest.param(subset(["fd00:0::1"]), [("fd00::1", 8000), ("fd00::2", 8000)], [("fd00::1", 8000)], id="IPv6, no port"),
    ],
)  # fmt: skip
def test_candidates(
    filter_metadata: dict[str, Struct], pods: list[tuple[str, int]], candidates: list[tuple[str, int]]
) -> None:
    allowed = subset_of(filter_metadata)
    assert [pod for pod in pods if allowed is None or allowed.allows(*pod)] == candidates


@pytest.mark.parametrize(
    ("filter_metadata", "attributes", "served"),
    [
        pytest.param({}, {}, "", id="no metadata"),
        pytest.param(metadata("envoy.lb", another="value"), {}, "", id="the namespace without the key"),
        pytest.param(
            metadata("envoy.lb", **{"x-gateway-destination-endpoint-served": "10.0.0.2:3000"}),
            metadata("envoy.filters.http.ext_proc", **{"upstream.address": "10.0.0.1:3000"}),
            "10.0.0.2:3000",
            id="metadata",
        ),
        pytest.param(
            {}, metadata("envoy.filters.http.ext_proc", **{"upstream.address": "10.0.0.1:3000"}), "10.0.0.1:3000",
            id="attribute",
        ),
        pytest.param(metadata("envoy.lb", **{"x-gateway-destination-endpoint-served": 3.0}), {}, "", id="a number"),
    ],
)  # fmt: skip
def test_the_endpoint_that_answered(
    filter_metadata: dict[str, Struct], attributes: dict[str, Struct], served: str
) -> None:
    assert served_endpoint(filter_metadata, attributes) == served


def test_the_instance_that_answered() -> None:
    first, second = Target("a", "http://10.0.0.1:80"), Target("b", "http://[fd00::1]:80")
    given = {"10.0.0.1:80": first, "[fd00::1]:80": second}
    assert target_at("10.0.0.1:80", given) is first
    assert target_at("[fd00:0::1]:80", given) is second
    assert target_at("", given) is None
    assert target_at("10.0.0.9:80", given) is None
