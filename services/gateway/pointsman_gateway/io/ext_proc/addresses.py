"""The endpoints of instances: IP addresses of the hosts in their URLs, which are looked up if they are names."""

from __future__ import annotations

import asyncio
import socket
import time
from ipaddress import ip_address

from pointsman_common.core.addresses import Address, address_of_url
from pointsman_gateway.core.request.request_events import Target

# How long the address of a name is used, s. A name that has none is looked up again after FAILED_S.
KNOWN_S, FAILED_S = 2.0, 1.0
# Timeout of a lookup, s.
LOOKUP_S = 3.0
# Maximum number of names.
NAMES = 4_096

# A host, and the process of the instance there: a pod's name may stand for another address after its restart.
_Name = tuple[str, str]


class Addresses:
    """Finds the endpoints of instances; shared by all requests. A name is looked up by one task at a time. While it is looked up
    again, and if that fails, the address of before counts."""

    def __init__(self) -> None:
        self._known: dict[_Name, tuple[str, float]] = {}  # the address ("": none), and until when it counts
        self._lookups: dict[_Name, asyncio.Task[str]] = {}

    def known(self, target: Target) -> Address:
        """Return the IP address and the port of an instance; "" for a name whose address is not known yet. Mutates."""
        host, port = address_of_url(target.url)
        try:
            return Address(str(ip_address(host)), port)
        except ValueError:
            pass
        name = _name_of(target)
        address, until = self._known.get(name, ("", 0.0))
        if time.monotonic() >= until:
            self._look_up(name)
        return Address(address, port)

    async def of(self, target: Target) -> Address:
        """As known(), but wait for a name's first lookup; "" for a name without an address. Mutates."""
        address, port = self.known(target)
        if not address and (lookup := self._lookups.get(_name_of(target))) is not None:
            address = await asyncio.shield(lookup)
        return Address(address, port)

    def _look_up(self, name: _Name) -> None:
        if name not in self._lookups:
            self._lookups[name] = task = asyncio.create_task(self._found(name))
            task.add_done_callback(lambda _: self._lookups.pop(name, None))

    async def _found(self, name: _Name) -> str:
        before = self._known.get(name, ("", 0.0))[0]
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.get_running_loop().getaddrinfo(name[0], None, type=socket.SOCK_STREAM)
            address, good_s = str(found[0][4][0]), KNOWN_S
        # A label of a name may be too long to be one.
        except (OSError, UnicodeError, TimeoutError):
            address, good_s = before, FAILED_S
        if len(self._known) >= NAMES:
            self._known.clear()
        self._known[name] = address, time.monotonic() + good_s
        return address


def _name_of(target: Target) -> _Name:
    return address_of_url(target.url).host, target.incarnation
