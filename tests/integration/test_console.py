"""The console's HTTP side: access control, JSON, the stream of decisions, and what it lets a browser do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from google.protobuf import json_format

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.io.settings import Tokens
from pointsman_router.io.console import console as console_server
from pointsman_router.io.console import decision_stream
from pointsman_router.io.main import RouterServer
from pointsman_router.io.settings import RouterSettings
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import WITHIN_S, eventually

TOKENS = {"agent": "a-token", "gateway": "g-token", "operator": "o-token"}


class Browser:
    """An HTTP client of one console."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self.http = http
        self.address = address

    async def get(self, path: str, **headers: str) -> tuple[int, str, Any]:
        async with self.http.get(self.address + path, headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers

    async def call(self, method: str, request: Any = None, token: str = "", **headers: str) -> tuple[int, Any]:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with self.http.post(f"{self.address}/api/{method}", json=request or {}, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def console(**changes: Any) -> AsyncIterator[tuple[RouterServer, Client, Browser]]:
    """A router with a console, and clients of both."""
    async with (
        running(**{"console_listen": "127.0.0.1:0", **changes}) as (server, client),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WITHIN_S)) as http,
    ):
        assert server.console is not None
        yield server, client, Browser(http, server.console.address)


def tokens() -> Tokens:
    given: dict[str, Any] = {f"{role}_token": token for role, token in TOKENS.items()}
    return Tokens(**given, token_dir=None)


@pytest.mark.parametrize(
    ("token", "reads", "operates"), [("", 401, 401), ("wrong", 401, 401), ("a-token", 403, 403), ("g-token", 200, 403)]
)
async def test_each_role_may_do_what_it_may_over_grpc(token: str, reads: int, operates: int) -> None:
    async with console(tokens=tokens()) as (_, _, browser):
        for method in ("ListInstances", "ListDecisions", "ListSessions", "ListReplicas", "SummarizeDecisions"):
            assert (await browser.call(method, token=token))[0] == reads, method
        for method in ("Drain", "SetInstanceOrder", "SetPolicy"):
            assert (await browser.call(method, token=token))[0] == operates, method
        if reads != 200:
            assert (await browser.get("/api/decisions", Authorization=f"Bearer {token}"))[0] == reads


async def test_who_is_told_of_roles_without_being_refused() -> None:
    async with console(tokens=tokens()) as (_, _, browser):
        answers = {
            token: json.loads((await browser.get("/api/role", Authorization=f"Bearer {token}"))[1])
            for token in ("wrong", "a-token", "g-token", "o-token")
        }
    nobody = {"role": "", "open": False, "read": False, "operate": False}
    assert answers == {
        "wrong": nobody,
        "a-token": nobody | {"role": "agent"},
        "g-token": nobody | {"role": "gateway", "read": True},
        "o-token": nobody | {"role": "operator", "read": True, "operate": True},
    }


async def test_an_operator_drains_and_changes_the_policy() -> None:
    async with console() as (_, client, browser):
        await Report(client).join("a")
        status, answer = await browser.call("Drain", {"instanceId": "a"})
        assert (status, answer["instance"]["state"]) == (200, "INSTANCE_STATE_DRAINING")
        status, answer = await browser.call("Drain", {"instanceId": "a", "resume": True})
        assert (status, answer["instance"]["state"]) == (200, "INSTANCE_STATE_READY")
        status, answer = await browser.call("SetInstanceOrder", {"instanceId": "a", "cordoned": True, "weight": 0})
        assert (status, answer["instance"]["state"]) == (200, "INSTANCE_STATE_CORDONED")
        assert answer["order"]["weight"] == 0
        status, answer = await browser.call("SetInstanceOrder", {"instanceId": "a", "weight": "NaN"})
        assert (status, answer["message"]) == (400, "weight: must be 0 to 1")
        status, answer = await browser.call("SetPolicy", {"policy": {"name": "lmetric"}})
        assert (status, answer["policy"]["name"]) == (200, "lmetric")
        assert (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).policy.name == "lmetric"


@pytest.mark.parametrize(
    ("method", "body", "status", "code"),
    [
        ("Drain", '{"instanceId": "nobody"}', 404, "NOT_FOUND"),
        ("SetPolicy", '{"policy": {"name": "nonsense"}}', 400, "INVALID_ARGUMENT"),
        ("ListInstances", '{"nonsense": 1}', 400, "INVALID_ARGUMENT"),
        ("ListInstances", '{"model": ', 400, "INVALID_ARGUMENT"),
        ("ListInstances", b"\xff", 400, "INVALID_ARGUMENT"),
        ("ListDecisions", '{"pageSize": -1}', 400, "INVALID_ARGUMENT"),
        ("SummarizeDecisions", '{"last": 10001}', 400, "INVALID_ARGUMENT"),
        ("ListSessions", '{"pageToken": "none"}', 400, "INVALID_ARGUMENT"),
        ("WatchDecisions", "{}", 404, "NOT_FOUND"),
        ("Nonsense", "{}", 404, "NOT_FOUND"),
        ("ListInstances", '{"model": "' + 70_000 * "x" + '"}', 413, "HTTP"),
    ],
)
async def test_errors_are_grpcs_own(method: str, body: str | bytes, status: int, code: str) -> None:
    async with console() as (_, _, browser):
        headers = {"Content-Type": "application/json"}
        async with browser.http.post(f"{browser.address}/api/{method}", data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (status, code)
            assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "application/json; charset=nonsense"}, 400, "INVALID_ARGUMENT"),
        ({"Content-Type": "application/json", "Host": "[::1"}, 403, "PERMISSION_DENIED"),
    ],
)
async def test_headers_that_cannot_be_read_are_refused(headers: dict[str, str], status: int, code: str) -> None:
    async with (
        console() as (_, _, browser),
        browser.http.post(f"{browser.address}/api/ListInstances", data=b"{}", headers=headers) as answer,
    ):
        assert (answer.status, (await answer.json())["code"]) == (status, code)


async def test_the_answers_are_the_messages_of_fleet_service() -> None:
    async with console() as (_, client, browser):
        for name in ("a", "b"):
            await Report(client).join(name, keys=[1, 2, 3])
        session = Session(client)
        await session.hello()
        placement = await session.place("r", session_id="s", tenant="t")
        await session.finish("r", cached_tokens=16, timings=placement_pb2.Timings(first_token_ms=40.0))

        async def ended() -> bool:
            _, answer = await browser.call("GetDecision", {"decisionId": "r"})
            return bool(answer["decision"]["outcome"] == "DECISION_OUTCOME_OK")

        await eventually(ended, "the end of the request")
        for method, request in (
            ("GetDecision", fleet_pb2.GetDecisionRequest(decision_id=placement.decision_id)),
            ("ListDecisions", fleet_pb2.ListDecisionsRequest()),
            ("SummarizeDecisions", fleet_pb2.SummarizeDecisionsRequest()),
            ("ListPolicies", fleet_pb2.ListPoliciesRequest()),
            ("WhatIf", fleet_pb2.WhatIfRequest(last=1, policy=fleet_pb2.Policy(name="random"))),
        ):
            over_grpc = json_format.MessageToDict(await getattr(client.fleet, method)(request))
            assert await browser.call(method, json_format.MessageToDict(request)) == (200, over_grpc), method
        status, answer = await browser.call("ListInstances")
        assert status == 200
        assert [instance["instance"]["instanceId"] for instance in answer["instances"]] == ["a", "b"]
        assert [instance["keys"] for instance in answer["instances"]] == ["3", "3"]


async def test_decisions_are_streamed_as_they_are_made_and_as_they_end() -> None:
    async with console() as (_, client, browser):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        async with browser.http.get(f"{browser.address}/api/decisions") as stream:
            assert stream.content_type == "text/event-stream"
            await session.place("r", session_id="s")
            assert [(decision["requestId"], decision["outcome"]) for decision in await updates(stream)] == [
                ("r", "DECISION_OUTCOME_OPEN")
            ]
            await session.finish("r")
            (ended,) = await updates(stream)
            assert (ended["requestId"], ended["outcome"], "candidates" in ended) == ("r", "DECISION_OUTCOME_OK", False)


async def test_a_busy_fleet_is_thinned_out_and_nobody_is_watched_for_in_vain() -> None:
    async with console() as (server, client, browser):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        log = server.router.decisions
        async with browser.http.get(f"{browser.address}/api/decisions") as stream:
            await eventually(lambda: is_(log.watched), "the viewer's coming")
            total = 3 * decision_stream.AT_MOST
            for number in range(total):
                await session.send(
                    place=placement_pb2.PlacementRequest(request_id=f"r{number}", model="m", input_tokens=9)
                )
            seen, passed = 0, 0
            while seen + passed < total:
                event = await next_event(stream)
                assert len(event["decisions"]) <= decision_stream.AT_MOST
                seen, passed = seen + len(event["decisions"]), passed + event["skipped"]
            assert seen + passed == total == len(log)
        await eventually(lambda: is_(not log.watched), "the viewer's leaving")


async def test_a_viewer_that_does_not_read_is_dropped() -> None:
    async with console() as (server, _, browser):
        assert server.console is not None
        with socket.socket() as deaf:
            deaf.setblocking(False)
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", urlsplit(browser.address).port))
            await loop.sock_sendall(deaf, b"GET /api/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await eventually(lambda: is_(server.router.decisions.watched), "the viewer's coming")
            # More than the kernel buffers for the viewer, and then more than may wait in the console.
            for _ in range(4 * decision_stream.WAITING):
                server.console.decisions.tell(f": {'x' * 100_000}\n\n")
                await asyncio.sleep(0)
            await eventually(lambda: is_(not server.router.decisions.watched), "the viewer's end")


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_server, "MAX_VIEWERS", 1)
    async with console() as (_, _, browser), browser.http.get(browser.address + "/api/decisions"):
        status, text, _ = await browser.get("/api/decisions")
        assert (status, json.loads(text)["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert (await browser.call("ListInstances"))[0] == 200


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with console(tokens=tokens()) as (_, _, browser):
        status, page, headers = await browser.get("/")
        assert (status, "<script>" in page, "style=" in page) == (200, False, False)
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert (await browser.get("/main.js"))[2]["Content-Type"].startswith("text/javascript")
        for path in ("/../console.py", "/%2e%2e/console.py", "/console.py", "/nonsense"):
            assert (await browser.get(path))[0] == 404


async def test_pages_of_other_sites_get_no_answer() -> None:
    async with console() as (_, client, browser):
        await Report(client).join("a")
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Host": "evil.example:8080"},
        ):
            status, answer = await browser.call("Drain", {"instanceId": "a"}, **headers)
            assert (status, answer["code"]) == (403, "PERMISSION_DENIED"), headers
        # A form of another site can send this without a CORS preflight.
        async with browser.http.post(f"{browser.address}/api/Drain", data='{"instanceId": "a"}') as answered:
            assert answered.status == 400
        assert (await client.instances())["a"].state == fleet_pb2.INSTANCE_STATE_READY


def test_without_tokens_the_console_stays_on_the_loopback_interface() -> None:
    settings = RouterSettings(listen="127.0.0.1:0", metrics_listen="", console_listen="0.0.0.0:0")
    with pytest.raises(ValueError, match=r"refusing to listen on 0\.0\.0\.0:0"):
        RouterServer(settings, Tokens(agent_token="", gateway_token="", operator_token="", token_dir=None))


async def is_(value: bool) -> bool:
    return value


async def next_event(stream: aiohttp.ClientResponse) -> Any:
    """Return the next event's data; comments are skipped."""
    while True:
        text = (await asyncio.wait_for(stream.content.readuntil(b"\n\n"), WITHIN_S)).decode()
        if text.startswith("data: "):
            return json.loads(text.removeprefix("data: "))


async def updates(stream: aiohttp.ClientResponse) -> list[Any]:
    decisions = (await next_event(stream))["decisions"]
    assert isinstance(decisions, list)
    return decisions
