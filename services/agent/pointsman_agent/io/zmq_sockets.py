"""The address family of a ZMQ socket: ZMQ takes names and wildcards for IPv4 unless the socket is told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import ip_address

from pointsman_common.core.addresses import parse_address


async def needs_ipv6(endpoint: str, *, unknown: bool) -> bool:
    """Return the value of zmq.IPV6 for a socket that uses `endpoint`: true for all interfaces (tcp://*:PORT), IPv6 addresses, and
    names without an IPv4 address. `unknown`: what to return for a name that cannot be looked up now.

    vLLM binds tcp://*:PORT for IPv4 alone, so a name of both families is used with IPv4.
    """
    try:
        host, port = parse_address(endpoint.removeprefix("tcp://"))
    except ValueError:
        return False
    if host in ("", "*"):
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host).version == 6
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return unknown
    return all(family is socket.AF_INET6 for family, *_ in found)
