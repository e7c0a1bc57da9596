"""Prometheus, as the compose file starts it, scrapes a real router, gateway and agent: the series that alert rules and dashboards
query exist under these names and labels, and alerts fire for engines that are gone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.processes.compose_services import Stack, compose_stack
from tools import check_deploy

TELEMETRY = check_deploy.DEPLOY / "telemetry"
RULES = TELEMETRY / "rules/pointsman.yaml"
# A metric with its matchers, as written in an expression.
SELECTOR = re.compile(r"\b(?:pointsman_\w+|up)(?![\w(])(?:\{[^}]*\})?")
# Seconds after which an absent series counts as missing: a few scrapes on a busy machine.
PATIENCE_S = 30.0


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with compose_stack(tmp_path, "emulated", "telemetry") as stack:
        yield stack


def hasten(mounts: Path) -> None:
    """Set the intervals and `for` times in Prometheus' files to 1 s, so that alerts fire within a test's time."""
    config = mounts / "etc/prometheus/prometheus.yaml"
    config.write_text(re.sub(r"(_interval): 15s", r"\1: 1s", config.read_text()))
    rules = mounts / "etc/prometheus/rules/pointsman.yaml"
    rules.write_text(re.sub(r"(\n +for): \w+", r"\1: 1s", rules.read_text()))


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard_queries() -> Iterator[str]:
    """Every query of every dashboard, as Grafana would send it."""
    for file in sorted((TELEMETRY / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            yield from (target["expr"].replace("$__rate_interval", "1m") for target in panel["targets"])


class Prometheus:
    """Prometheus' HTTP API."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url

    async def _get(self, path: str, **query: str) -> Any:
        async with self._client.get(f"{self._url}/api/v1/{path}", params=query) as answer:
            message = await answer.json()
        assert message["status"] == "success", message
        return message["data"]

    async def series(self, expression: str) -> list[dict[str, str]]:
        """The labels of what an expression finds now."""
        return [sample["metric"] for sample in (await self._get("query", query=expression))["result"]]

    async def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        alerts_shown = (await self._get("alerts"))["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts_shown if alert["state"] == "firing"}

    async def rule_errors(self) -> list[str]:
        """The errors that Prometheus reports for its rules."""
        rules = [rule for group in (await self._get("rules"))["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(alerts())
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]

    async def missing(self, expressions: set[str]) -> set[str]:
        """Return those of `expressions` that find nothing within PATIENCE_S."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            expressions = {expression for expression in expressions if not await self.series(expression)}
            if not expressions or asyncio.get_running_loop().time() > until:
                return expressions
            await asyncio.sleep(0.5)


async def ask(stack: Stack, client: aiohttp.ClientSession, *, stream: bool = True) -> int:
    key = {"Authorization": f"Bearer {stack.secret('api-keys').partition(':')[2]}"}
    body = {
        "model": "pointsman-emulated",
        "messages": [{"role": "user", "content": "Which way does the train go? " * 20}],
        "max_tokens": 4,
        "stream": stream,
    }
    url = f"{stack.url('gateway', '8080')}/v1/chat/completions"
    async with client.post(url, json=body, headers=key) as answer:
        await answer.read()
        return answer.status


async def test_rules_and_dashboards_find_what_services_export(stack: Stack) -> None:
    # `auto` admits sessions only where a curve is learned; the series of admission are those of a router that does.
    stack.services["router"]["environment"]["POINTSMAN_ROUTER_SESSION_ADMISSION"] = "true"
    await stack.start_control_plane()
    await stack.start("prometheus", hasten)
    await stack.until_healthy("prometheus")
    async with aiohttp.ClientSession() as client:
        prometheus = Prometheus(client, stack.url("prometheus", "9090"))
        assert (
            await prometheus.missing({f'up{{job="pointsman-{job}"}} == 1' for job in ("router", "gateway", "agent")})
            == set()
        )
        for _ in range(3):
            assert await ask(stack, client) == 200
        # Stop both engines, so that the failure metrics have series.
        for name in ("emulated-0", "emulated-1"):
            await stack.stop(name)
        assert await ask(stack, client, stream=False) >= 500

        selectors = {selector for rule in alerts().values() for selector in SELECTOR.findall(rule["expr"])}
        assert await prometheus.missing(selectors) == set()
        assert await prometheus.missing(set(dashboard_queries())) == set()
        for name, rule in alerts().items():
            if not SELECTOR.search(rule["expr"]):
                continue  # it uses series of kube-state-metrics, which does not run here
            known = {
                label
                for selector in SELECTOR.findall(rule["expr"])
                for found in await prometheus.series(selector)
                for label in found
            }
            used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
            used |= {label.strip() for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(",")}
            assert used <= known, f"{name} uses labels that its series do not have"

        expected = {"PointsmanEngineDown", "PointsmanNoInstanceReady", "PointsmanInstanceUnhealthy"}
        fired = await prometheus.firing()
        while not expected <= set(fired):
            await asyncio.sleep(0.5)
            fired = await prometheus.firing()
        summary = fired["PointsmanEngineDown"]["annotations"]["summary"]
        assert re.fullmatch(r"Agent 127\.0\.0\.1:\d+ cannot reach its engine http://127\.0\.0\.1:\d+\.", summary)
        assert "<error" not in str(fired)
        assert await prometheus.rule_errors() == []
        assert "PointsmanRouterDown" not in fired

        await stack.stop("router")
        while not {"PointsmanRouterDown", "PointsmanGatewayWithoutRouter"} <= set(await prometheus.firing()):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
