"""Prometheus, as the compose file starts it, scrapes a real fleet: every query of the dashboards returns data, no alert fires
while all is well, and alerts fire for faults that are made.

Time runs 15 times as fast for Prometheus: it scrapes each second, and windows of rules are as much shorter. No registry of
packages has a Grafana, so none loads the dashboards here; their queries are sent as Grafana sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.processes.compose_services import Stack, compose_stack
from tests.support.waiting import eventually
from tools import check_deploy

TELEMETRY = check_deploy.DEPLOY / "telemetry"
RULES = TELEMETRY / "rules/pointsman.yaml"
# A metric with its matchers, as written in an expression.
SELECTOR = re.compile(r"\b(?:pointsman_\w+|up)(?![\w(])(?:\{[^}]*\})?")
SPEED = 15
# Maximum time until an expression finds something, or an alert fires, s: some scrapes on a busy machine.
PATIENCE_S = 40.0

# Panels without data in a healthy fleet, and why.
EMPTY = {"Time held by priority, p90": "no request is held, and the quantile of nothing is no number"}
# Alerts that tell of slow processes, as a busy machine has them, too.
OF_THE_MACHINE = {"PointsmanPlacementSlow", "PointsmanTpotHigh", "PointsmanTtftHigh"}
# Alerts whose faults are not made here, and why. tests/unit/deploy/test_alerts.py fires them by series that are made up.
NOT_MADE = {
    "PointsmanAutoscalerWithoutFigure": "it is of kube-state-metrics, in a cluster",
    "PointsmanEngineAddressAmbiguous": "it is of a load balancer in front of engines",
    "PointsmanKvEventsLost": "an engine's replay buffer has 10,000 batches",
    "PointsmanKvReleasesFail": "it is of transfers of KV, which emulated engines of this file do not make",
    "PointsmanOffloadsFail": "as PointsmanKvReleasesFail",
    "PointsmanPlacementSlow": "it is of a router that gets too little CPU time",
    "PointsmanPredictionAuditFailed": "it is of an engine whose KV events are wrong",
    "PointsmanPredictionsTooHigh": "as PointsmanPredictionAuditFailed",
    "PointsmanPromptTokensMismatch": "it is of a tokenizer that equals the engine's for some prompts only",
    "PointsmanResyncs": "it is of agents that lose their place several times in ten minutes",
    "PointsmanSessionsParked": "it is of agents' sessions that exceed the caches for a minute",
    "PointsmanWrongKv": "as PointsmanKvReleasesFail",
}


def faster(mounts: Path, more: dict[str, str]) -> None:
    """Shorten the intervals and windows in Prometheus' files; `for` becomes 2 s. `more`: target -> another one beside it."""
    config = mounts / "etc/prometheus/prometheus.yaml"
    text = re.sub(r"(_interval): 15s", r"\1: 1s", config.read_text())
    for target, beside in more.items():
        text = text.replace(f'"{target}"', f'"{target}", "{beside}"')
    config.write_text(text)
    rules = mounts / "etc/prometheus/rules/pointsman.yaml"
    text = re.sub(r"\[(\d+)m\]", lambda window: f"[{int(window[1]) * 60 // SPEED}s]", rules.read_text())
    # A first token is late after as many times less.
    text, changed = re.subn(r"(_ttft_seconds_bucket.*) > 30\b", rf"\1 > {30 // SPEED}", text)
    assert changed == 1
    rules.write_text(re.sub(r"(\n +for): \w+", r"\1: 2s", text))


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> Iterator[tuple[str, list[str]]]:
    """The title of every panel of every dashboard, and its queries as Grafana would send them."""
    for file in sorted((TELEMETRY / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            yield panel["title"], [target["expr"].replace("$__rate_interval", "1m") for target in panel["targets"]]


class Prometheus:
    """Prometheus' HTTP API."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url
        self.fired: set[str] = set()

    async def _get(self, path: str, **query: str) -> Any:
        async with self._client.get(f"{self._url}/api/v1/{path}", params=query) as answer:
            message = await answer.json()
        assert message["status"] == "success", message
        return message["data"]

    async def series(self, expression: str) -> list[dict[str, str]]:
        """The labels of what an expression finds now."""
        return [sample["metric"] for sample in (await self._get("query", query=expression))["result"]]

    async def has_data(self, expression: str) -> bool:
        """Whether an expression finds a number."""
        found = (await self._get("query", query=expression))["result"]
        return any(math.isfinite(float(sample["value"][1])) for sample in found)

    async def without_data(self, expressions: set[str]) -> set[str]:
        """Return those of `expressions` that find no number within PATIENCE_S."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            expressions = {expression for expression in expressions if not await self.has_data(expression)}
            if not expressions or asyncio.get_running_loop().time() > until:
                return expressions
            await asyncio.sleep(0.5)

    async def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        alerts_shown = (await self._get("alerts"))["alerts"]
        found = {alert["labels"]["alertname"]: alert for alert in alerts_shown if alert["state"] == "firing"}
        self.fired |= found.keys()
        return found

    async def expect(self, *names: str) -> dict[str, dict[str, Any]]:
        """Wait until these alerts have fired, each at some time; return those that fire now."""
        now: dict[str, dict[str, Any]] = {}
        seen: set[str] = set()

        async def all_seen() -> bool:
            now.clear()
            now.update(await self.firing())
            seen.update(now)
            return {*names} <= seen

        try:
            await eventually(all_seen, "alerts", PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"{ {*names} - seen } do not fire; {seen} do") from None
        return now

    async def rule_errors(self) -> list[str]:
        """The errors that Prometheus reports for its rules."""
        rules = [rule for group in (await self._get("rules"))["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(alerts())
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]


class Clients:
    """Clients of the gateway."""

    def __init__(self, stack: Stack, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._url = f"{stack.url('gateway', '8080')}/v1/chat/completions"
        self._key = {"Authorization": f"Bearer {stack.secret('api-keys').partition(':')[2]}"}
        self._asked = 0

    async def ask(self, tokens: int = 4, *, text: str = "", stream: bool = True) -> int:
        """Ask, and read the answer to its end; return its status, 0 without an answer."""
        self._asked += 1
        words = text or f"{self._asked} times: which way does the train go? " * 20
        body = {"model": "pointsman-emulated", "messages": [{"role": "user", "content": words}]}
        limits = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": stream}
        with contextlib.suppress(aiohttp.ClientError):
            async with self._client.post(self._url, json=body | limits, headers=self._key) as answer:
                await answer.read()
                return answer.status
        return 0

    @asynccontextmanager
    async def keep_asking(self) -> AsyncIterator[list[int]]:
        """Ask five times a second, every second time what was asked before; yields the list to which statuses are added."""
        statuses: list[int] = []

        async def go_on() -> None:
            number = 0
            async with asyncio.TaskGroup() as asked:
                while True:
                    text = f"{number // 2} times: which way does the train go? " * 20
                    number += 1
                    asked.create_task(note(self.ask(text=text, stream=number % 8 > 0)))
                    await asyncio.sleep(0.2)

        async def note(asked: Any) -> None:
            statuses.append(await asked)

        task = asyncio.create_task(go_on())
        try:
            yield statuses
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def at_once(self, number: int, tokens: int) -> AsyncIterator[None]:
        """Ask `number` times at once, and give up at the end."""
        tasks = [asyncio.create_task(self.ask(tokens)) for _ in range(number)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """The compose file's emulated fleet with Prometheus, and a second router beside the one that it has. Not started."""
    async with compose_stack(tmp_path, "emulated", "telemetry") as stack:
        stack.copy("router", "router2")
        for name in ("router", "router2"):
            stack.services[name]["environment"] |= {
                "POINTSMAN_ROUTER_ADVERTISE": f"{name}:50051",
                "POINTSMAN_ROUTER_DECISION_LOG_FILE": "/var/lib/pointsman/decisions.jsonl",
                # A gateway's requests stay reserved until another one has started, on a slow machine, too.
                "POINTSMAN_ROUTER_GATEWAY_LEASE_S": "60",
                "POINTSMAN_ROUTER_MAX_REQUESTS_PER_INSTANCE": "32",
                # `auto` admits sessions only where a curve is learned; the series of admission are those of a router that does.
                "POINTSMAN_ROUTER_SESSION_ADMISSION": "true",
            }
        stack.services["gateway"]["environment"]["POINTSMAN_GATEWAY_ROUTERS"] = "router:50051 router2:50051"
        stack.services["agent-emulated"]["environment"]["POINTSMAN_AGENT_ROUTERS"] = "router:50051 router2:50051"
        for name in ("emulated-0", "emulated-1"):
            stack.services[name]["environment"]["POINTSMAN_EMULATE_MAX_NUM_SEQS"] = "8"
        yield stack


def signal_to(stack: Stack, sign: signal.Signals, *names: str) -> None:
    for name in names:
        stack.processes[name].send_signal(sign)


def set_disk(stack: Stack, name: str, *, full: bool) -> None:
    """Set whether the files that a service writes may grow, as tests of faults do for a full disk."""
    _, hard = resource.prlimit(stack.processes[name].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(stack.processes[name].pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


@pytest.mark.timeout(300)
async def test_dashboards_have_data_and_alerts_fire_for_real_faults_alone(stack: Stack) -> None:
    await stack.start("router2")
    await stack.start_control_plane()
    await stack.until_healthy("router2")
    targets = {name: f"127.0.0.1:{stack.ports[name, '9100']}" for name in ("router", "router2")}
    await stack.start("prometheus", lambda mounts: faster(mounts, {targets["router"]: targets["router2"]}))
    await stack.until_healthy("prometheus")
    async with aiohttp.ClientSession() as client:
        prometheus, clients = Prometheus(client, stack.url("prometheus", "9090")), Clients(stack, client)
        await all_is_well(prometheus, clients)
        await labels_are_known(prometheus)

        engines = ("emulated-0", "emulated-1")
        for engine in engines:
            # 30 times as slow: a token takes 0.2 s.
            ill = {"way": "slow", "factor": 30}
            async with client.post(f"{stack.url(engine, '8000')}/emulated_illness", json=ill) as answer:
                assert answer.status == 200
        # Each engine runs 8 of 32, each for 8 s.
        async with clients.at_once(100, tokens=50):
            await prometheus.expect("PointsmanRequestsHeld", "PointsmanEngineQueues")
            await stack.kill("redis")
            await prometheus.expect("PointsmanStoreAway")
            await stack.start("redis")
            signal_to(stack, signal.SIGSTOP, "agent-emulated")
            await prometheus.expect("PointsmanAgentDown", "PointsmanReportsStale")
            signal_to(stack, signal.SIGCONT, "agent-emulated")
            for router in targets:
                set_disk(stack, router, full=True)
            await prometheus.expect("PointsmanLogLinesLost")
            for router in targets:
                set_disk(stack, router, full=False)
            await prometheus.expect("PointsmanTpotHigh", "PointsmanTtftHigh")
            await stack.kill("gateway")
            await prometheus.expect("PointsmanGatewayDown")
        absent = f"pointsman-emulated={stack.folder}/absent"
        stack.services["gateway"]["environment"]["POINTSMAN_GATEWAY_TOKENIZERS"] = absent
        await stack.start("gateway")
        await prometheus.expect("PointsmanReservationsLeak", "PointsmanTokenizerNotExact")

        async with clients.keep_asking():
            await stack.kill("router")
            await prometheus.expect("PointsmanRouterDown", "PointsmanRouterLost", "PointsmanReportNotConnected")
            await stack.kill("router2")
            await prometheus.expect("PointsmanGatewayWithoutRouter", "PointsmanDegradedPlacements")
            await stack.kill("redis")
            await stack.start("router")
            await prometheus.expect("PointsmanModelWithoutOwner")
            await stack.start("redis")
            for engine in engines:
                await stack.kill(engine)
            await prometheus.expect("PointsmanEngineDown", "PointsmanInstanceUnhealthy", "PointsmanNoInstanceReady")
            await prometheus.expect("PointsmanErrors", "PointsmanRefusals")
            fired = await prometheus.firing()
            summary = fired["PointsmanEngineDown"]["annotations"]["summary"]
            assert re.fullmatch(r"Agent 127\.0\.0\.1:\d+ cannot reach its engine http://127\.0\.0\.1:\d+\.", summary)
        for name in ("agent-emulated", "router"):
            await stack.kill(name)
        await stack.start("router")
        await prometheus.expect("PointsmanRouterNotReady")
        assert "<error" not in str(await prometheus.firing())
        assert await prometheus.rule_errors() == []
        assert (set(alerts()) - prometheus.fired) | OF_THE_MACHINE == set(NOT_MADE) | OF_THE_MACHINE


async def all_is_well(prometheus: Prometheus, clients: Clients) -> None:
    """A fleet under traffic: all panels have data, and nothing is told."""
    async with clients.keep_asking() as statuses:
        jobs = {f'up{{job="pointsman-{job}"}} == 1' for job in ("router", "gateway", "agent")}
        assert await prometheus.without_data(jobs) == set()
        queries = {query: title for title, sent in panels() for query in sent}
        shown = {query for query, title in queries.items() if title not in EMPTY}
        assert {queries[query] for query in await prometheus.without_data(shown)} == set()
        none = {title for query, title in queries.items() if title in EMPTY and not await prometheus.has_data(query)}
        assert none == set(EMPTY), "panels that have data although a reason is given why they have none"
        assert await prometheus.rule_errors() == []
        await eventually(lambda: len(statuses) >= 60, "requests")
        assert {*await prometheus.firing()} - OF_THE_MACHINE == set()
        assert {*statuses} == {200}
    prometheus.fired.clear()


async def labels_are_known(prometheus: Prometheus) -> None:
    """Rules use labels that their series have."""
    for name, rule in alerts().items():
        known = {
            label
            for selector in SELECTOR.findall(rule["expr"])
            for found in await prometheus.series(selector)
            for label in found
        }
        if not known:
            continue  # no series exists while all is well
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        used |= {label.strip() for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(",")}
        assert used <= known, f"{name} uses labels that its series do not have"
