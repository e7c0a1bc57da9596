"""Several processes' metrics as one page."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses, merged, snapshot
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics


def telemetry_of(requests: int, connected: bool) -> GatewayMetrics:
    telemetry = GatewayMetrics(TokenCache(1 << 20))
    for _ in range(requests):
        telemetry.answered("m", "/v1/chat/completions", 200)
    telemetry.open.set(requests)
    telemetry.router.set(connected)
    for number in range(requests):
        telemetry.ttft.observe(number)
    return telemetry


async def test_what_adds_up_is_added_and_what_must_hold_everywhere_is_the_least() -> None:
    page = await merged([await snapshot(telemetry_of(*of).registry) for of in ((3, True), (4, False))])
    families = list(text_string_to_metric_families(page.decode()))
    found = {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}
    assert found["pointsman_gateway_requests_total"] == 7
    assert found["pointsman_gateway_open_requests"] == 7
    assert found["pointsman_gateway_router_connected"] == 0
    assert found["pointsman_gateway_ttft_seconds_count"] == 7
    assert found["pointsman_gateway_ttft_seconds_sum"] == 0 + 1 + 2 + 0 + 1 + 2 + 3
    assert found["pointsman_gateway_processes"] == 2
    alone = {
        family.name
        for family in text_string_to_metric_families(generate_latest(telemetry_of(3, True).registry).decode())
    }
    assert {family.name for family in families} == alone | {"pointsman_gateway_processes"}
    kinds = {family.name: family.type for family in families}
    assert kinds["pointsman_gateway_ttft_seconds"] == "histogram"


async def test_others_have_their_turns_while_the_metrics_of_many_tenants_are_merged(tmp_path: Path) -> None:
    processes = [SiblingProcesses(tmp_path, number, 2) for number in range(2)]
    for process in processes:
        registry = CollectorRegistry()
        counter = Counter("many", "some", ["tenant"], registry=registry)
        for number in range(2_000):
            counter.labels(f"t{number}").inc()
        await process.start(registry)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    page = await processes[0].page()
    task.cancel()
    assert page.count(b'many_total{tenant="t') == page.count(b"} 2.0\n") == 2_000
    # Two processes tell 4,000 samples each, which are read, merged and written a hundred at a time.
    assert turns >= 5 * 4_000 / 100
    for process in processes:
        await process.close()
