"""Endpoints (IP:PORT) as a proxy names them: those of a request's subset, and those that it is sent to. Pure.

The names are those of the endpoint-picker protocol of the Gateway API Inference Extension, 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.struct_pb2 import ListValue, Struct

from pointsman_gateway.core.request.request_events import Target

# Namespace and name of the metadata by which a proxy restricts the endpoints.
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
# Namespace of the metadata about the destination; names of the header and the metadata that name it, and of the metadata that
# names the endpoint which answered.
NAMESPACE, DESTINATION = "envoy.lb", "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
_PORT_DIGITS = 5
# Attribute by which Envoy itself names the endpoint that answered.
UPSTREAM_ADDRESS = "upstream.address"


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of an instance's base URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def endpoint(address: str, port: int) -> str:
    """Return an endpoint; `address` is an IP address without brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Subset:
    """The endpoints of which a proxy allows any, each IP:PORT, or IP for all of its ports."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._allowed = {_normal(entry) for entry in entries}

    def allows(self, address: str, port: int) -> bool:
        """Return whether the endpoint is one of them."""
        return (address, port) in self._allowed or (address, 0) in self._allowed


def subset_of(metadata: Mapping[str, Struct]) -> Subset | None:
    """Return the subset in a request's metadata, None if it has none.

    Its value is a list, or text with commas, or a list of such texts: proxies that copy a header to metadata write text.
    """
    found = metadata.get(SUBSET_NAMESPACE)
    if found is None or SUBSET not in found:
        return None
    return Subset(_entries(found[SUBSET]))


def _entries(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from filter(None, (part.strip() for part in value.split(",")))
    elif isinstance(value, ListValue):
        for at in range(len(value)):
            if isinstance(one := value[at], str):
                yield from _entries(one)


def _normal(entry: str) -> tuple[str, int]:
    """Return address and port of an entry, port 0 if it has none."""
    host, colon, port = entry.rpartition(":")
    number = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS
    if not colon or not number or (":" in host and not host.startswith("[")):
        host, port = entry, "0"
    host = host.strip("[]")
    try:
        return str(ip_address(host)), int(port)
    except ValueError:
        return host, int(port)


def served_endpoint(metadata: Mapping[str, Struct], attributes: Mapping[str, Struct]) -> str:
    """Return the endpoint that answered, as a proxy reports it; empty if it does not."""
    for found, name in (
        (metadata.get(NAMESPACE), SERVED),
        *((attribute, UPSTREAM_ADDRESS) for attribute in attributes.values()),
    ):
        if found is not None and name in found and isinstance(value := found[name], str):
            return value
    return ""


def target_at(served: str, endpoints: Mapping[str, Target]) -> Target | None:
    """Return the instance at the endpoint `served`, None if it is none of `endpoints`."""
    address = _normal(served)
    return next((target for endpoint, target in endpoints.items() if _normal(endpoint) == address), None)
