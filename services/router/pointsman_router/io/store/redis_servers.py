"""The connections to a shared Redis, which may be several servers of which one is the master."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

# Errors of a server that is the right one. A new connection, to it or to another server, would not help.
_STAY = (redis.exceptions.OutOfMemoryError, redis.exceptions.NoPermissionError)


class RedisServers:
    """The clients of a Redis: one for each URL, used one at a time.

    A server that stops to be the master may keep its connections open. So an error closes all connections, and the next command
    opens new ones: to the next URL, or to the address that the name stands for by then."""

    def __init__(self, urls: list[str], timeout_s: float) -> None:
        """`timeout_s`: maximum time of a connect and of each answer, s."""
        self._clients: list[Any] = [
            redis.asyncio.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                decode_responses=True,
                retry=Retry(NoBackoff(), 0),
            )
            for url in urls
        ]
        self._at = 0

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
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await client.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()
