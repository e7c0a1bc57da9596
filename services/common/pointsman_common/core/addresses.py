"""Addresses of servers: HOST:PORT, with an IPv6 address in brackets ([::1]:8080). Pure.

Everything that splits or joins host and port does it here.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import NamedTuple
from urllib.parse import urlsplit

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\[\]:/\s]*)):(?P<port>[0-9]{1,5})")
# Hosts of ZMQ endpoints that are bound to all interfaces.
_ALL_INTERFACES = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::")
_EVERY_HOST = ("", "0.0.0.0", "::")


class Address(NamedTuple):
    """Host and port. str() joins them: HOST:PORT, [IPV6]:PORT."""

    host: str  # a name or an IP address without brackets; empty: all interfaces of both families
    port: int

    def __str__(self) -> str:
        return f"{in_brackets(self.host)}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether a server there listens on all interfaces."""
        return self.host in _EVERY_HOST

    @property
    def to_connect(self) -> Address:
        """Where a client on this machine reaches a server there."""
        return Address("localhost", self.port) if self.is_wildcard else self

    @property
    def to_listen(self) -> tuple[str | None, int]:
        """Host and port for asyncio's servers. [::] means both families, as for gRPC and ZMQ; asyncio would take IPv6 alone."""
        return (None if self.host in ("", "::") else self.host), self.port


def in_brackets(host: str) -> str:
    """Return a host as it stands before ":PORT": an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def parse_address(text: str) -> Address:
    """Parse HOST:PORT, [IPV6]:PORT or :PORT. Raises ValueError for anything else, also for an IPv6 address without brackets."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535 or not (found["ipv6"] is None or _is_ipv6(found["ipv6"])):
        raise ValueError(f"{text!r} is not HOST:PORT, or [IPV6]:PORT with the brackets")
    return Address(found["ipv6"] or found["name"], int(found["port"]))


def _is_ipv6(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def address_of_url(url: str) -> Address:
    """Return host and port of an http or https URL; the scheme's port if it has none, an empty host if it has none. Raises
    ValueError for an invalid URL."""
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def connect_endpoint(endpoint: str, host: str) -> str:
    """Return where others reach the ZMQ `endpoint` that is bound on `host` (without brackets): wildcards become the host."""
    for wildcard in _ALL_INTERFACES:
        if endpoint.startswith(wildcard):
            return f"tcp://{in_brackets(host)}:{endpoint.removeprefix(wildcard)}"
    return endpoint
