"""Several processes' metrics as one page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pointsman_common.io import metrics_page
from pointsman_common.io.metrics_page import PIECE, Piece, pieces
from pointsman_common.io.metrics_snapshot import InheritedCounters, encoded
from pointsman_gateway.core.request_usage import RequestUsage
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.processes import sibling_processes
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses, merged
from pointsman_gateway.io.telemetry.metrics import GONE_MODEL_S, GatewayMetrics


async def snapshot(registry: CollectorRegistry) -> list[bytes]:
    return await encoded(pieces(registry.collect()))


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


async def test_others_have_their_turns_while_the_metrics_of_many_tenants_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What two processes do at the same time, one does here, beside a task that never waits.
    monkeypatch.setattr(sibling_processes, "ASK_S", 600.0)
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
    # Two processes tell 2,000 samples each, which are read and merged a hundred at a time.
    assert turns >= 2 * 2 * 2_000 / 100
    for process in processes:
        await process.close()


async def test_tenants_numbers_are_added_series_by_series_in_pieces_of_few() -> None:
    snapshots = []
    for process in range(4):
        telemetry = GatewayMetrics(TokenCache(1 << 20))
        telemetry.keep_models(["m"])
        for number in range(process * 100, 1_000):  # each process has other tenants, in its own order
            usage = RequestUsage(prompt_tokens=number, completion_tokens=process)
            telemetry.used(f't"{number * 7 % 1_000}', "m", usage)
        snapshots.append(await snapshot(telemetry.registry))
    for of_process in snapshots:
        read = [msgspec.msgpack.decode(piece, type=Piece) for piece in of_process]
        assert max(len(piece.series) for piece in read) <= PIECE
    page = (await merged(snapshots)).decode()
    found = {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert len(found) == 4 * 1_000
    for number in (0, 99, 100, 350, 999):
        tenant, count = f't"{number * 7 % 1_000}', min(number // 100 + 1, 4)
        assert found["pointsman_gateway_tenant_requests_total", tenant] == count
        assert found["pointsman_gateway_tenant_prompt_tokens_total", tenant] == number * count
        assert found["pointsman_gateway_tenant_completion_tokens_total", tenant] == sum(range(count))


async def test_a_sibling_that_ends_while_it_tells_its_metrics_counts_as_none(tmp_path: Path) -> None:
    whole = await snapshot(telemetry_of(1, True).registry)

    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data in whole[:3]:
            writer.write(len(data).to_bytes(4, "big") + data)
        writer.close()

    ends = await asyncio.start_unix_server(break_off, tmp_path / "0")
    asked = SiblingProcesses(tmp_path, 1, 2)
    await asked.start(telemetry_of(2, True).registry)
    page = await asked.page()
    assert b"pointsman_gateway_processes 1.0" in page
    assert b"pointsman_gateway_open_requests 2.0" in page
    await asked.close()
    ends.close()


async def test_counters_do_not_fall_when_a_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "PERIOD_S", 0.0)

    async def figures() -> list[float]:
        page = (await asked.page()).decode()
        families = text_string_to_metric_families(page)
        found = {sample.name: sample.value for family in families for sample in family.samples}
        names = ("requests_total", "ttft_seconds_count", "open_requests", "processes")
        return [found[f"pointsman_gateway_{name}"] for name in names]

    asked, dies = (SiblingProcesses(tmp_path, number, 2) for number in range(2))
    await asked.start(telemetry_of(2, True).registry)
    await dies.start(telemetry_of(5, True).registry)
    assert await figures() == [7, 7, 7, 2]
    for count in (1, 2):
        await dies.close()
        (tmp_path / "1").unlink(missing_ok=True)
        assert await figures() == [7 + 3 * (count - 1), 7 + 3 * (count - 1), 2, 1]
        dies = SiblingProcesses(tmp_path, 1, 2)
        await dies.start(telemetry_of(3, True).registry)
        assert await figures() == [7 + 3 * count, 7 + 3 * count, 5, 2]
    await asked.close()
    await dies.close()


async def test_counters_of_models_that_left_end_with_those_of_the_live_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "PERIOD_S", 0.0)
    now = 0.0

    def clock() -> float:
        return now

    def telemetry() -> GatewayMetrics:
        made = GatewayMetrics(TokenCache(1 << 20), clock)
        made.keep_models(["m", "stays"])
        made.used("t", "m", RequestUsage(prompt_tokens=600, completion_tokens=1))
        made.used("t", "stays", RequestUsage(prompt_tokens=7, completion_tokens=1))
        return made

    def process() -> SiblingProcesses:
        made = SiblingProcesses(tmp_path, 0, 1)
        made._inherited = InheritedCounters("pointsman_gateway_prompt_tokens_mismatch", GONE_MODEL_S, clock)
        return made

    async def prompt_tokens(of: SiblingProcesses) -> dict[str, float]:
        families = text_string_to_metric_families((await of.page()).decode())
        samples = [sample for family in families for sample in family.samples]
        name = "pointsman_gateway_tenant_prompt_tokens_total"
        return {sample.labels["model"]: sample.value for sample in samples if sample.name == name}

    dies = process()
    await dies.start(telemetry().registry)
    assert await prompt_tokens(dies) == {"m": 600, "stays": 7}
    await dies.close()
    lives, metrics = process(), telemetry()
    await lives.start(metrics.registry)
    assert await prompt_tokens(lives) == {"m": 1_200, "stays": 14}
    metrics.keep_models(["stays"])
    now += GONE_MODEL_S - 1
    assert await prompt_tokens(lives) == {"m": 1_200, "stays": 14}
    now += 2
    assert await prompt_tokens(lives) == {"stays": 14}
    await lives.close()
