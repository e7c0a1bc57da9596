"""Search for vLLM servers on this host: processes that listen and answer GET /metrics with vLLM's series (Linux)."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Timeout of a whole answer, s: what listens there may send a byte now and then for ever.
ANSWER_S = 1.0
# Maximum number of ports that are asked, and number of those asked at a time.
MAX_PORTS, AT_A_TIME = 512, 32
# Maximum number of bytes of a page that are searched.
PAGE_BYTES = 256 << 10
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
# Addresses at which 127.0.0.1 is answered: itself and those of all interfaces, in the hexadecimal form of /proc/net.
_REACHED = ("0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F", "0000000000000000FFFF000000000000")


def listening_ports(tables: Iterable[str]) -> list[int]:
    """Return the TCP ports that answer at 127.0.0.1, in ascending order. `tables`: the content of /proc/net/tcp and tcp6."""
    ports = set()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        words = line.split()
        address, _, port = words[1].rpartition(":")
        if words[3] == _LISTENS and address in _REACHED:
            ports.add(int(port, 16))
    return sorted(ports)


def find_engines(without: Collection[int] = ()) -> tuple[list[str], int]:
    """Return the base URLs of the vLLM servers at 127.0.0.1, and how many ports were asked, none of
    `without`."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    ports = listening_ports(table.read_text() for table in tables if table.exists())
    asked = [port for port in ports if port not in without][:MAX_PORTS]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = [port for port, engine in zip(asked, pool.map(_is_engine, asked), strict=True) if engine]
    return [f"http://127.0.0.1:{port}" for port in found], len(asked)


def _is_engine(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connected:
            # Reads that wait end with the connection.
            timer = threading.Timer(ANSWER_S, _shut_down, (connected,))
            timer.start()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.sock = connected
                connection.request("GET", "/metrics")
                answer = connection.getresponse()
                return answer.status == 200 and b"\nvllm:" in answer.read(PAGE_BYTES)
            finally:
                timer.cancel()
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
