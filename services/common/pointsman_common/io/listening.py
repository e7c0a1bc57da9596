"""Sockets that are bound to an address: to reserve it, to learn whether it is free, or for a gRPC server."""

from __future__ import annotations

import socket

import grpc
import grpc.aio

from pointsman_common.core.addresses import Address, parse_address


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


def listen_on(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, *, shared: bool = False
) -> int:
    """Let a server listen on "HOST:PORT", in plain text without `credentials`; return its port. `shared`: other processes listen
    there, too. Raises OSError if the address cannot be used."""
    host, port = parse_address(address)
    # gRPC itself gives no reason, and logs lines of its own.
    bound_socket(Address(host, port), socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR).close()
    # gRPC takes [::] for all interfaces of both families, and of IPv4 alone where there is no IPv6.
    address = str(Address(host or "::", port))
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(str(error)) from None
