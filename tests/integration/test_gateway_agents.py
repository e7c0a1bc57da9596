"""Agents' programs name their sessions by their own headers: the gateway in front of a fake router and fake engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.request.agent_headers import HEADERS
from tests.support.fakes.gateway_peers import stack
from tests.support.gateway_requests import BODIES, post
from tests.support.repository import REPOSITORY

CHAT = BODIES[Endpoint.CHAT]
PROGRAMS = json.loads((REPOSITORY / "tests/data/agent_headers.json").read_text())["programs"]
DYNAMO = {"X-Dynamo-Session-ID": "d", "X-Dynamo-Parent-Session-ID": "p"}
LAST = DYNAMO | {"X-Dynamo-Session-Final": "true"}


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda program: f"{program['program']} {program['version'].split()[0]}"
)
async def test_a_programs_requests_are_placed_by_what_it_says_of_them(tmp_path: Path, program: dict[str, Any]) -> None:
    async with stack(tmp_path, engines=1) as up:
        for request in program["requests"]:
            endpoint = Endpoint(request["path"].partition("?")[0])
            status, _, _ = await post(
                up, request["path"], json=BODIES[endpoint] | request["body"], headers=request["headers"]
            )
            assert status == 200
            place, read = up.router.places[-1], request["read"]
            assert (place.session_id, place.agent_id) == (read["session"], read.get("agent", ""))
            assert place.agent_parent_session_id == read.get("parent", "")
            assert not place.parent_session_id, "what a program says of a parent parks and lets in nothing"
            sent = {name.lower(): value for name, value in up.engines[0].requests[-1][2].items()}
            assert sent["x-session-id"] == read["session"]
            assert sent.keys() & {name.lower() for name in HEADERS} == {"x-session-id"}


async def test_the_sessions_of_tenants_that_are_named_alike_are_two(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:sk-red\nblue:sk-blue\n")
    async with stack(tmp_path, engines=1, api_keys_file=file) as up:
        for key in ("sk-red", "sk-blue"):
            headers = {
                "Authorization": f"Bearer {key}",
                "X-Claude-Code-Session-Id": "run",
                "X-Claude-Code-Agent-Id": "a",
            }
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=headers))[0] == 200
        assert [(place.tenant, place.session_id) for place in up.router.places] == [("red", "run:a"), ("blue", "run:a")]
        assert [headers["X-Session-ID"] for _, _, headers in up.engines[0].requests] == ["red/run:a", "blue/run:a"]


async def test_values_that_mean_nothing_are_no_fault_of_the_request(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        for value in ("", "x" * 1_000, "größe", "a b", '{"a": 1}'):
            headers = {name: value for name in HEADERS if name != "X-Session-ID"}
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=headers))[0] == 200
        assert all(0 < len(place.session_id) <= 128 for place in up.router.places)
        assert all(len(place.agent_parent_session_id) <= 128 for place in up.router.places)
        assert up.router.ended_sessions == []


async def test_programs_headers_are_not_read_where_that_is_switched_off(tmp_path: Path) -> None:
    async with stack(tmp_path, agent_headers=False) as up:
        for headers in (LAST, LAST | {"X-Session-ID": "own"}):
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=headers))[0] == 200
        by_prompt, named = up.router.places
        assert by_prompt.session_id.startswith("s-")
        assert named.session_id == "own"
        assert not any(place.HasField("agent_parent_session_id") for place in up.router.places)
        assert up.router.ended_sessions == []
