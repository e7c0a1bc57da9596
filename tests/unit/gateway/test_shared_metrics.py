"""Several processes' metrics as one page."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.processes.sibling_processes import merged
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics


def page(requests: int, connected: bool) -> str:
    telemetry = GatewayMetrics(TokenCache(1 << 20))
    for _ in range(requests):
        telemetry.answered("m", "/v1/chat/completions", 200)
    telemetry.open.set(requests)
    telemetry.router.set(connected)
    for number in range(requests):
        telemetry.ttft.observe(number)
    return generate_latest(telemetry.registry).decode()


def test_what_adds_up_is_added_and_what_must_hold_everywhere_is_the_least() -> None:
    families = list(text_string_to_metric_families(merged([page(3, True), page(4, False)]).decode()))
    found = {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}
    assert found["pointsman_gateway_requests_total"] == 7
    assert found["pointsman_gateway_open_requests"] == 7
    assert found["pointsman_gateway_router_connected"] == 0
    assert found["pointsman_gateway_ttft_seconds_count"] == 7
    assert found["pointsman_gateway_ttft_seconds_sum"] == 0 + 1 + 2 + 0 + 1 + 2 + 3
    assert found["pointsman_gateway_processes"] == 2
    alone = {family.name for family in text_string_to_metric_families(page(3, True))}
    assert {family.name for family in families} == alone | {"pointsman_gateway_processes"}
    kinds = {family.name: family.type for family in families}
    assert kinds["pointsman_gateway_ttft_seconds"] == "histogram"
