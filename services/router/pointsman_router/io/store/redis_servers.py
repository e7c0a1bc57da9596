"""The connections to a shared Redis, which may be several servers of which one is the master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff

from pointsman_common.core.addresses import Address
from pointsman_router.io.store.redis_address import RedisAddress

# What commands raise if Redis does not answer, or answers with an error. The cluster's client has one that is no RedisError, also
# while none of its servers can be reached.
REDIS_ERRORS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError)
# Errors of a server that is the right one. A new connection, to it or to another server, would not help.
_STAY = (redis.exceptions.OutOfMemoryError, redis.exceptions.NoPermissionError)


class _Sentinels(Sentinel):
    """Sentinels that are asked one call at a time. A call moves the Sentinel that answers to the front of the list, and of two at
    the same time the second would move it to the place of another one, which is lost."""

    def __init__(self, urls: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__([])  # type: ignore[no-untyped-call]
        self.sentinels = [redis.asyncio.Redis.from_url(url, **options) for url in urls]
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> Any:
        """Return (host, port) of a master. Raises MasterNotFoundError."""
        async with self._asking:
            return await super().discover_master(service_name)


def _of_master(address: RedisAddress, sentinels: _Sentinels, options: dict[str, Any]) -> Any:
    """Return the client of the master that Sentinels name."""
    own: dict[str, Any] = dict(parse_url(address.urls[0]))
    tls = issubclass(own.pop("connection_class", object), SSLConnection)
    own = {name: value for name, value in own.items() if name not in ("host", "port")}
    kind = SentinelManagedSSLConnection if tls else SentinelManagedConnection
    return sentinels.master_for(address.master, connection_class=kind, **own, **options)


class RedisServers:
    """The clients of a Redis: one for each URL, used one at a time; one for all servers of a cluster, or that Sentinels know.

    A server that stops to be the master may keep its connections open. So an error closes all connections, and the next command
    opens new ones: to the next URL, or to the address that the name or the Sentinels stand for by then. `server` is the server of
    the newest connection, HOST:PORT and its IP address if HOST is a name; empty before the first, and of a cluster. `asked`: the
    places of all URLs, or of the Sentinels."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        """`timeout_s`: maximum time of a connect and of each answer, s."""
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "decode_responses": True,
            "encoding_errors": "replace",  # text that is not UTF-8 is no router's
            "retry": Retry(NoBackoff(), 0),
        }
        self.server = ""
        # Without users and passwords.
        places = (urlsplit(url) for url in address.sentinels or address.urls)
        self.asked = ", ".join(place.netloc.rpartition("@")[2] or place.path for place in places)
        self.has_sentinels = bool(address.sentinels)
        self._master = address.master
        self._sentinels = _Sentinels(address.sentinels, options)
        if address.cluster:
            self._clients: list[Any] = [RedisCluster.from_url(url, **options) for url in address.urls]
        else:
            options["redis_connect_func"] = self._connected
            if self.has_sentinels:
                self._clients = [_of_master(address, self._sentinels, options)]
            else:
                self._clients = [redis.asyncio.Redis.from_url(url, **options) for url in address.urls]
        self._at = 0

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        peer = connection._writer.get_extra_info("peername")
        if isinstance(peer, tuple):
            address = Address(connection.host, connection.port)
            self.server = f"{address}" + (f" ({peer[0]})" if peer[0] != address.host else "")
        else:
            self.server = str(peer)  # the path of a Unix socket

    @property
    def client(self) -> Any:
        """The client of the server in use."""
        return self._clients[self._at]

    def script(self, text: str) -> Callable[..., Awaitable[Any]]:
        """Return a function (keys, args) that runs a Lua script on the server in use."""
        scripts = [client.register_script(text) for client in self._clients]
        return lambda keys, args: scripts[self._at](keys=keys, args=args)

    async def failed(self, error: Exception) -> None:
        """Close all connections after an error that a new connection may end, and go on to the next URL."""
        if not isinstance(error, _STAY):
            client, self._at = self.client, (self._at + 1) % len(self._clients)
            await _close(client)

    async def moved(self) -> bool:
        """Return whether Sentinels name another master than the server in use. Raises one of REDIS_ERRORS if none names one."""
        in_use = self.client.connection_pool.master_address
        return in_use is not None and in_use != await self._sentinels.discover_master(self._master)

    async def connect_anew(self) -> None:
        """Close all connections; the next command opens new ones."""
        await _close(self.client)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (*self._clients, self._sentinels):
            await client.aclose()


async def _close(client: Any) -> None:
    with contextlib.suppress(*REDIS_ERRORS):
        await client.aclose()
