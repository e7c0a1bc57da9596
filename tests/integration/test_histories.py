"""The last 15 minutes over gRPC and as the console's JSON: series, gaps, pages, who may ask."""

from __future__ import annotations

import math
import time
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.io.settings import Tokens
from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.history.rows import POOL_STEP_S, PoolSample
from pointsman_router.io.main import RouterServer
from tests.support.router import Client, Report, Session, running
from tests.support.router_past import give_past
from tests.support.waiting import WITHIN_S, eventually

TTFT = fleet_pb2.POOL_MEASURE_TTFT_P50
OPEN = fleet_pb2.INSTANCE_MEASURE_OPEN_REQUESTS


async def pools(client: Client, **wanted: Any) -> fleet_pb2.ListPoolHistoriesResponse:
    return await client.fleet.ListPoolHistories(fleet_pb2.ListPoolHistoriesRequest(**wanted), metadata=client.metadata)


async def instances(client: Client, **wanted: Any) -> fleet_pb2.ListInstanceHistoriesResponse:
    request = fleet_pb2.ListInstanceHistoriesRequest(**{"measure": OPEN, **wanted})
    return await client.fleet.ListInstanceHistories(request, metadata=client.metadata)


async def a_past(server: RouterServer, client: Client, *names: str, **past: Any) -> None:
    for name in names:
        await Report(client).join(name)
    gateway = Session(client)
    await gateway.hello()
    await gateway.place("r", tokens=160)
    await gateway.finish("r", cached_tokens=32, timings=placement_pb2.Timings(first_token_ms=120.0))
    give_past(server.router, **past)


def known(values: Any) -> list[float]:
    return [value for value in values if not math.isnan(value)]


async def test_pools_have_series_of_equal_length_and_a_total() -> None:
    async with running() as (server, client):
        await a_past(server, client, "a", "b")
        answer = await pools(client)
    assert [pool.model for pool in answer.pools] == ["m"]
    assert (answer.step.seconds, answer.window.seconds, answer.total.model) == (5, 900, "")
    assert answer.HasField("total")
    lengths = {len(series.values) for pool in (*answer.pools, answer.total) for series in pool.series}
    assert lengths <= {119, 120, 121}
    assert len(lengths) == 1
    begun, ended = answer.start_time.ToSeconds(), answer.start_time.ToSeconds() + 5 * lengths.pop()
    assert abs(answer.observed_since.ToSeconds() - begun) <= 6
    assert 0 <= time.time() - ended < WITHIN_S
    for pool in (*answer.pools, answer.total):
        values = {series.measure: series.values for series in pool.series}
        assert list(values) == sorted(fleet_pb2.PoolMeasure.values())[1:]
        assert all(0.1 / 1.08 <= value <= 1.08 for value in known(values[TTFT]))
        assert known(values[fleet_pb2.POOL_MEASURE_HELD_REQUESTS])[0] >= 0.0
        assert pool.owned_since.ToSeconds() - begun <= 6


async def test_what_was_not_seen_is_a_gap_and_measures_can_be_chosen() -> None:
    async with running() as (server, client):
        await a_past(server, client, "a", gap=(400.0, 300.0))
        chosen = [fleet_pb2.POOL_MEASURE_OPEN_REQUESTS, fleet_pb2.POOL_MEASURE_PLACEMENTS]
        answer = await pools(client, measures=chosen, model="m")
        assert not answer.HasField("total")
        [one] = answer.pools
        assert [series.measure for series in one.series] == sorted(chosen)
        for series in one.series:
            gaps = [index for index, value in enumerate(series.values) if math.isnan(value)]
            middle = [index for index in gaps if 20 < index < 110]
            assert 19 <= len(middle) <= 21
        assert (await pools(client, model="nobody's")).pools == []


async def test_the_past_goes_on_with_what_happens() -> None:
    async with running() as (server, client):
        await a_past(server, client, "a", seconds=10.0)

        async def reported() -> bool:
            # A sample is in the newest bucket once that bucket's time has ended.
            answer = await pools(client, measures=[fleet_pb2.POOL_MEASURE_KV_USAGE])
            return any(value == 0.25 for pool in answer.pools for value in pool.series[0].values)

        await eventually(reported, "the load that the agent has reported")


async def test_instances_come_in_pages_with_one_measure() -> None:
    async with running() as (server, client):
        await a_past(server, client, "a", "b", "c")
        first = await instances(client, page_size=2)
        assert [instance.instance_id for instance in first.instances] == ["a", "b"]
        assert (first.step.seconds, first.window.seconds) == (15, 900)
        rest = await instances(client, page_size=2, page_token=first.next_page_token)
        assert ([instance.instance_id for instance in rest.instances], rest.next_page_token) == (["c"], "")
        assert {len(instance.values) for instance in first.instances} <= {39, 40, 41}
        assert all(instance.instance_known and instance.model == "m" for instance in first.instances)
        assert max(known(rest.instances[0].values)) > max(known(first.instances[0].values))
        assert [instance.instance_id for instance in (await instances(client, model="m")).instances] == ["a", "b", "c"]
        assert (await instances(client, model="n")).instances == []
        server.router.history.instances["gone"] = server.router.history.instances["a"]
        [gone] = (await instances(client, page_token="", page_size=100)).instances[3:]
        assert (gone.instance_id, gone.instance_known) == ("gone", False)
        for wrong in ({"page_size": -1}, {"page_token": "none"}, {"measure": 0}, {"measure": 99}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await instances(client, **wrong)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError):
            await pools(client, measures=[99])


async def test_pools_come_in_pages_and_the_total_on_the_first() -> None:
    async with running() as (server, client):
        for name in ("a", "b", "c"):
            await Report(client).join(name, model=name)

        async def seen() -> bool:
            return len((await pools(client)).pools) == 3

        await eventually(seen, "the pools were sampled")
        first = await pools(client, page_size=2)
        rest = await pools(client, page_size=2, page_token=first.next_page_token)
        assert [pool.model for pool in (*first.pools, *rest.pools)] == ["a", "b", "c"]
        assert (first.HasField("total"), rest.HasField("total"), rest.next_page_token) == (True, False, "")
        assert server.router.history.total.owned_since is not None


async def test_the_console_tells_gaps_as_nan_and_asks_for_a_right() -> None:
    given: dict[str, Any] = {"agent_token": "a-token", "gateway_token": "g-token", "operator_token": "o-token"}
    tokens = Tokens(**given, token_dir=None)
    async with (
        running(tokens, console_listen="127.0.0.1:0") as (server, client),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WITHIN_S)) as http,
    ):
        assert server.console is not None
        url = f"{server.console.address}/api/"
        assert (await pools(client)).HasField("total")
        body = {"measure": "INSTANCE_MEASURE_KV_USAGE"}
        for token, status in (("wrong", 401), ("a-token", 403), ("g-token", 200), ("o-token", 200)):
            shown = {"Authorization": f"Bearer {token}"}
            for method, asked in (("ListPoolHistories", {}), ("ListInstanceHistories", body)):
                async with http.post(url + method, json=asked, headers=shown) as answer:
                    assert answer.status == status, (token, method)
        server.router.history = past_of_nobody()
        async with http.post(url + "ListPoolHistories", json={}, headers={"Authorization": "Bearer g-token"}) as answer:
            history = await answer.json()
        [series] = [
            series for series in history["pools"][0]["series"] if series["measure"] == "POOL_MEASURE_HELD_REQUESTS"
        ]
        assert series["values"][:3] == [1.0, "NaN", 3.0]


def past_of_nobody() -> FleetHistory:
    """A pool that held 1 request, had no sample, and held 3, in the last three steps that have ended."""
    begun = (time.monotonic() // POOL_STEP_S - 3) * POOL_STEP_S
    history = FleetHistory(begun)
    for step, held in ((0, 1), (2, 3)):
        history.sample_pool("m", PoolSample(owned=True, held=held), begun + step * POOL_STEP_S)
    return history
