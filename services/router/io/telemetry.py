"""The router's own metrics. Labels are bounded: instances, policies, classes and reasons, never sessions or requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.router.domain import Decision
from services.router.events import Finished
from services.router.state import RouterState


class Telemetry:
    """Prometheus metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "pointsman_router_decisions",
            "Placements by class, reason and instance",
            ["route_class", "reason", "instance"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "pointsman_router_refusals", "Requests that could not be placed", ["code"], registry=self.registry
        )
        self._outcomes = Counter(
            "pointsman_router_outcomes", "How placed requests ended", ["outcome"], registry=self.registry
        )
        self._decide = Histogram(
            "pointsman_router_decide_seconds",
            "Time to decide and reserve",
            buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2),
            registry=self.registry,
        )
        self._held = Histogram(
            "pointsman_router_held_seconds",
            "Time that requests waited for their placement, of those that waited",
            buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60),
            registry=self.registry,
        )
        self._waiting = Gauge(
            "pointsman_router_held_requests", "Requests that wait for a placement", ["model"], registry=self.registry
        )
        self._predicted = Counter(
            "pointsman_router_predicted_cached_tokens",
            "Cached tokens predicted, where the engine told its own",
            registry=self.registry,
        )
        self._reported = Counter(
            "pointsman_router_reported_cached_tokens", "Cached tokens as engines told them", registry=self.registry
        )
        self.resyncs = Counter("pointsman_router_resyncs", "Snapshots asked of agents", registry=self.registry)
        self.distrusts = Counter(
            "pointsman_router_distrusts",
            "Times that answers persistently had fewer cached tokens than predicted",
            ["instance"],
            registry=self.registry,
        )
        self._open = Gauge("pointsman_router_open_requests", "Reservations open", ["instance"], registry=self.registry)
        self._pending = Gauge(
            "pointsman_router_pending_prefill_tokens", "Prefill not computed yet", ["instance"], registry=self.registry
        )
        self._keys = Gauge("pointsman_router_keys", "Block keys in the index", ["instance"], registry=self.registry)
        self._believed = Gauge(
            "pointsman_router_believed_keys",
            "Block keys of the approximate index",
            ["instance"],
            registry=self.registry,
        )
        self._age = Gauge(
            "pointsman_router_report_age_seconds",
            "Time since the agent last spoke",
            ["instance"],
            registry=self.registry,
        )
        self._instances = Gauge("pointsman_router_instances", "Instances by state", ["state"], registry=self.registry)

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a decision."""
        self._decisions.labels(decision.route_class, decision.ruling.reason, decision.instance_id).inc()
        self._decide.observe(seconds)
        if decision.held_s:
            self._held.observe(decision.held_s)

    def refused(self, code: str) -> None:
        """Count a refusal by gRPC status name."""
        self._refusals.labels(code).inc()

    def closed(self, decision: Decision | None, finished: Finished) -> None:
        """Count how a request ended, and its prediction beside the engine's own figure."""
        self._outcomes.labels(finished.outcome).inc()
        if decision is not None and finished.cached_tokens is not None:
            self._predicted.inc(decision.cached_tokens)
            self._reported.inc(finished.cached_tokens)

    def sample(self, state: RouterState, now: float) -> None:
        """Set the gauges from the state; `now` in s on the state's clock."""
        gauges = (self._open, self._pending, self._keys, self._believed, self._age, self._instances, self._waiting)
        for gauge in gauges:
            gauge.clear()
        for pool in state.holding.queue.pools():
            self._waiting.labels(pool).set(state.holding.queue.count(pool))
        for record in state.fleet.records():
            instance = record.info.instance_id
            counters = state.reservations.counters(instance)
            self._open.labels(instance).set(counters.num_requests)
            self._pending.labels(instance).set(counters.pending_prefill_tokens)
            self._keys.labels(instance).set(state.index.count(instance))
            self._believed.labels(instance).set(state.truth.approximate.count(instance))
            self._age.labels(instance).set(now - record.heard_at)
            self._instances.labels(record.state).inc()
