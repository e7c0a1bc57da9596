"""Endpoints (IP:PORT) as a proxy names them: those of a request's subset, and those that it is sent to. Pure.

The names are those of the endpoint-picker protocol of the Gateway API Inference Extension, 1.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any

from google.protobuf.struct_pb2 import ListValue, Struct

from pointsman_common.core.addresses import Address, parse_address
from pointsman_gateway.core.request.request_events import Target

# Namespace and name of the metadata by which a proxy restricts the endpoints.
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
# Namespace of the metadata about the destination; names of the header and the metadata that name it, and of the metadata that
# names the endpoint which answered.
NAMESPACE, DESTINATION = "envoy.lb", "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
# Attribute by which Envoy itself names the endpoint that answered.
UPSTREAM_ADDRESS = "upstream.address"


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


def _normal(entry: str) -> Address:
    """Return address and port of an entry, port 0 if it has none."""
    try:
        host, port = parse_address(entry)
    except ValueError:
        host, port = entry.strip("[]"), 0
    with contextlib.suppress(ValueError):
        host = str(ip_address(host))
    return Address(host, port)


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
