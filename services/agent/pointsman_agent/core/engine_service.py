"""The engines behind a Service of Kubernetes, from its EndpointSlices. Pure.

`NAMESPACE/NAME`, `NAMESPACE/NAME:PORT` with a port's name or number, and options as of an engine's address:
`llm/vllm:http?hardware=h100`. Format of the slices: discovery.k8s.io/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pointsman_agent.core.engine_address import EngineAddress, parse_engine_address

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
    new. Endpoints that are not ready are engines that get nothing meanwhile: a busy engine can fail its readiness probe."""

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
        """Return the engines by their URL. An endpoint may be in two slices while it moves from one to the other."""
        return {address.url: address for address, _ in self._endpoints()}

    def not_ready(self) -> frozenset[str]:
        """Return the URLs of the engines that no slice has as ready."""
        endpoints = [(address.url, ready) for address, ready in self._endpoints()]
        return frozenset(url for url, _ in endpoints) - {url for url, ready in endpoints if ready}

    def _endpoints(self) -> Iterator[tuple[EngineAddress, bool]]:
        """Yield each endpoint that is an engine, and whether it is ready."""
        for endpoint_slice in self._slices.values():
            if endpoint_slice.get("addressType") not in ("IPv4", "IPv6"):
                continue
            port = _port(endpoint_slice.get("ports") or (), self._service.port)
            for endpoint in (endpoint_slice.get("endpoints") or ()) if port else ():
                conditions = endpoint.get("conditions") or {}
                if not conditions.get("terminating"):
                    # All addresses of an endpoint are the same pod's.
                    address = _address(self._service, endpoint["addresses"][0], port)
                    # An absent condition of readiness counts as true.
                    yield address, conditions.get("ready") is not False


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
    host = f"[{ip}]" if ":" in ip else ip
    return parse_engine_address(f"http://{host}:{port}" + (f"?{service.options}" if service.options else ""))
