"""A DNS server whose one name moves, and which may be slow."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

_HEADER, _IPV4, _A = 12, 4, 1


class NameServer(asyncio.DatagramProtocol):
    """Answers every query of an IPv4 address with `address`, and every other one with nothing, after `delay_s` seconds."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.delay_s = 0.0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport of the answers."""
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a query of one name."""
        end = data.index(0, _HEADER) + 1
        question = data[_HEADER : end + 4]
        is_ipv4 = struct.unpack_from("!H", data, end)[0] == _A
        answer = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, _IPV4) + ip_address(self.address).packed
        assert self._transport is not None
        head = struct.pack("!HHHHH", 0x8180, 1, int(is_ipv4), 0, 0)
        reply = data[:2] + head + question + answer * is_ipv4
        asyncio.get_running_loop().call_later(self.delay_s, self._transport.sendto, reply, addr)


@asynccontextmanager
async def name_server(address: str) -> AsyncIterator[NameServer]:
    """Run a name server on a free port of 127.0.0.1."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(address), ("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
