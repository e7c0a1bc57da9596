"""What a probe of an engine fails with."""

from __future__ import annotations

import pytest

from pointsman_agent.core.engine_address import parse_engine_address
from pointsman_agent.io.engine_http import EngineProbe, ProbeError
from tests.support.pages import serving


async def test_an_https_url_of_an_http_server_is_told() -> None:
    with serving(lambda _: (200, b"")) as url:
        probe = EngineProbe(parse_engine_address(url.replace("http", "https")))
        with pytest.raises(ProbeError, match=r"no TLS connection .*: is its URL an http:// one\?"):
            await probe.alive()
