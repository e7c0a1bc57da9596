"""The agent about itself: /metrics for Prometheus and /health for probes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.agent.instance import InstanceWatch
from services.agent.shadow import Tier
from services.agent.watch import EngineWatch


class AgentCollector(Collector):
    """Reads the watches when Prometheus asks; nothing is counted twice and nothing costs anything in between."""

    def __init__(self, watches: Sequence[EngineWatch]) -> None:
        self._watches = watches

    def collect(self) -> Iterable[Metric]:
        """One family after the other."""
        yield from self._engines()
        yield from self._instances()
        yield from self._reports()

    def _engines(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "pointsman_agent_engine_up", "1 when the last look at the engine succeeded", labels=["engine"]
        )
        refused = GaugeMetricFamily(
            "pointsman_agent_engine_refused", "1 when the address answers for several processes", labels=["engine"]
        )
        looks = CounterMetricFamily("pointsman_agent_scrapes", "Looks at the engine", labels=["engine", "result"])
        steps = CounterMetricFamily("pointsman_agent_steps_pushed", "Loads pushed by the engine", labels=["engine"])
        for watch in self._watches:
            steps.add_metric([watch.target.url], watch.steps_pushed)
            up.add_metric([watch.target.url], float(watch.healthy))
            refused.add_metric([watch.target.url], float(watch.refused))
            looks.add_metric([watch.target.url, "ok"], watch.scrapes)
            looks.add_metric([watch.target.url, "failed"], watch.scrape_failures)
        yield from (up, refused, looks, steps)

    def _instances(self) -> Iterable[Metric]:
        keys = GaugeMetricFamily("pointsman_agent_keys", "Block keys in the shadow", labels=["instance", "tier"])
        seq = GaugeMetricFamily("pointsman_agent_delta_seq", "Last delta of the shadow", labels=["instance"])
        batches = CounterMetricFamily("pointsman_agent_event_batches", "KV-event batches applied", labels=["instance"])
        blocks = CounterMetricFamily(
            "pointsman_agent_event_blocks",
            "Engine blocks in KV events by what became of them",
            labels=["instance", "kind"],
        )
        trouble = CounterMetricFamily(
            "pointsman_agent_event_trouble",
            "Gaps, lost ranges, failed replays, batches not understood",
            labels=["instance", "kind"],
        )
        for name, instance in self._named():
            counts = instance.shadow.counts
            for tier in Tier:
                keys.add_metric([name, tier.name.lower()], len(instance.shadow.keys(tier)))
            seq.add_metric([name], instance.shadow.latest_seq)
            batches.add_metric([name], counts.batches)
            for kind in ("stored", "removed", "unknown_removed", "orphans", "malformed"):
                blocks.add_metric([name, kind], getattr(counts, kind))
            if instance.feed is not None:
                for kind in ("gaps", "lost", "replay_failures", "undecodable"):
                    trouble.add_metric([name, kind], getattr(instance.feed.counts, kind))
        yield from (keys, seq, batches, blocks, trouble)

    def _reports(self) -> Iterable[Metric]:
        connected = GaugeMetricFamily(
            "pointsman_agent_report_connected",
            "1 while the router has welcomed the instance",
            labels=["instance", "router"],
        )
        events = CounterMetricFamily(
            "pointsman_agent_report_events",
            "Streams opened, snapshots sent, resyncs asked for",
            labels=["instance", "router", "kind"],
        )
        for name, instance in self._named():
            for reporter in instance.reporters:
                connected.add_metric([name, reporter.router], float(reporter.connected))
                events.add_metric([name, reporter.router, "streams"], reporter.counts.streams)
                events.add_metric([name, reporter.router, "snapshots"], reporter.snapshots)
                events.add_metric([name, reporter.router, "resyncs"], reporter.counts.resyncs)
        yield from (connected, events)

    def _named(self) -> Iterable[tuple[str, InstanceWatch]]:
        for watch in self._watches:
            for instance in watch.instances.values():
                yield instance.instance.instance_id, instance


def health_of(watches: Sequence[EngineWatch]) -> dict[str, object]:
    """What /health answers. The agent is healthy when it runs; an engine's or router's trouble is named, not failed on."""
    return {
        "status": "ok",
        "engines": [
            {
                "engine": watch.target.url,
                "healthy": watch.healthy,
                "trouble": watch.trouble,
                "instances": [
                    {
                        "instance_id": instance.instance.instance_id,
                        "incarnation": instance.instance.incarnation,
                        "keys": instance.shadow.key_count,
                        "prefix_reason": instance.instance.prefix_reason,
                        "routers": {
                            reporter.router: "connected" if reporter.connected else reporter.refused or "connecting"
                            for reporter in instance.reporters
                        },
                    }
                    for instance in watch.instances.values()
                ],
            }
            for watch in watches
        ],
    }


def make_app(watches: Sequence[EngineWatch]) -> web.Application:
    """The HTTP surface."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(watches))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def health(_: web.Request) -> web.Response:
        return web.json_response(health_of(watches))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
    return app
