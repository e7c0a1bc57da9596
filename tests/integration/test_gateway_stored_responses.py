"""Stored responses over several engines, gateways and tenants: each request reaches the engine that has the response, or gets an
error that says what became of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from tests.support.fakes.gateway_peers import Stack, gateway_before, serve, stack, until_ready
from tests.support.gateway_requests import BODIES
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(60)

KEYS = "red:sk-red\nblue:sk-blue\n"
BODY = BODIES[Endpoint.RESPONSES]
READ, CANCEL = ("GET", ""), ("POST", "/cancel")


@asynccontextmanager
async def two_gateways(folder: Path) -> AsyncIterator[tuple[Stack, list[str]]]:
    """Two engines, a router, and two gateways with the same keys; yield their URLs, too."""
    keys = folder / "keys"
    keys.write_text(KEYS)
    async with (
        stack(folder, api_keys_file=keys) as up,
        gateway_before(up, api_keys_file=keys) as (other, url),
    ):
        await until_ready(other)
        yield up, [up.url, url]


async def send(
    url: str, method: str, path: str, body: dict[str, Any] | None = None, key: str = "sk-red"
) -> tuple[int, str]:
    """Return the status of an answer, and its error's code or, if it is none, the id of the response."""
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"{url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        text = await answer.text()
    if answer.content_type == "text/event-stream":
        data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return answer.status, data[-1]["response"]["id"]
    found = json.loads(text)
    return answer.status, found["error"]["code"] if "error" in found else found["id"]


async def made_at(up: Stack, number: int, key: str = "sk-red", **more: Any) -> str:
    """Have the engine of this number store a response; return its id."""
    ref = up.router.pools[0].instances[number]
    before, up.router.placer = up.router.placer, lambda asked: serve(asked, ref)
    status, id_ = await send(up.url, "POST", "/v1/responses", BODY | more, key)
    up.router.placer = before
    assert status == 200
    assert id_ in up.engines[number].stored
    return id_


async def answers(urls: list[str], id_: str, key: str = "sk-red") -> set[tuple[int, str]]:
    """Read, cancel and continue a response at each gateway, streamed and not. Return status and code; "" if it worked."""
    found = set()
    for url in urls:
        for method, end in (READ, CANCEL):
            found.add(await send(url, method, f"/v1/responses/{id_}{end}", key=key))
        for stream in (False, True):
            body = BODY | {"previous_response_id": id_, "stream": stream}
            found.add(await send(url, "POST", "/v1/responses", body, key))
    return {(status, "" if status == 200 else code) for status, code in found}


async def changed(up: Stack, urls: list[str], **lists: list[placement_pb2.InstanceRef]) -> None:
    """Tell the gateways other instances of the pool, and wait until they know them."""
    pool = up.router.pools[0]
    for name, refs in lists.items():
        kept = [placement_pb2.InstanceRef.FromString(ref.SerializeToString()) for ref in refs]
        pool.ClearField(name)  # type: ignore[arg-type]
        getattr(pool, name).extend(kept)
    await up.router.tell_fleet()
    marker = f"v{len(pool.lora_names)}"
    pool.lora_names.append(marker)
    await up.router.tell_fleet()

    async def known() -> bool:
        async with aiohttp.ClientSession() as http:
            for url in urls:
                async with http.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-red"}) as answer:
                    if marker not in await answer.text():
                        return False
        return True

    while not await known():
        pass


async def test_each_gateway_finds_each_response_and_only_its_tenant_does(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        for number, engine in enumerate(up.engines):
            for stream in (False, True):
                id_ = await made_at(up, number, stream=stream)
                assert await answers(urls, id_) == {(200, "")}
                assert engine.requests[-1][1]["previous_response_id"] == id_
                before = [len(emulated.requests) for emulated in up.engines]
                assert await answers(urls, id_, key="sk-blue") == {(404, "not_found")}
                assert [len(emulated.requests) for emulated in up.engines] == before, "no engine is asked"
        assert len({id_ for engine in up.engines for id_ in engine.stored}) == sum(
            len(engine.stored) for engine in up.engines
        )


async def test_a_response_that_its_engine_lost_by_a_restart_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        lost, kept = await made_at(up, 0), await made_at(up, 1)
        up.engines[0].stored.clear()
        assert await answers(urls, lost) == {(404, "not_found")}, "the same incarnation never had it"
        first, second = up.router.pools[0].instances
        first.incarnation = "2"
        await changed(up, urls, instances=[first, second])
        assert await answers(urls, lost) == {(404, "response_lost")}
        await eventually(lambda: not up.router.reserved, "all ends are told")
        assert [(end.outcome, end.http_status) for end in up.router.finished[-4:]] == [
            (placement_pb2.OUTCOME_REJECTED, 0)
        ] * 4, "no evidence against the engine, which routers would put out for errors in a row"
        assert await answers(urls, kept) == {(200, "")}
        assert await answers(urls, await made_at(up, 0)) == {(200, "")}
        await eventually(lambda: not up.router.reserved, "no reservation is left")


async def test_an_agent_that_calls_the_same_process_another_incarnation_loses_nothing(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        first, second = up.router.pools[0].instances
        first.incarnation = "1-f00d"
        await changed(up, urls, instances=[first, second])
        assert await answers(urls, id_) == {(200, "")}


async def test_a_drained_engine_s_responses_are_read_and_not_continued(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        first, second = up.router.pools[0].instances
        await changed(up, urls, instances=[second], other_instances=[first])
        for url in urls:
            for method, end in (READ, CANCEL):
                assert await send(url, method, f"/v1/responses/{id_}{end}") == (200, id_)
        assert await answers(urls, id_) == {(200, ""), (503, "response_unavailable")}
        up.engines[0].stored.clear()
        await changed(up, urls, instances=[second], other_instances=[])
        assert await answers(urls, id_) == {(404, "response_lost")}


async def test_the_router_is_kept_from_trying_an_engine_that_comes_back(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 1)
        first, second = up.router.pools[0].instances
        await changed(up, urls, instances=[second], other_instances=[first])
        assert await answers(urls, id_) == {(200, "")}
        assert list(up.router.places[-1].exclude) == ["i0"]


async def test_a_failing_engine_is_not_replaced_by_one_without_the_response(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        up.engines[0].mode = "500"
        asked = len(up.router.places)
        body = BODY | {"previous_response_id": id_}
        assert (await send(urls[0], "POST", "/v1/responses", body))[0] == 500
        assert len(up.router.places) == asked + 1
        up.engines[0].mode = "ok"
        assert await answers(urls, id_) == {(200, "")}


async def test_an_instance_that_the_gateway_does_not_know_yet_gets_no_continuation(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        unknown = placement_pb2.InstanceRef(instance_id="new", url=up.engines[1].url, incarnation="1")
        up.router.placer = lambda asked: serve(asked, unknown)
        before = len(up.engines[1].requests)
        status, _ = await send(urls[0], "POST", "/v1/responses", BODY | {"previous_response_id": id_})
        assert (status, len(up.engines[1].requests)) == (502, before)


async def test_another_model_does_not_continue_a_response(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        up.router.pools.append(
            placement_pb2.Pool(
                model="other",
                instances=[placement_pb2.InstanceRef(instance_id="o", url=up.engines[1].url, incarnation="1")],
            )
        )
        await changed(up, urls)
        for url in urls:
            body = BODY | {"model": "other", "previous_response_id": id_}
            assert await send(url, "POST", "/v1/responses", body) == (404, "not_found")
        assert await answers(urls, id_) == {(200, "")}


async def test_before_the_fleet_is_known_no_response_is_called_lost(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        await up.router.stop()
        await eventually(lambda: not up.gateway.router.connected)
        assert (await send(urls[0], *READ[:1], f"/v1/responses/{id_}"))[0] == 200, "the last known fleet has it"
        async with gateway_before(up, api_keys_file=tmp_path / "keys") as (_, url):
            assert await send(url, "GET", f"/v1/responses/{id_}") == (503, "no_instance")
            assert await send(url, "GET", "/v1/responses/resp_1") == (404, "not_found")


async def test_a_stored_response_cannot_be_deleted(tmp_path: Path) -> None:
    """vLLM has no such call."""
    async with two_gateways(tmp_path) as (up, urls):
        id_ = await made_at(up, 0)
        assert (await send(urls[0], "DELETE", f"/v1/responses/{id_}"))[0] == 405
        assert await answers(urls, id_) == {(200, "")}
