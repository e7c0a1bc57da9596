"""The agent's own status: /metrics for Prometheus and /health for probes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pointsman_agent.io.engine_monitor import EngineMonitor
from pointsman_agent.io.instance_monitor import InstanceMonitor
from pointsman_common.core.key_report_types import Tier


class AgentCollector(Collector):
    """Reads the monitors' counters when Prometheus scrapes. There are no second counters, and no cost between scrapes."""

    def __init__(self, monitors: Sequence[EngineMonitor]) -> None:
        self._monitors = monitors

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        yield from self._engines()
        yield from self._instances()
        yield from self._reports()

    def _engines(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "pointsman_agent_engine_up", "1 while the engine is healthy: described, alive and ready", labels=["engine"]
        )
        ambiguous_address = GaugeMetricFamily(
            "pointsman_agent_engine_address_ambiguous",
            "1 while several processes answer at the address",
            labels=["engine"],
        )
        looks = CounterMetricFamily("pointsman_agent_scrapes", "Scrapes of the engine", labels=["engine", "result"])
        steps = CounterMetricFamily(
            "pointsman_agent_step_loads", "Loads that the engine pushed after its steps", labels=["engine"]
        )
        for monitor in self._monitors:
            steps.add_metric([monitor.address.url], monitor.step_loads)
            up.add_metric([monitor.address.url], float(monitor.healthy))
            ambiguous_address.add_metric([monitor.address.url], float(monitor.ambiguous_address))
            looks.add_metric([monitor.address.url, "ok"], monitor.scrapes)
            looks.add_metric([monitor.address.url, "failed"], monitor.scrape_failures)
        yield from (up, ambiguous_address, looks, steps)

    def _instances(self) -> Iterable[Metric]:
        keys = GaugeMetricFamily("pointsman_agent_keys", "Cached block keys", labels=["instance", "tier"])
        seq = GaugeMetricFamily("pointsman_agent_delta_seq", "Sequence number of the last delta", labels=["instance"])
        batches = CounterMetricFamily("pointsman_agent_event_batches", "KV-event batches applied", labels=["instance"])
        blocks = CounterMetricFamily(
            "pointsman_agent_event_blocks",
            "Engine blocks in KV events, by result",
            labels=["instance", "kind"],
        )
        problem = CounterMetricFamily(
            "pointsman_agent_kv_event_errors",
            "KV-event gaps, lost ranges, failed replays, undecodable batches",
            labels=["instance", "kind"],
        )
        for name, instance in self._named():
            counts = instance.cached_blocks.counts
            for tier in Tier:
                keys.add_metric([name, tier.name.lower()], len(instance.cached_blocks.keys(tier)))
            seq.add_metric([name], instance.cached_blocks.latest_seq)
            batches.add_metric([name], counts.batches)
            for kind in ("stored", "removed", "unknown_removed", "orphans", "malformed"):
                blocks.add_metric([name, kind], getattr(counts, kind))
            if instance.subscriber is not None:
                for kind in ("gaps", "lost", "replay_failures", "undecodable"):
                    problem.add_metric([name, kind], getattr(instance.subscriber.counts, kind))
        yield from (keys, seq, batches, blocks, problem)

    def _reports(self) -> Iterable[Metric]:
        connected = GaugeMetricFamily(
            "pointsman_agent_report_connected",
            "1 while the router has welcomed the instance",
            labels=["instance", "router"],
        )
        events = CounterMetricFamily(
            "pointsman_agent_report_events",
            "Streams opened, snapshots begun, resyncs requested",
            labels=["instance", "router", "kind"],
        )
        for name, instance in self._named():
            for reporter in instance.reporters:
                connected.add_metric([name, reporter.router], float(reporter.connected))
                events.add_metric([name, reporter.router, "streams"], reporter.counts.streams)
                events.add_metric([name, reporter.router, "snapshots"], reporter.snapshots)
                events.add_metric([name, reporter.router, "resyncs"], reporter.counts.resyncs)
        yield from (connected, events)

    def _named(self) -> Iterable[tuple[str, InstanceMonitor]]:
        for monitor in self._monitors:
            for instance in monitor.instances.values():
                yield instance.instance.instance_id, instance


def health_of(monitors: Sequence[EngineMonitor]) -> dict[str, object]:
    """Return the content of /health. The status is "ok" while the agent runs; problems of engines and routers are only named."""
    return {
        "status": "ok",
        "engines": [
            {
                "engine": monitor.address.url,
                "healthy": monitor.healthy,
                "problem": monitor.problem or _refusal(monitor),
                "instances": [
                    {
                        "instance_id": instance.instance.instance_id,
                        "incarnation": instance.instance.incarnation,
                        "keys": instance.cached_blocks.key_count,
                        "prefix_reason": instance.instance.prefix_reason,
                        "events_problem": instance.subscriber.problem if instance.subscriber is not None else "",
                        "suspended": instance.suspended,
                        "routers": {
                            reporter.router: "connected" if reporter.connected else reporter.refusal or "connecting"
                            for reporter in instance.reporters
                        },
                    }
                    for instance in monitor.instances.values()
                ],
            }
            for monitor in monitors
        ],
    }


def _refusal(monitor: EngineMonitor) -> str:
    """Return which router refuses an instance of an engine, and why; "" if none does."""
    return next(
        (
            f"{reporter.router} refuses {instance.instance.instance_id}: {reporter.refusal}"
            for instance in monitor.instances.values()
            for reporter in instance.reporters
            if reporter.refusal and not reporter.connected
        ),
        "",
    )


def make_app(monitors: Sequence[EngineMonitor]) -> web.Application:
    """Return the HTTP application with /metrics and /health."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(monitors))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def health(_: web.Request) -> web.Response:
        return web.json_response(health_of(monitors))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
    return app
