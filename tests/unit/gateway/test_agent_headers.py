"""Sessions, and who started them, by the headers of agents' programs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.pool_state import PoolState
from pointsman_gateway.core.rate_limits import KeyCharge
from pointsman_gateway.core.request.agent_headers import HEADERS, AgentIdentity, agent_identity
from pointsman_gateway.core.request.prepare import RequestPreparer
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.token_cache import TokenCache
from tests.support.repository import REPOSITORY

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SEEN = [
    pytest.param(request, id=f"{program['program']} {program['version'].split()[0]}, {request['of']}")
    for program in json.loads((REPOSITORY / "tests/data/agent_headers.json").read_text())["programs"]
    for request in program["requests"]
]
CLAUDE = {"X-Claude-Code-Session-Id": "run", "X-Claude-Code-Agent-Id": "a2", "X-Claude-Code-Parent-Agent-Id": "a1"}


def prepared(headers: dict[str, str], body: dict[str, Any] | None = None, *, read: bool = True) -> RequestContext:
    """Return the context of a chat request, completed."""
    call = parse(Endpoint.CHAT, json.dumps(CHAT | (body or {})).encode())
    state = PoolState(placement_pb2.Pool(model="m"))
    fields = Headers(headers.items())
    context = RequestContext("r", "r", call, state, "", ANYONE, fields, KeyCharge(), time.monotonic())
    preparer = RequestPreparer(TokenCache(1 << 20), agent_headers=read)
    preparer.prepare(context, preparer.estimate(context), time.monotonic(), dry=False)
    return context


@pytest.mark.parametrize("request_", SEEN)
def test_what_programs_send_is_read(request_: dict[str, Any]) -> None:
    headers, read = request_["headers"], request_["read"]
    assert agent_identity(Headers(headers.items())) == AgentIdentity(**read)
    body = {name: request_["body"][name] for name in ("prompt_cache_key",) if name in request_["body"]}
    context = prepared(headers, body)
    placement = context.placement
    assert placement.session_id == read["session"]
    assert (placement.agent_id, placement.agent_parent_session_id) == (read.get("agent", ""), read.get("parent", ""))
    assert context.ends_session is read.get("final", False)
    sent = {name.lower() for name in context.upstream_headers}
    assert sent & {name.lower() for name in HEADERS} == {"x-session-id"}


def test_agents_of_one_run_that_send_one_cache_key_have_sessions_of_their_own() -> None:
    body = {"prompt_cache_key": "run"}
    child = {"session-id": "run", "thread-id": "t2", "x-codex-parent-thread-id": "run"}
    assert prepared(child, body).placement.session_id == "run:t2"
    assert prepared({"session-id": "run", "thread-id": "run"}, body).placement.session_id == "run"


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        (CLAUDE | {"X-Session-ID": "own", "X-Dynamo-Session-ID": "d"}, {"session_id": "body"}, "own"),
        (CLAUDE | {"X-Dynamo-Session-ID": "d"}, {"session_id": "body"}, "body"),
        (CLAUDE | {"X-Dynamo-Session-ID": "d"}, {"prompt_cache_key": "cache"}, "d"),
        (CLAUDE | {"session-id": "codex", "x-session-affinity": "last"}, {}, "run:a2"),
        (CLAUDE | {"X-Session-ID": "undefined"}, {}, "run:a2"),
        ({"session_id": "s", "x-session-affinity": "last"}, {}, "s"),
        ({"thread-id": "t", "X-Claude-Code-Agent-Id": "a"}, {"prompt_cache_key": "cache"}, "cache"),
    ],
)
def test_one_name_of_a_session_comes_before_another(
    headers: dict[str, str], body: dict[str, Any], session: str
) -> None:
    assert prepared(headers, body).placement.session_id == session


def test_the_headers_of_one_program_count_alone() -> None:
    placement = prepared(CLAUDE | {"X-Session-ID": "own"}).placement
    assert not placement.HasField("agent_id")
    assert not placement.HasField("agent_parent_session_id")
    placement = prepared({"X-Dynamo-Session-ID": "d", "X-Dynamo-Parent-Session-ID": "d"}).placement
    assert not placement.HasField("agent_parent_session_id"), "it names itself"
    placement = prepared(CLAUDE | {"X-Claude-Code-Parent-Agent-Id": "a2"}).placement
    assert placement.agent_parent_session_id == "run"


def test_the_switch_turns_it_off() -> None:
    dynamo = {"X-Dynamo-Session-ID": "d", "X-Dynamo-Session-Final": "true"}
    off = prepared(CLAUDE | dynamo, {"prompt_cache_key": "cache"}, read=False)
    assert (off.placement.session_id, off.ends_session) == ("cache", False)
    assert not off.placement.HasField("agent_id")
    assert not off.placement.HasField("agent_parent_session_id")
    own = {"X-Session-ID": "own", "X-Parent-Session-Id": "parent", "X-Pointsman-Session-End": "1"}
    context = prepared(own, read=False)
    assert (context.placement.session_id, context.ends_session) == ("own", True)
    assert not context.placement.HasField("agent_parent_session_id")


@pytest.mark.parametrize(
    ("headers", "ends"),
    [
        ({"X-Dynamo-Session-Final": "true"}, True),
        ({"X-Dynamo-Session-Final": "TRUE"}, True),
        ({"X-Dynamo-Session-Final": "1"}, True),
        ({"X-Dynamo-Session-Final": "false"}, False),
        ({"X-Dynamo-Session-Final": "soon"}, False),
        ({"X-Dynamo-Session-Final": "true", "X-Pointsman-Session-End": "0"}, False),
        ({"X-Dynamo-Session-Final": "false", "X-Pointsman-Session-End": "1"}, True),
    ],
)
def test_a_final_mark_ends_the_session_unless_pointsmans_own_header_says_otherwise(
    headers: dict[str, str], ends: bool
) -> None:
    assert prepared(headers | {"X-Dynamo-Session-ID": "d"}).ends_session is ends
    assert prepared(headers).ends_session is ends, "of a session that is known by its prompt"


TEXTS = st.text(st.characters(max_codepoint=255), max_size=300)


@given(st.dictionaries(st.sampled_from(HEADERS), TEXTS))
def test_no_value_is_refused_and_all_are_bounded(headers: dict[str, str]) -> None:
    placement = prepared(headers).placement
    for text in (placement.session_id, placement.agent_id, placement.agent_parent_session_id):
        assert len(text) <= 128
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text
    assert placement.session_id
