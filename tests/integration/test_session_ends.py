"""Clients end sessions, by DELETE or by a header on a last request: the gateway in front of a fake router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.io import routes
from tests.support.fakes.gateway_peers import Stack, refusal, stack
from tests.support.gateway_requests import BODIES, ask, finished, post
from tests.support.waiting import eventually

CHAT = BODIES[Endpoint.CHAT]
LAST = {"X-Session-ID": "s", "X-Pointsman-Session-End": "1"}


@asynccontextmanager
async def owned(folder: Path, **settings: Any) -> AsyncIterator[Stack]:
    """Run a stack whose router owns its pool."""
    async with stack(folder, **settings) as up:
        await own(up)
        yield up


async def own(up: Stack, epoch: int = 1) -> None:
    owner = placement_pb2.Owner(router_id="fake", address=up.router.address, epoch=epoch)
    hellos = len(up.router.hellos)
    for pool in up.router.pools:
        pool.owner.CopyFrom(owner)
    await up.router.tell_fleet()
    await up.router.until(lambda: len(up.router.hellos) > hellos)  # the hello to the owner of a new epoch


async def delete(up: Stack, path: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as http, http.delete(up.url + path, headers=headers) as answer:
        assert (await answer.read() == b"") is (answer.status == 204)
        return answer.status


async def ended_sessions(up: Stack, count: int = 1) -> list[tuple[str, str]]:
    await up.router.until(lambda: len(up.router.ended_sessions) >= count)
    return up.router.ended_sessions


async def confirmed(up: Stack) -> None:
    await eventually(lambda: not up.gateway.router.unconfirmed_ends, "the owner has confirmed all ends")


async def test_a_delete_ends_the_session_and_a_second_one_too(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        assert [await delete(up, "/v1/sessions/s") for _ in range(2)] == [204, 204]
        assert await ended_sessions(up, 2) == [("default", "s")] * 2
        await confirmed(up)
        assert await delete(up, "/v1/sessions/") == 404
        assert (await ask(up, "/v1/sessions/s"))[0] == 405


async def test_a_session_of_a_request_has_the_name_that_a_delete_gives_it(tmp_path: Path) -> None:
    names = {"plain": "plain", "a/b c": "a%2Fb%20c", "x" * 1_000: "x" * 1_000, "größe": "gr%C3%B6%C3%9Fe"}
    async with owned(tmp_path) as up:
        for name, path in names.items():
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers={"X-Session-ID": name}))[0] == 200
            assert await delete(up, f"/v1/sessions/{path}") == 204
            assert (await post(up, Endpoint.CHAT.value, json=CHAT | {"session_id": name}))[0] == 200
            assert await delete(up, f"/v1/sessions/{path}") == 204
        ended = await ended_sessions(up, 2 * len(names))
        assert ended[::2] == ended[1::2]
        assert ended == [(place.tenant, place.session_id) for place in up.router.places]
        assert max(len(session_id) for _, session_id in ended) <= 128


async def test_a_tenant_ends_only_its_own_sessions(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:sk-red\nblue:sk-blue\n")
    async with owned(tmp_path, api_keys_file=file) as up:
        assert await delete(up, "/v1/sessions/s") == 401
        assert await delete(up, "/v1/sessions/s", Authorization="Bearer sk-red") == 204
        assert await delete(up, "/v1/sessions/s", **{"x-api-key": "sk-blue"}) == 204
        assert await ended_sessions(up, 2) == [("red", "s"), ("blue", "s")]


async def test_an_end_counts_as_a_request_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:sk-red requests_per_minute=2\nred:sk-other\n")
    async with owned(tmp_path, api_keys_file=file) as up:
        statuses = [await delete(up, "/v1/sessions/s", **{"x-api-key": "sk-red"}) for _ in range(3)]
        assert statuses == [204, 204, 429]
        status, answer, _ = await post(up, Endpoint.CHAT.value, json=CHAT, headers={"x-api-key": "sk-red"})
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        async with aiohttp.ClientSession() as http:
            for method, path in (
                ("DELETE", "/v1/sessions/s"),
                ("GET", "/v1/responses/resp_x"),
                ("POST", "/v1/responses/resp_x/cancel"),
            ):
                async with http.request(method, up.url + path, headers={"x-api-key": "sk-red"}) as refused:
                    assert refused.status == 429, path
                    assert 0 < int(refused.headers["Retry-After"]) <= 60
                    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert await delete(up, "/v1/sessions/s", **{"x-api-key": "sk-other"}) == 204
        assert await ended_sessions(up, 3) == [("red", "s")] * 3


async def test_a_client_without_limits_ends_a_bounded_number_of_sessions(tmp_path: Path) -> None:
    """A thousand calls as fast as they go: the router is told of few more than may be told at once."""
    file = tmp_path / "keys"
    file.write_text("red:sk-red\nblue:sk-blue\n")
    async with owned(tmp_path, api_keys_file=file) as up, aiohttp.ClientSession() as http:
        began = time.monotonic()

        async def end(number: int) -> int:
            url, headers = f"{up.url}/v1/sessions/{number}", {"x-api-key": "sk-red"}
            async with http.delete(url, headers=headers) as answer:
                assert answer.status != 429 or answer.headers["Retry-After"] == "1"
                return answer.status

        statuses = await asyncio.gather(*(end(number) for number in range(1_000)))
        most = routes.SESSION_ENDS_AT_ONCE + (time.monotonic() - began) * routes.SESSION_ENDS_PER_S + 1
        assert routes.SESSION_ENDS_AT_ONCE <= statuses.count(204) <= most
        assert await delete(up, "/v1/sessions/s", **{"x-api-key": "sk-blue"}) == 204
        await confirmed(up)
        # An end that is confirmed late is told twice.
        assert len(set(up.router.ended_sessions)) == statuses.count(204) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_last_request_ends_its_session_when_it_is_answered(tmp_path: Path, stream: bool) -> None:
    async with owned(tmp_path) as up:
        async with (
            aiohttp.ClientSession() as http,
            http.post(up.url + Endpoint.CHAT.value, json=CHAT | {"stream": stream}, headers=LAST) as answer,
        ):
            assert answer.status == 200
            await answer.read()
        assert await ended_sessions(up) == [("default", "s")]
        assert up.router.order[-2:] == ["finished", "end_session"]
        sent = {name.lower() for name in up.engines[0].requests[-1][2]}
        assert "x-pointsman-session-end" not in sent


async def test_dynamos_final_mark_ends_a_session_unless_pointsmans_header_says_otherwise(tmp_path: Path) -> None:
    final = {"X-Dynamo-Session-ID": "d", "X-Dynamo-Session-Final": "true"}
    async with owned(tmp_path) as up:
        for headers in (final | {"X-Dynamo-Session-Final": "perhaps"}, final | {"X-Pointsman-Session-End": "0"}, final):
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=headers))[0] == 200
        assert await ended_sessions(up) == [("default", "d")]
        assert up.router.order[-2:] == ["finished", "end_session"]
    async with owned(tmp_path, agent_headers=False) as up:
        assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=final))[0] == 200
        await delete(up, "/v1/sessions/after")
        assert await ended_sessions(up) == [("default", "after")]


async def test_a_last_request_without_a_session_id_ends_the_session_that_its_prompt_continues(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        for headers in ({}, {"X-Pointsman-Session-End": "1"}):
            assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=headers))[0] == 200
        [end] = await ended_sessions(up)
        assert end == ("default", up.router.places[0].session_id) == ("default", up.router.places[1].session_id)


@pytest.mark.parametrize(("mode", "status"), [("400", 400), ("500", 500), ("cut", 200)])
async def test_a_last_request_that_fails_ends_its_session(tmp_path: Path, mode: str, status: int) -> None:
    async with owned(tmp_path) as up:
        for engine in up.engines:
            engine.mode = mode
        body = CHAT | {"stream": mode == "cut"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(up.url + Endpoint.CHAT.value, json=body, headers=LAST) as answer,
        ):
            assert answer.status == status
            await answer.read()
        assert await ended_sessions(up) == [("default", "s")]
        assert len(up.router.ended_sessions) == 1, "after its last attempt"


async def test_a_last_request_that_no_instance_takes_ends_its_session(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        up.router.placer = lambda request: refusal(request, 8, "saturated", 1)
        assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=LAST))[0] == 429
        assert await ended_sessions(up) == [("default", "s")]


async def test_a_last_request_whose_client_leaves_ends_its_session(tmp_path: Path) -> None:
    async with owned(tmp_path, engines=1) as up:
        up.engines[0].mode = "hang"
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(http.post(up.url + Endpoint.CHAT.value, json=CHAT, headers=LAST))
            await eventually(lambda: up.engines[0].open == 1, "the engine has the request")
            assert up.router.ended_sessions == []
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await ended_sessions(up) == [("default", "s")]
        assert (await finished(up)).outcome == placement_pb2.OUTCOME_CANCELLED


async def test_requests_that_are_refused_before_they_are_placed_end_nothing(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        for body, headers in (
            (CHAT | {"model": "unknown"}, LAST),
            (CHAT, LAST | {"X-Pointsman-Session-End": "yes"}),
            (CHAT, LAST | {"X-Pointsman-Session-End": "0"}),
        ):
            await post(up, Endpoint.CHAT.value, json=body, headers=headers)
        assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers=LAST | {"X-Pointsman-Session-End": "2"}))[
            0
        ] == 400
        await delete(up, "/v1/sessions/after")
        assert await ended_sessions(up) == [("default", "after")]


async def test_an_end_that_was_lost_with_the_stream_is_sent_on_the_next_one(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        up.router.confirms_ends = False
        await delete(up, "/v1/sessions/lost")
        await ended_sessions(up)
        port = int(up.router.address.rpartition(":")[2])
        await up.router.stop()
        await eventually(lambda: not up.gateway.router.connected, "the stream has ended")
        assert await delete(up, "/v1/sessions/while-away") == 204
        up.router.ended_sessions.clear()
        up.router.confirms_ends = True
        await up.router.start(port)
        assert await ended_sessions(up, 2) == [("default", "lost"), ("default", "while-away")]
        await confirmed(up)


async def test_a_new_owner_is_told_of_what_the_earlier_one_has_not_confirmed(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        up.router.confirms_ends = False
        await delete(up, "/v1/sessions/s")
        await ended_sessions(up)
        up.router.confirms_ends = True
        await own(up, epoch=2)
        assert await ended_sessions(up, 2) == [("default", "s")] * 2
        await confirmed(up)
        await own(up, epoch=3)
        await delete(up, "/v1/sessions/next")
        assert await ended_sessions(up, 3) == [("default", "s"), ("default", "s"), ("default", "next")]


async def test_a_session_that_has_begun_again_is_not_ended_by_its_earlier_end(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        up.router.confirms_ends = False
        await delete(up, "/v1/sessions/s")
        await ended_sessions(up)
        assert (await post(up, Endpoint.CHAT.value, json=CHAT, headers={"X-Session-ID": "s"}))[0] == 200
        await own(up, epoch=2)
        await delete(up, "/v1/sessions/next")
        assert await ended_sessions(up, 2) == [("default", "s"), ("default", "next")]


async def test_ends_are_counted(tmp_path: Path) -> None:
    async with owned(tmp_path) as up:
        await delete(up, "/v1/sessions/s")
        await post(up, Endpoint.CHAT.value, json=CHAT, headers=LAST)
        await ended_sessions(up, 2)
        async with aiohttp.ClientSession() as http, http.get(f"{up.url}/metrics") as answer:
            page = await answer.text()
        for line in ('session_ends_total{by="delete"} 1.0', 'session_ends_total{by="header"} 1.0'):
            assert f"pointsman_gateway_{line}" in page
        assert "pointsman_gateway_session_ends_unconfirmed" in page


async def test_engines_are_told_of_a_last_request_where_that_is_switched_on(tmp_path: Path) -> None:
    mark: dict[str, Any] = {"kv_transfer_params": {"pointsman_session_end": True}}
    for on in (False, True):
        async with owned(tmp_path, engines=1, mark_session_ends=on) as up:
            for headers in ({}, LAST):
                for endpoint in (Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.MESSAGES, Endpoint.RESPONSES):
                    body = BODIES[endpoint] | {"kv_transfer_params": {"do_remote_decode": True}}
                    assert (await post(up, endpoint.value, json=body, headers=headers))[0] == 200
            sent: list[dict[str, Any]] = [
                {name: body[name] for name in body.keys() & mark.keys()}
                for path, body, _ in up.engines[0].requests
                if path != "/tokenize"
            ]
            assert sent == [*[{}] * 4, *[mark if on else {}] * 3, {}]
