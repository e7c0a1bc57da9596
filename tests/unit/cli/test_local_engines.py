"""How `pointsman up` finds engines on its host."""

from __future__ import annotations

import socket
import threading
from contextlib import AbstractContextManager, suppress

import pytest

from pointsman_cli import local_engines
from pointsman_cli.local_engines import find_engines, listening_ports
from tests.support.pages import serving

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 0500000A:1F42 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 0100007F:1F43 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:1F44 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000
   1: 00000000000000000000000001000000:1F45 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000
"""


def test_ports_that_listen_where_loopback_reaches_them() -> None:
    assert listening_ports([TCP, TCP6]) == [8000, 8001, 8004]
    assert listening_ports([]) == []


def page(body: bytes) -> AbstractContextManager[str]:
    return serving(lambda _: (200, body))


def test_an_engine_is_what_answers_with_vllm_s_series() -> None:
    engine = b"# HELP\nvllm:num_requests_running 0.0\n"
    with page(engine) as own, page(engine) as excluded, page(b"# HELP\nnode_load1 1\n") as other:
        found, asked = find_engines([int(excluded.rpartition(":")[2])])
    assert own in found
    assert not {excluded, other} & {*found}
    assert asked >= 2


def test_what_never_ends_its_answer_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engines, "ANSWER_S", 0.2)
    ended = threading.Event()

    def drip(listening: socket.socket) -> None:
        connected, _ = listening.accept()
        with connected, suppress(OSError):
            connected.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.wait(0.01):
                connected.sendall(b"#\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        port = listening.getsockname()[1]
        found, _ = find_engines()
        ended.set()
        thread.join()
    assert f"http://127.0.0.1:{port}" not in found
