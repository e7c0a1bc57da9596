"""Classes, weights and deadlines from a client's key and header to the router's queue, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, refusal, stack
from tests.support.router import Client, Report, running
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually

BODY = {"model": MODEL, "prompt": "each train"}
KEYS = "red:k-plain\nred:k-fast priority=interactive\nblue:k-bulk priority=batch weight=3\n"
TIMEOUT = "X-Pointsman-TTFT-Timeout"


def as_client(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}


async def test_keys_name_the_class_and_weight_that_routers_are_asked_with(tmp_path: Path) -> None:
    """A client cannot set them: the `priority` field of its body is dropped."""
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    async with stack(tmp_path, api_keys_file=keys) as up, aiohttp.ClientSession() as http:
        for key in ("k-plain", "k-fast", "k-bulk"):
            body = {**BODY, "priority": -5}
            async with http.post(f"{up.url}/v1/completions", json=body, headers=as_client(key)) as answer:
                assert answer.status == 200
    asked = [
        (place.tenant, place.priority, place.weight, place.HasField("ttft_deadline")) for place in up.router.places
    ]
    assert asked == [
        ("red", placement_pb2.PRIORITY_STANDARD, 1, False),
        ("red", placement_pb2.PRIORITY_INTERACTIVE, 1, False),
        ("blue", placement_pb2.PRIORITY_BATCH, 3, False),
    ]
    assert all("priority" not in body for _, body, _ in up.engines[0].requests)


@pytest.mark.parametrize("given", ["", "0", "-1", "1e3", "nan", "soon", "3600.1", "1, 2"])
async def test_a_header_that_is_no_time_is_refused(tmp_path: Path, given: str) -> None:
    async with stack(tmp_path) as up, aiohttp.ClientSession() as http:
        async with http.post(f"{up.url}/v1/completions", json=BODY, headers={TIMEOUT: given}) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert (error["param"], error["code"]) == (TIMEOUT, "invalid_ttft_timeout")
        assert not up.router.places


async def test_what_is_left_of_a_clients_time_is_sent_anew_with_each_question(tmp_path: Path) -> None:
    """A request that is refused because of it gets a 504 without Retry-After."""
    async with stack(tmp_path, router_grace_s=30.0) as up:
        up.router.placer = lambda _: None
        async with aiohttp.ClientSession() as http:
            headers = {TIMEOUT: "1800.5"}
            answer = asyncio.ensure_future(http.post(f"{up.url}/v1/completions", json=BODY, headers=headers))
            await up.router.until(lambda: len(up.router.places) == 1)
            await up.router.stop()
            up.router.placer = lambda asked: refusal(asked, 4, "its first token is needed within 1.00 s")
            await up.router.start(int(up.router.address.rpartition(":")[2]))
            refused = await answer
            assert (refused.status, refused.headers.get("Retry-After")) == (504, None)
            assert (await refused.json())["error"] == {
                "message": "its first token is needed within 1.00 s",
                "type": "server_error",
                "param": None,
                "code": "first_token_too_late",
            }
    first, again = up.router.places
    assert 1_800_500_000_000 > first.ttft_deadline.ToNanoseconds() > again.ttft_deadline.ToNanoseconds() > 0


@asynccontextmanager
async def one_slot(folder: Path, **settings: Any) -> AsyncIterator[tuple[str, Client, FakeEngine]]:
    """A gateway with keys, a router, and an instance that takes one request at a time: the gateway's URL."""
    (folder / "keys").write_text(KEYS)
    engine = FakeEngine(load_tokenizer(make_tokenizer(folder / "model")), hold=asyncio.Event())
    async with engine.serve(), running(max_requests_per_instance=1, **settings) as (server, client):
        await Report(client).join("a", model=MODEL, url=engine.url, prefix_mode=agent_pb2.PREFIX_MODE_NONE)
        given = GatewaySettings(
            listen="127.0.0.1:0",
            routers=[f"127.0.0.1:{server.port}"],
            api_keys_file=folder / "keys",
            drain_timeout_s=0.5,
        )
        async with serving(given) as (gateway, url):

            async def ready() -> bool:
                return bool(gateway.pools.states())

            await eventually(ready, "the gateway knows the pool")
            yield url, client, engine


async def waiting(client: Client, count: int) -> None:
    async def held() -> bool:
        return (await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())).held_requests == count

    await eventually(held, f"{count} held")


async def test_interactive_requests_are_answered_before_batch_ones_and_take_their_places(tmp_path: Path) -> None:
    async with one_slot(tmp_path, queue_size=2) as (url, client, engine), aiohttp.ClientSession() as http:

        async def post(key: str, **headers: str) -> tuple[int, str, str]:
            async with http.post(
                f"{url}/v1/completions", json={**BODY, "stream": True}, headers=as_client(key, **headers)
            ) as answer:
                order.append(key)
                return answer.status, answer.headers.get("Retry-After", ""), await answer.text()

        order: list[str] = []
        tasks = []
        for count, key in enumerate(("k-plain", "k-bulk", "k-bulk")):
            tasks.append(asyncio.ensure_future(post(key)))
            await eventually(lambda: asyncio.sleep(0, bool(order)), "the first one runs")
            await waiting(client, count)
        tasks.append(asyncio.ensure_future(post("k-fast")))
        done, _ = await asyncio.wait(tasks[1:3], return_when=asyncio.FIRST_COMPLETED)
        [displaced] = [task.result() for task in done]
        assert displaced[:2] == (429, "1")
        assert "the queue is full, and a request of another class or tenant takes this request's place" in displaced[2]
        late = await post("k-fast", **{TIMEOUT: "0.2"})
        assert (late[0], late[1]) == (504, "")
        # The late request had displaced the other request of the lowest class.
        await waiting(client, 1)
        engine.hold = None
        tasks[0].cancel()
        status, _, answer = await tasks[3]
        assert (status, answer.endswith("[DONE]\n\n")) == (200, True)
        newest = (await client.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(page_size=1))).decisions[0]
        assert (newest.priority, newest.tenant, newest.weight) == (placement_pb2.PRIORITY_INTERACTIVE, "red", 1)
        assert newest.held.ToNanoseconds() > 0
