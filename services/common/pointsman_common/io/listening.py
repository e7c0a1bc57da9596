"""Sockets that are bound to an address: to reserve it, or to learn whether it is free."""

from __future__ import annotations

import socket

from pointsman_common.core.addresses import Address


def bound_socket(address: Address, option: int = socket.SO_REUSEADDR) -> socket.socket:
    """Return a TCP socket that is bound to an address, with one option of sockets set. It does not listen, so it receives no
    connections. Raises OSError if the address cannot be used."""
    host, port = address.to_listen
    host = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    own = socket.socket(family, kind)
    try:
        own.setsockopt(socket.SOL_SOCKET, option, 1)
        own.bind(place)
    except BaseException:
        own.close()
        raise
    return own
