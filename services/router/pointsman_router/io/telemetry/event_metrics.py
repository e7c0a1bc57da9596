"""Metrics that count events of the router as they happen. Their labels are bounded: instances, classes, reasons and outcomes,
never sessions or requests. Metrics that are read from the router's state are in state_metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pointsman_common.io.metric_children import MetricChildren
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.events_and_effects import UNKNOWN, Finished
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.kv_load import NO_LOAD
from pointsman_router.core.placement_types import Decision
from pointsman_router.core.priority import Priority

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


class EventMetrics:
    """The router's event metrics, with their Prometheus registry."""

    def __init__(self) -> None:
        of = self.registry = CollectorRegistry()
        name = "pointsman_router_"
        self._decisions = MetricChildren(
            Counter(
                f"{name}decisions", "Placements by route class and reason", ["route_class", "reason"], registry=None
            ),
            of,
        )
        self._placements = MetricChildren(
            Counter(f"{name}placements", "Placements by instance", ["instance"], registry=None), of
        )
        self._refusals = MetricChildren(
            Counter(f"{name}refusals", "Refused requests by gRPC status code", ["code"], registry=None), of
        )
        self._outcomes = MetricChildren(
            Counter(f"{name}outcomes", "How placed requests ended", ["outcome"], registry=None), of
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
                "Hold time of requests that were held before their placement, by priority class",
                ["priority"],
                buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60),
                registry=None,
            ),
            of,
        )
        self._parked = MetricChildren(
            Counter(f"{name}sessions_parked", "New sessions that were parked", ["model"], registry=None), of
        )
        self._admissions = MetricChildren(
            Counter(
                f"{name}admissions",
                "Admissions decided while a pool's caches evict what is needed again, by outcome and reason",
                ["model", "outcome", "reason"],
                registry=None,
            ),
            of,
        )
        self._parked_s = MetricChildren(
            Histogram(
                f"{name}parked_seconds",
                "Time for which new sessions were parked, by outcome",
                ["outcome"],
                buckets=(0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
                registry=None,
            ),
            of,
        )
        self._ttft = MetricChildren(
            Histogram(
                f"{name}ttft_seconds",
                "Time from a request's last byte at its gateway to its answer's first byte",
                ["route_class"],
                buckets=_TTFT_S,
                registry=None,
            ),
            of,
        )
        self._predicted = Counter(
            f"{name}predicted_cached_tokens",
            "Predicted cached tokens of requests whose engine reported its own figure",
            registry=of,
        )
        self._reported = Counter(
            f"{name}reported_cached_tokens",
            "Cached tokens that engines reported, without those that a request's own steps had computed",
            registry=of,
        )
        self._cached = MetricChildren(
            Counter(
                f"{name}cached_tier_tokens",
                "Tokens of placed prompts that the chosen instance had, by tier: device, host, storage",
                ["tier"],
                registry=None,
            ),
            of,
        )
        self._load_price = Counter(
            f"{name}load_price_tokens",
            "Tokens of prefill that loading the tokens of host and storage was predicted to cost; the rest of them was credited",
            registry=of,
        )
        self._offloads = MetricChildren(
            Counter(f"{name}offloads", "Requests placed on two instances, by outcome", ["outcome"], registry=None), of
        )
        self._offload_fallbacks = Counter(
            f"{name}offload_fallbacks",
            "Requests placed on two instances whose remaining plan was replaced by one SERVE step",
            registry=of,
        )
        self.resyncs = Counter(f"{name}resyncs", "Snapshots requested from agents", registry=of)
        self.moves = Counter(
            f"{name}moves",
            "Times that a gateway was told to let a request leave its instance, by reason: drain, lost, silent",
            ["reason"],
            registry=of,
        )
        self.put_out = Counter(
            f"{name}put_out",
            "Times that an instance was put out, to get requests on trial only, by cause: failures, errors, silence, unreached",
            ["model", "cause"],
            registry=of,
        )
        self.policy_changes = Counter(
            f"{name}policy_changes",
            "Times that auto took another policy for a pool, or began or ceased to admit its sessions, by what it took and why",
            ["model", "policy", "reason"],
            registry=of,
        )
        self.ignored_reports = Counter(
            f"{name}ignored_reports",
            "Reports of gateways about other gateways' requests, which are ignored",
            registry=of,
        )
        self.accounted_keys = Gauge(
            f"{name}accounted_keys", "API keys with limits whose usage is accounted", registry=of
        )
        self.lost_replicas = Gauge(
            f"{name}lost_replicas",
            "Routers that ended without deregistering and that no new router has replaced",
            registry=of,
        )
        self.bad_usage = Counter(
            f"{name}bad_usage_reports",
            "Keys in gateways' usage reports with impossible figures, which are ignored",
            registry=of,
        )
        # Create the series at 0. Without this, the first count of a series is no increase, and the alert on it does not fire.
        for code in (
            "NOT_FOUND",
            "RESOURCE_EXHAUSTED",
            "UNAVAILABLE",
            "DEADLINE_EXCEEDED",
            "ABORTED",
            "INVALID_ARGUMENT",
        ):
            self._refusals[code,]
        for tier in ("device", "host", "storage"):
            self._cached[tier,]
        for priority in Priority:
            self._held[priority,]
        for outcome in ("OK", "CANCELLED", "REJECTED", "FAILED", UNKNOWN):
            self._outcomes[outcome,]
            self._offloads[outcome,]

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a decision; `seconds` is the time that deciding and reserving took."""
        self._decisions[decision.route_class, decision.result.reason].inc()
        self._placements[decision.instance_id,].inc()
        self._decide.observe(seconds)
        if not decision.previous_id:  # the tokens that earlier parts of the prompt computed are no hits
            load = decision.kv_load
            self._cached["device",].inc(decision.present_tokens - load.tokens)
            if load is not NO_LOAD:
                self._cached["host",].inc(load.host_tokens)
                self._cached["storage",].inc(load.storage_tokens)
                self._load_price.inc(load.price_tokens)
        if decision.held_s:
            self._held[decision.request.priority,].observe(decision.held_s)
        if (admitted := decision.request.admitted) is not None and not decision.previous_id:
            self.parking_ended(admitted, decision.pool)

    def parked(self, pool: str) -> None:
        """Count a new session that is parked."""
        self._parked[pool,].inc()

    def parking_ended(self, record: AdmissionRecord, pool: str) -> None:
        """Count an admission or a refusal, and the time for which the session was parked."""
        outcome = record.verdict.outcome
        self._admissions[pool, outcome, record.verdict.reason].inc()
        if record.view.waited_s:
            self._parked_s[outcome,].observe(record.view.waited_s)

    def keep_instances(self, instances: InstanceRegistry) -> None:
        """Remove the series of instances that are no longer known, since pod names change over the years. O(series)."""
        for values in [placement for placement in self._placements if instances.get(placement[0]) is None]:
            self._placements.forget(values)

    def refused(self, code: str) -> None:
        """Count a refusal by its gRPC status name."""
        self._refusals[code,].inc()

    def fell_back(self, decision: Decision) -> None:
        """Count an offload whose remaining steps were replaced by one SERVE step."""
        if decision.mode == "OFFLOAD":
            self._offload_fallbacks.inc()

    def closed(self, decision: Decision | None, finished: Finished) -> None:
        """Count how a request ended, its TTFT, and its predicted and reported cached tokens."""
        self._outcomes[finished.outcome,].inc()
        if decision is None:
            return
        if (hits := finished.cache_hits(one_step=decision.in_one_step)) is not None:
            self._predicted.inc(max(decision.present_tokens - (finished.own_cached_tokens or 0), 0))
            self._reported.inc(hits)
        if decision.mode == "OFFLOAD":
            self._offloads[finished.outcome,].inc()
        timings = finished.timings_ms
        if timings and (first_ms := timings["first_token"]):
            self._ttft[decision.route_class,].observe(first_ms / 1e3)
