"""Session admission over real sockets: clients of a real gateway are parked, let in, and refused with their place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from pointsman_router.core.admission import session_admission
from pointsman_router.io.main import RouterServer
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, until_ready
from tests.support.router import Client, Report, running
from tests.support.tcp_proxies import Link
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually

TOKENS = 320
# KV of the engine, tokens: one session fits, two do not.
CAPACITY = TOKENS * 9 // 5


@asynccontextmanager
async def full_caches(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: Link | None = None,
    placement_timeout_s: float = 10.0,
    **settings: Any,
) -> AsyncIterator[tuple[RouterServer, Client, FakeEngine, str, aiohttp.ClientSession]]:
    """One instance whose cache has room for one open session and an idle one; a session with an open answer is under way. The
    gateway reaches the router through `link`, if there is one."""
    monkeypatch.setattr(session_admission, "ARM_SHARE", 0.0)
    monkeypatch.setattr(session_admission, "ARM_SIZE", 0.1)
    engine = FakeEngine(load_tokenizer(make_tokenizer(folder / "model")), hold=asyncio.Event())
    async with engine.serve(), running(session_admission=True, **settings) as (server, client):
        where: dict[str, Any] = {"model": MODEL, "url": engine.url, "prefix_mode": agent_pb2.PREFIX_MODE_NONE}
        await Report(client).join("a", kv_capacity_tokens=CAPACITY, **where)
        if link is not None:
            link.lead_to(server.port)
        gateway_settings = GatewaySettings(
            listen="127.0.0.1:0",
            routers=[link.address if link is not None else f"127.0.0.1:{server.port}"],
            placement_timeout_s=placement_timeout_s,
            router_grace_s=0.2,
            drain_timeout_s=0.5,
            expose_placement=True,
        )
        async with serving(gateway_settings) as (gateway, url), aiohttp.ClientSession() as http:
            await until_ready(gateway)
            first = await http.post(f"{url}/v1/completions", json=asked("first"))
            assert first.status == 200
            pools = server.router.state.admission.pools
            await eventually(lambda: pools[MODEL].armed, "the pool is armed")
            yield server, client, engine, url, http
            first.close()


def asked(session: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(range(TOKENS)), "stream": True, "session_id": session}


async def test_a_client_whose_session_does_not_fit_gets_429_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_caches(tmp_path, monkeypatch, admission_standard_s=1.0) as (server, client, _, url, _http):
        official = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with official:
            with pytest.raises(openai.RateLimitError) as refused:
                await official.completions.create(model=MODEL, prompt=list(range(TOKENS)))
        headers = refused.value.response.headers
        assert int(headers["Retry-After"]) >= 1
        assert headers["X-Pointsman-Queue-Place"] == "1"
        admission = (await client.fleet.ListReplicas(fleet_pb2.ListReplicasRequest())).pools[0].admission
        assert (admission.armed, admission.sessions, admission.capacity) == (True, 1, CAPACITY)
        server.router.state.check_invariants()


async def test_a_parked_client_outwaits_its_gateways_timeout_and_is_let_in_when_another_session_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_caches(tmp_path, monkeypatch, placement_timeout_s=0.5) as (server, client, engine, url, http):
        parked = server.router.state.parked_requests.queue
        second = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=asked("second")))
        await eventually(lambda: parked.count(MODEL) == 1, "it is parked")
        # Longer than the gateway waits for a placement of a request that is not parked.
        await asyncio.sleep(1.0)
        assert parked.count(MODEL) == 1
        assert engine.hold is not None
        engine.hold.set()
        answer = await second
        assert answer.status == 200
        decision_id = answer.headers["X-Pointsman-Decision"]
        request = fleet_pb2.GetDecisionRequest(decision_id=decision_id)
        admission = (await client.fleet.GetDecision(request)).decision.admission
        assert admission.reason == "fits"
        assert admission.waited.ToNanoseconds() > 0
        answer.close()


async def test_a_parked_client_whose_router_is_gone_waits_within_its_bound_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not placed past the admission. New requests are placed without a router meanwhile."""
    known, wait_parked = asyncio.Event(), RouterClient._wait_parked

    def learn(client: RouterClient, session: Any, parked: Any) -> None:
        wait_parked(client, session, parked)
        known.set()

    monkeypatch.setattr(RouterClient, "_wait_parked", learn)
    async with (
        Link(0) as link,
        full_caches(tmp_path, monkeypatch, link, admission_standard_s=3.0) as (_, _client, _engine, url, http),
    ):
        loop = asyncio.get_running_loop()
        began = loop.time()
        second = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=asked("second")))
        await eventually(known.is_set, "the gateway knows that it is parked")
        link.break_()
        async with http.post(f"{url}/v1/completions", json=asked("new")) as answer:
            assert (answer.status, answer.headers["X-Pointsman-Degraded"]) == (200, "1")
        async with await second as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json())["error"]["code"] == "placement_timeout"
        assert loop.time() - began > 2.9
        third = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=asked("third")))
        link.repair()
        async with await third as answer:
            assert answer.status == 200


async def test_work_under_way_is_not_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        {"role": "user", "content": "which track " * 200},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "track", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "track 9"},
    ]
    async with full_caches(tmp_path, monkeypatch) as (server, _, _engine, url, http):
        chat = {"model": MODEL, "messages": messages, "stream": True}
        async with http.post(f"{url}/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200
        async with http.post(
            f"{url}/v1/completions", json=asked("child"), headers={"X-Pointsman-Parent-Session": "first"}
        ) as answer:
            assert answer.status == 200
        async with http.post(f"{url}/v1/completions", json=asked("first")) as answer:
            assert answer.status == 200
        reasons = [logged.decision.request.admitted for logged in server.router.decisions.newest(lambda _: True)]
        assert [reason and reason.verdict.reason for reason in reasons] == ["session", "parent", "tool_result", None]
