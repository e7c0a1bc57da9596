"""Agents get the very tool calls through the gateway that a real vLLM makes by its grammars (more: docs/tool_calls.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.calling_clients import APIS, Api
from bench.tool_calls import KINDS, WRONG, loop
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# As in the bench, but few and short.
KIND = replace(KINDS["vllm"], turns=2, twice=False)


@pytest.mark.parametrize("api", APIS, ids=[api.name for api in APIS])
async def test_calls_are_the_engines_own(plane: ControlPlane, engines: list[Engine], api: Api) -> None:
    found: Counter[str] = Counter()
    # A loop ends without calls if its first arguments are cut off at the limit of tokens.
    for number in range(12):
        urls = (engines[0].url, plane.gateway_url)
        found.update(await loop(KIND, api, urls, SERVED_NAME, f"{api.name} {number}"))
        if number and found["calls"] > 1:
            break
    assert found["calls"] > 0
    assert {key: found[key] for key in WRONG} == dict.fromkeys(WRONG, 0)
