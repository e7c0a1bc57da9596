"""What the router counts as it happens. Labels are bounded: instances, classes, reasons and outcomes, never sessions or requests.
What its state can tell at any time is in state_metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pointsman.common.io.metric_children import MetricChildren
from pointsman.router.core.events_and_effects import UNKNOWN, Finished
from pointsman.router.core.instances.instance_registry import InstanceRegistry
from pointsman.router.core.priority import Priority
from pointsman.router.core.types import Decision

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


class EventMetrics:
    """Prometheus metrics in a registry of their own."""

    def __init__(self) -> None:
        of = self.registry = CollectorRegistry()
        name = "pointsman_router_"
        self._decisions = MetricChildren(
            Counter(f"{name}decisions", "Placements by class and reason", ["route_class", "reason"], registry=of)
        )
        self._placements = MetricChildren(
            Counter(f"{name}placements", "Placements by instance", ["instance"], registry=of)
        )
        self._refusals = MetricChildren(
            Counter(f"{name}refusals", "Requests that could not be placed", ["code"], registry=of)
        )
        self._outcomes = MetricChildren(
            Counter(f"{name}outcomes", "How placed requests ended", ["outcome"], registry=of)
        )
        self._decide = Histogram(
            f"{name}decide_seconds",
            "Time to decide and reserve",
            buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2),
            registry=of,
        )
        self._held = MetricChildren(
            Histogram(
                f"{name}held_seconds",
                "Time that requests waited for their placement, of those that waited, by class",
                ["priority"],
                buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60),
                registry=of,
            )
        )
        self._ttft = MetricChildren(
            Histogram(
                f"{name}ttft_seconds",
                "From a request's last byte at its gateway to its answer's first",
                ["route_class"],
                buckets=_TTFT_S,
                registry=of,
            )
        )
        self._predicted = Counter(
            f"{name}predicted_cached_tokens", "Cached tokens predicted, where the engine told its own", registry=of
        )
        self._reported = Counter(f"{name}reported_cached_tokens", "Cached tokens as engines told them", registry=of)
        self._offloads = MetricChildren(
            Counter(f"{name}offloads", "Requests placed on two instances, by how they ended", ["outcome"], registry=of)
        )
        self._offload_fallbacks = Counter(
            f"{name}offload_fallbacks",
            "Requests placed on two instances that one answered alone in the end",
            registry=of,
        )
        self.resyncs = Counter(f"{name}resyncs", "Snapshots asked of agents", registry=of)
        self.ignored_reports = Counter(
            f"{name}ignored_reports", "What gateways told of other gateways' requests", registry=of
        )
        self.accounted_keys = Gauge(f"{name}accounted_keys", "API keys that limits are accounted for", registry=of)
        self.lost_replicas = Gauge(
            f"{name}lost_replicas", "Routers that ended without taking leave and that none has replaced", registry=of
        )
        self.bad_usage = Counter(
            f"{name}bad_usage_reports", "Keys in gateways' reports whose figures cannot be", registry=of
        )
        # A series that is not there before its first count has no increase then, and the alert on it does not fire.
        for code in (
            "NOT_FOUND",
            "RESOURCE_EXHAUSTED",
            "UNAVAILABLE",
            "DEADLINE_EXCEEDED",
            "ABORTED",
            "INVALID_ARGUMENT",
        ):
            self._refusals[code,]
        for priority in Priority:
            self._held[priority,]
        for outcome in ("OK", "CANCELLED", "REJECTED", "FAILED", UNKNOWN):
            self._outcomes[outcome,]
            self._offloads[outcome,]

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a decision."""
        self._decisions[decision.route_class, decision.result.reason].inc()
        self._placements[decision.instance_id,].inc()
        self._decide.observe(seconds)
        if decision.held_s:
            self._held[decision.request.priority,].observe(decision.held_s)

    def keep_instances(self, instances: InstanceRegistry) -> None:
        """End the series of instances that are not known any more: names of pods come and go for years. O(series)."""
        for values in [one for one in self._placements if instances.get(one[0]) is None]:
            self._placements.forget(values)

    def refused(self, code: str) -> None:
        """Count a refusal by gRPC status name."""
        self._refusals[code,].inc()

    def fell_back(self, decision: Decision) -> None:
        """Count a plan whose rest became one SERVE."""
        if decision.mode == "OFFLOAD":
            self._offload_fallbacks.inc()

    def closed(self, decision: Decision | None, finished: Finished) -> None:
        """Count how a request ended, when its tokens came, and its prediction beside the engine's own figure."""
        self._outcomes[finished.outcome,].inc()
        if decision is None:
            return
        if finished.cached_tokens is not None:
            self._predicted.inc(decision.cached_tokens)
            self._reported.inc(finished.cached_tokens)
        if decision.mode == "OFFLOAD":
            self._offloads[finished.outcome,].inc()
        timings = finished.timings_ms
        if timings and (first_ms := timings["first_token"]):
            self._ttft[decision.route_class,].observe(first_ms / 1e3)
