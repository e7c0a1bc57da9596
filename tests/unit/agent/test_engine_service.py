"""Which endpoints of a Service are engines."""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from pointsman_agent.core.engine_service import EngineService, ServiceEndpoints, parse_engine_service
from tests.support.fakes.kubernetes_api import endpoint, endpoint_slice

TWO_PORTS = [{"name": "http", "port": 8000, "protocol": "TCP"}, {"name": "metrics", "port": 9101, "protocol": "TCP"}]


def urls(service: str, *slices: dict[str, Any]) -> list[str]:
    """The URLs of a service's engines, of slices that are valid."""
    for manifest in slices:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    endpoints = ServiceEndpoints(parse_engine_service(service))
    endpoints.replace(slices)
    return sorted(endpoints.engines())


@pytest.mark.parametrize(
    ("text", "service"),
    [
        ("llm/vllm", EngineService("llm", "vllm")),
        ("llm/vllm:http", EngineService("llm", "vllm", "http")),
        ("llm/vllm:8000?hardware=h100&kv=mooncake", EngineService("llm", "vllm", "8000", "hardware=h100&kv=mooncake")),
    ],
)
def test_a_service_is_parsed(text: str, service: EngineService) -> None:
    assert parse_engine_service(text) == service


@pytest.mark.parametrize(
    "text",
    ["vllm", "/vllm", "llm/", "LLM/vllm", "llm/vllm/x", "llm/vllm:", "llm/vllm?speed=9", "llm/vllm?advertise=http://x",
     "llm/vllm?gpus=0", "llm/vllm?kv=what"],
)  # fmt: skip
def test_what_is_no_service_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_engine_service(text)


def test_endpoints_that_do_not_end_are_engines_ready_or_not() -> None:
    slices = (
        endpoint_slice(
            "vllm-a",
            [
                endpoint("10.0.0.1"),
                endpoint("10.0.0.2", ready=False),
                endpoint("10.0.0.3", ready=None),
                endpoint("10.0.0.4", terminating=True),
                endpoint("10.0.0.5", ready=False, terminating=True),
            ],
        ),
        endpoint_slice("vllm-b", [endpoint("10.0.0.6"), endpoint("10.0.0.1", ready=False)]),
    )
    assert urls("llm/vllm", *slices) == [f"http://10.0.0.{number}:8000" for number in (1, 2, 3, 6)]
    endpoints = ServiceEndpoints(parse_engine_service("llm/vllm"))
    endpoints.replace(slices)
    assert endpoints.not_ready() == {"http://10.0.0.2:8000"}


@pytest.mark.parametrize(
    ("service", "ports", "port"),
    [
        ("llm/vllm", [{"port": 8000, "protocol": "TCP"}], 8000),
        ("llm/vllm", TWO_PORTS, 0),
        ("llm/vllm:http", TWO_PORTS, 8000),
        ("llm/vllm:9101", TWO_PORTS, 9101),
        ("llm/vllm:9102", TWO_PORTS, 0),
        ("llm/vllm:grpc", TWO_PORTS, 0),
        ("llm/vllm", [{"name": "udp", "port": 53, "protocol": "UDP"}], 0),
        ("llm/vllm", [], 0),
    ],
)
def test_the_port_is_the_named_one_or_the_only_one(service: str, ports: list[dict[str, Any]], port: int) -> None:
    found = urls(service, endpoint_slice("vllm-a", [endpoint("10.0.0.1")], ports=ports))
    assert found == ([f"http://10.0.0.1:{port}"] if port else [])


def test_ipv6_and_names() -> None:
    six = endpoint_slice("vllm-6", [endpoint("fd00::1")], address_type="IPv6")
    names = endpoint_slice("vllm-n", [endpoint("engine.example.com")], address_type="FQDN")
    assert urls("llm/vllm", six, names) == ["http://[fd00::1]:8000"]


def test_changes_are_applied_one_by_one() -> None:
    endpoints = ServiceEndpoints(parse_engine_service("llm/vllm?hardware=h100"))
    endpoints.apply("ADDED", endpoint_slice("a", [endpoint("10.0.0.1")]))
    endpoints.apply("ADDED", endpoint_slice("b", [endpoint("10.0.0.2")]))
    endpoints.apply("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "9"}})
    assert sorted(endpoints.engines()) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert endpoints.engines()["http://10.0.0.1:8000"].hardware == "h100"
    endpoints.apply("MODIFIED", endpoint_slice("a", [endpoint("10.0.0.3")]))
    endpoints.apply("DELETED", endpoint_slice("b", []))
    endpoints.apply("DELETED", endpoint_slice("unknown", []))
    assert sorted(endpoints.engines()) == ["http://10.0.0.3:8000"]
    endpoints.apply("MODIFIED", endpoint_slice("a", []) | {"endpoints": None, "ports": None})
    assert endpoints.engines() == {}


def of_pod(uid: str, ip: str, **conditions: Any) -> dict[str, Any]:
    """An endpoint of a pod."""
    return endpoint(ip, **conditions) | {
        "targetRef": {"kind": "Pod", "namespace": "llm", "name": f"p-{uid}", "uid": uid}
    }


@pytest.mark.parametrize("first", [0, 1])
def test_a_pod_with_addresses_of_both_families_is_one_engine(first: int) -> None:
    both = [
        endpoint_slice("vllm-4", [of_pod("a", "10.0.0.1"), of_pod("b", "10.0.0.2")]),
        endpoint_slice("vllm-6", [of_pod("a", "fd00::1"), of_pod("c", "fd00::3")], address_type="IPv6"),
    ]
    found = urls("llm/vllm", both[first], both[1 - first])
    assert found == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::3]:8000"]


def test_a_pod_of_both_families_is_one_engine_until_one_of_them_ends() -> None:
    def found(**six: bool) -> tuple[list[str], frozenset[str]]:
        endpoints = ServiceEndpoints(parse_engine_service("llm/vllm"))
        endpoints.replace(
            [
                endpoint_slice("vllm-4", [of_pod("a", "10.0.0.1", ready=False)]),
                endpoint_slice("vllm-6", [of_pod("a", "fd00::1", **six)], address_type="IPv6"),
            ]
        )
        return list(endpoints.engines()), endpoints.not_ready()

    one = "http://10.0.0.1:8000"
    assert found(ready=True) == ([one], frozenset())
    assert found(ready=False) == ([one], frozenset({one}))
    # Else its other address would be a new engine for the moment between two writes.
    assert found(terminating=True) == ([], frozenset())


def test_endpoints_without_a_pod_are_told_apart_by_their_ports() -> None:
    ports = [[{"name": "http", "port": port, "protocol": "TCP"}] for port in (8000, 8001)]
    slices = [endpoint_slice(f"s{at}", [endpoint("10.0.0.1")], ports=port) for at, port in enumerate(ports)]
    assert urls("llm/vllm", *slices) == ["http://10.0.0.1:8000", "http://10.0.0.1:8001"]


def test_an_endpoint_without_addresses_is_skipped() -> None:
    endpoints = ServiceEndpoints(parse_engine_service("llm/vllm"))
    empty: list[dict[str, Any]] = [endpoint("10.0.0.1") | {"addresses": []}, endpoint("10.0.0.1") | {"addresses": None}]
    endpoints.replace([endpoint_slice("vllm-a", [*empty, endpoint("10.0.0.2")])])
    assert list(endpoints.engines()) == ["http://10.0.0.2:8000"]
