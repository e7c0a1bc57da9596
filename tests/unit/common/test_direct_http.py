"""Requests to a fleet's own addresses, in an environment that names a proxy."""

from __future__ import annotations

import socket
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

from pointsman_common.io.direct_http import open_directly
from tests.support.pages import serving
from tests.support.processes.process import free_port


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serving(lambda path: (200 if path == "/found" else 404, b"here")) as url:
        with open_directly(f"{url}/found", 10) as answer:
            assert (answer.status, answer.read()) == (200, b"here")
        with pytest.raises(urllib.error.HTTPError) as error:
            open_directly(f"{url}/missing", 10)
        assert error.value.code == 404
        error.value.close()


def test_what_speaks_no_http_is_an_error_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as answering:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"\x00\x00\x12\x04\n")

        answered = answering.submit(greet)
        with pytest.raises(OSError, match="does not speak HTTP"):
            open_directly(f"http://127.0.0.1:{server.getsockname()[1]}", 10)
        answered.result()
