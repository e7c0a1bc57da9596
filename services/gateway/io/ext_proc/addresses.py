"""The endpoints of instances: IP addresses of the hosts in their URLs, which are looked up if they are names."""

from __future__ import annotations

import asyncio
import socket
import time
from ipaddress import ip_address

from pointsman.gateway.core.ext_proc.endpoints import endpoint, host_and_port

# How long the address of a name is used, s; a name that has none is looked up again after FAILED_S.
KNOWN_S, FAILED_S = 30.0, 1.0
# Maximum number of names.
NAMES = 4_096


class Addresses:
    """Finds the endpoints of instances; shared by all requests."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}  # name -> address ("": none), and until when it counts

    async def of(self, url: str) -> tuple[str, int]:
        """Return the IP address and the port of an instance's URL; "" for a name without an address. Mutates."""
        host, port = host_and_port(url)
        try:
            return str(ip_address(host)), port
        except ValueError:
            return await self._look_up(host), port

    async def endpoint_of(self, url: str) -> str:
        """Return the endpoint of an instance's URL; "" for a name without an address. Mutates."""
        address, port = await self.of(url)
        return endpoint(address, port) if address else ""

    async def _look_up(self, host: str) -> str:
        address, until = self._known.get(host, ("", 0.0))
        now = time.monotonic()
        if now < until:
            return address
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        except OSError:
            address = ""
        if len(self._known) >= NAMES:
            self._known.clear()
        self._known[host] = address, now + (KNOWN_S if address else FAILED_S)
        return address
