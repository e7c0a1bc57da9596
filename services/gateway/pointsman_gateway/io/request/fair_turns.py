"""Turns at something of which there is little, shared among clients: round robin over tenants, and over each tenant's keys."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman_gateway.core.tenants import Client


class FairTurns:
    """At most `count` turns at once. Of those that wait, the next is the first one of the key that has waited longest for a turn
    of its tenant, which is the tenant that has waited longest for one. So a client waits for one turn of each other tenant at
    most, however many requests they have sent. Must be used from one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        # By tenant and key, in the order of their next turns. No queue is empty.
        self._waiting: dict[str, dict[bytes, deque[asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """Wait for a turn of `client`, which lasts as long as the block."""
        await self.take(client)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, client: Client) -> None:
        """Wait for a turn. If the caller is cancelled, it has none. Mutates."""
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client.tenant, {}).setdefault(client.key, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.give_back()  # the turn came together with the cancellation
            else:
                self._remove(client, mine)
            raise

    def give_back(self) -> None:
        """End a turn, and begin the next. Mutates."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            keys = self._waiting.pop(tenant)
            key = next(iter(keys))
            queue = keys.pop(key)
            turn = queue.popleft()
            if queue:
                keys[key] = queue
            if keys:
                self._waiting[tenant] = keys
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _remove(self, client: Client, turn: asyncio.Future[None]) -> None:
        keys = self._waiting.get(client.tenant, {})
        queue = keys.get(client.key)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        if not queue:
            del keys[client.key]
        if not keys:
            del self._waiting[client.tenant]
