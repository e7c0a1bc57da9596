"""Requests to a fleet's own addresses, in an environment that names a proxy."""

from __future__ import annotations

import urllib.error

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
