"""The engines behind a Service of Kubernetes, from its EndpointSlices. Pure.

`NAMESPACE/NAME`, `NAMESPACE/NAME:PORT` with a port's name or number, and options as of an engine's address:
`llm/vllm:http?hardware=h100`. Format of the slices: discovery.k8s.io/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pointsman_agent.core.engine_address import EngineAddress, parse_engine_address
from pointsman_common.core.addresses import Address

_SERVICE = re.compile(
    r"(?P<namespace>[a-z0-9]([-a-z0-9]*[a-z0-9])?)/(?P<name>[a-z0-9]([-a-z0-9]*[a-z0-9])?)"
    r"(:(?P<port>[a-z0-9]([-a-z0-9]*[a-z0-9])?))?(\?(?P<options>.*))?"
)
# Options of an engine's address that are those of one engine.
_OF_ONE_ENGINE = ("advertise", "bootstrap", "events", "gpus", "replay")
SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class EngineService:
    """A Service whose endpoints are engines. `port`: a port's name or number; empty: the only one. `options`: the query of each
    engine's address."""

    namespace: str
    name: str
    port: str = ""
    options: str = ""

    @property
    def label_selector(self) -> str:
        """The selector of its EndpointSlices."""
        return f"{SERVICE_LABEL}={self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_engine_service(text: str) -> EngineService:
    """Parse a Service and the options of its engines. Raises ValueError with the reason if they are invalid."""
    found = _SERVICE.fullmatch(text)
    if found is None:
        raise ValueError(f"no NAMESPACE/NAME or NAMESPACE/NAME:PORT: {text!r}")
    service = EngineService(found["namespace"], found["name"], found["port"] or "", found["options"] or "")
    _address(service, "192.0.2.1", 80)
    for option in _OF_ONE_ENGINE:
        if re.search(rf"(^|&){option}=", service.options):
            raise ValueError(f"{service}: {option} is of one engine, not of all engines of a service")
    return service


class ServiceEndpoints:
    """The EndpointSlices of one Service. Terminating endpoints are no engines: a pod that ends still answers, and gets nothing
    new. Endpoints that are not ready are engines that count as unhealthy: a busy engine can fail its readiness probe."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, slices: Iterable[Mapping[str, Any]]) -> None:
        """Set all slices. Mutates."""
        self._slices = {endpoint_slice["metadata"]["name"]: endpoint_slice for endpoint_slice in slices}

    def apply(self, kind: str, changed: Mapping[str, Any]) -> None:
        """Apply an event of a watch: ADDED, MODIFIED or DELETED. Mutates."""
        if kind == "DELETED":
            self._slices.pop(changed["metadata"]["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[changed["metadata"]["name"]] = changed

    def engines(self) -> dict[str, EngineAddress]:
        """Return the engines by their URL, one for each pod.

        An endpoint may be in two slices while it moves from one to the other, and a pod with addresses of both families is in a
        slice of each. Its IPv4 address counts if it has one.
        """
        return {address.url: address for address, _ in self._pods().values()}

    def not_ready(self) -> frozenset[str]:
        """Return the URLs of the engines that no slice has as ready."""
        return frozenset(address.url for address, ready in self._pods().values() if not ready)

    def _pods(self) -> dict[str, tuple[EngineAddress, bool]]:
        """Return each pod's address, and whether a slice has it as ready. The slices of the families change one after the other:
        a pod is an engine only while none of them has it as terminating."""
        found: dict[str, tuple[EngineAddress, bool]] = {}
        ended: set[str] = set()
        # Of two slices' addresses the last one stays.
        for endpoint_slice in sorted(self._slices.values(), key=_address_type, reverse=True):
            port = _port(endpoint_slice.get("ports") or (), self._service.port)
            if not port or _address_type(endpoint_slice) not in ("IPv4", "IPv6"):
                continue
            for endpoint in endpoint_slice.get("endpoints") or ():
                # All addresses of an endpoint are the same pod's.
                if not (ip := next(iter(endpoint.get("addresses") or ()), "")):
                    continue
                pod = (endpoint.get("targetRef") or {}).get("uid") or str(Address(ip, port))
                conditions = endpoint.get("conditions") or {}
                if conditions.get("terminating"):
                    ended.add(pod)
                # An absent condition of readiness counts as true.
                ready = conditions.get("ready") is not False or (pod in found and found[pod][1])
                found[pod] = _address(self._service, ip, port), ready
        return {pod: engine for pod, engine in found.items() if pod not in ended}


def _address_type(endpoint_slice: Mapping[str, Any]) -> str:
    return str(endpoint_slice.get("addressType"))


def _port(ports: Iterable[Mapping[str, Any]], wanted: str) -> int:
    """Return the number of a slice's port, 0 if it has no such port."""
    numbers = {
        str(port.get("name") or ""): int(port.get("port") or 0)
        for port in ports
        if port.get("protocol") in (None, "TCP")
    }
    if not wanted:
        return next(iter(numbers.values())) if len(numbers) == 1 else 0
    if wanted.isdigit():
        return int(wanted) if int(wanted) in numbers.values() else 0
    return numbers.get(wanted, 0)


def _address(service: EngineService, ip: str, port: int) -> EngineAddress:
    return parse_engine_address(f"http://{Address(ip, port)}" + (f"?{service.options}" if service.options else ""))
