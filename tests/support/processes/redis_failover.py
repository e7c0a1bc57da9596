"""A Redis master with a replica that takes its place, and routers that each reach it by a link of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio

from pointsman.router.v1 import placement_pb2
from pointsman_router.io.main import RouterServer
from pointsman_router.io.telemetry.decision_log import DecidedLine, MalformedLine, read_log
from tests.support.processes.process import Process
from tests.support.processes.redis import RedisTls, redis_server
from tests.support.processes.replicas import Gateway, keep_reporting
from tests.support.router import running
from tests.support.tcp_proxies import Link
from tests.support.waiting import WITHIN_S, eventually, until

INSTANCES = 4
# Time within which routers use Redis again once it serves, s.
RETURN_S = 5.0


@dataclass
class RedisPair:
    """Two Redis servers. `master` is 0 or 1: the one that accepts writes. `options`: those of its administrator's client."""

    ports: tuple[int, int]
    processes: tuple[Process, Process]
    options: dict[str, Any]
    host: str
    master: int = 0

    async def command(self, server: int, *words: object) -> Any:
        """Run a command as the administrator of a server."""
        async with redis.asyncio.Redis(port=self.ports[server], decode_responses=True, **self.options) as client:
            execute: Any = client.execute_command
            return await execute(*words)

    async def is_master(self, server: int) -> bool:
        """Return whether a server is a master."""
        return bool((await self.command(server, "ROLE"))[0] == "master")

    async def protect(self, *rules: str) -> None:
        """Set users, by their ACL rules, and then the administrator's password, which replicas use, too, at both servers."""
        for server in (0, 1):
            for rule in rules:
                await self.command(server, "ACL", "SETUSER", *rule.split())
            await self.command(server, "CONFIG", "SET", "masterauth", "of-redis")
        for server in (0, 1):
            await self.command(server, "CONFIG", "SET", "requirepass", "of-redis")
            self.options["password"] = "of-redis"

    async def replicates(self) -> None:
        """Wait until the replica has all that the master has."""

        async def linked() -> bool:
            info: Any = await self.command(1 - self.master, "INFO", "replication")
            return bool(info["master_link_status"] == "up" and not info["master_sync_in_progress"])

        await eventually(linked, "the replica follows its master")

    async def switch(self) -> None:
        """Make the replica the master, and the master its replica. Their connections stay open."""
        old, self.master = self.master, 1 - self.master
        await self.command(self.master, "REPLICAOF", "NO", "ONE")
        await self.command(old, "REPLICAOF", self.host, self.ports[self.master])


@asynccontextmanager
async def redis_pair(
    folder: Path, tls: RedisTls | None = None, flags: tuple[str, ...] = ("--save", "")
) -> AsyncIterator[RedisPair]:
    """Run a master and its replica, each of which tells others its host: that of `tls`, or 127.0.0.1."""
    for name in ("redis-0", "redis-1"):
        (folder / name).mkdir()
    host = tls.host if tls else "127.0.0.1"
    flags = (*flags, "--replica-announce-ip", host)
    with ExitStack() as stack:
        run = [redis_server(folder / name, None, *flags, tls=tls) for name in ("redis-0", "redis-1")]
        (one, first), (two, second) = map(stack.enter_context, run)
        ports = [int(url.rsplit(":", 1)[1].partition("/")[0]) for url in (one, two)]
        options: dict[str, Any] = {"host": host, "ssl": True, **tls.of_client()} if tls else {}
        pair = RedisPair((ports[0], ports[1]), (first, second), options, host)
        # A replica that attaches waits for no others.
        await pair.command(0, "CONFIG", "SET", "repl-diskless-sync-delay", 0)
        await pair.command(1, "REPLICAOF", host, ports[0])
        await pair.replicates()
        yield pair


@dataclass
class Fleet:
    """Routers over a Redis pair, and gateways that place requests through them."""

    pair: RedisPair
    folder: Path
    routers: dict[str, RouterServer] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)
    placed: list[placement_pb2.Placement] = field(default_factory=list)
    longest_s: float = 0.0
    """Longest wait for a placement, s."""

    def owners(self) -> list[str]:
        """Return the routers that would place a request of the pool now."""
        return [
            name
            for name, server in self.routers.items()
            if server.router.state.owned.owns("m") and server.router.store.may_place("m")
        ]

    async def owner(self) -> str:
        """Wait until one router places, and all gateways know it."""

        async def known() -> str:
            owners = self.owners()
            described = {
                owner.router_id if (owner := gateway.client._owners.owner("m")) is not None else ""
                for gateway in self.gateways
            }
            return owners[0] if len(owners) == 1 and described <= set(owners) else ""

        return str(await eventually(known, "one router places"))

    async def lose_master(self, sentinel_admin: redis.Redis) -> None:
        """Kill the master; once the routers go on without it, let the Sentinel name the other server, and wait until they use
        it."""
        self.pair.processes[self.pair.master].kill()
        await eventually(self.degraded, "the routers go on without Redis")
        self.pair.master = 1 - self.pair.master

        async def promoted() -> bool:
            if await self.pair.is_master(self.pair.master):
                return True
            # Refused while a failover is in progress, and while the Sentinel has not heard of the replica for 5 s.
            with contextlib.suppress(redis.ResponseError):
                await asyncio.to_thread(sentinel_admin.sentinel_failover, "pointsman")
            return False

        await eventually(promoted, "the Sentinel has named a new master")
        await eventually(lambda: not self.degraded(), "no router is degraded")

    def degraded(self) -> list[str]:
        """Return the routers that count Redis as away."""
        return [name for name, server in self.routers.items() if server.router.state.degraded]

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Place and end requests through all gateways until the body ends."""
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def ask(gateway: Gateway, number: int) -> None:
            count = 0
            while not over.is_set():
                name, asked = f"{number}-{count}", loop.time()
                self.placed.append(await gateway.place(name, tokens=100))
                self.longest_s = max(self.longest_s, loop.time() - asked)
                gateway.finish(name)
                count += 1
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for number, gateway in enumerate(self.gateways):
                tasks.create_task(ask(gateway, number))
            try:
                yield
            finally:
                over.set()

    def epochs(self) -> list[tuple[float, str, int]]:
        """Return the time, the router and the epoch of each decision whose placement a gateway received, in order of time."""
        received = {placement.decision_id for placement in self.placed}

        def written() -> list[tuple[float, str, int]] | None:
            found = []
            # A thread writes the lines, so they may come later than the placements, and the last one in parts.
            with contextlib.suppress(MalformedLine):
                for name in self.routers:
                    for _, line in read_log(self.folder / f"{name}.jsonl"):
                        if isinstance(line, DecidedLine) and line.decision.decision_id in received:
                            found.append((line.unix_s, name, line.epoch))
            return found if len(found) == len(received) else None

        return sorted(until(written, within_s=WITHIN_S, what="the decisions are in the routers' logs"))

    def check_epochs(self) -> None:
        """Check that no router placed once one of a higher epoch had."""
        epochs = [epoch for _, _, epoch in self.epochs()]
        assert epochs == sorted(epochs), "two routers placed at the same time"


@asynccontextmanager
async def fleet_over(pair: RedisPair, folder: Path, gateways: int = 2, **settings: Any) -> AsyncIterator[Fleet]:
    """Run two routers, each over a link of its own to the master of `pair`. Yield them once one owns the pool."""
    fleet = Fleet(pair, folder)
    async with AsyncExitStack() as stack:
        for name in ("one", "two"):
            link = fleet.links[name] = await stack.enter_async_context(Link(pair.ports[pair.master]))
            server, _ = await stack.enter_async_context(
                running(
                    **{
                        "redis_url": f"redis://{link.address}/0",
                        "router_id": name,
                        "gateway_lease_s": 5.0,
                        "decision_log_file": folder / f"{name}.jsonl",
                        **settings,
                    }
                )
            )
            fleet.routers[name] = server
        addresses = [f"127.0.0.1:{server.port}" for server in fleet.routers.values()]
        for address in addresses:
            for at in range(INSTANCES):
                task = asyncio.create_task(keep_reporting(address, f"i{at}", "m"))
                stack.push_async_callback(partial(asyncio.gather, task, return_exceptions=True))
                stack.callback(task.cancel)
        for at in range(gateways):
            gateway = Gateway(f"g{at}", addresses)
            fleet.gateways.append(gateway)
            await gateway.client.start()
            stack.push_async_callback(gateway.client.close)
        await fleet.owner()
        yield fleet
