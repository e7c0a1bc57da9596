"""The gateway's Prometheus metrics; label values are bounded, and never what a client wrote."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pointsman.gateway.core.request_usage import RequestUsage
from pointsman.gateway.core.tokens.token_cache import TokenCache

_TPOT_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)


class GatewayMetrics:
    """One gateway's metrics, in a registry of its own so that several can live in one process."""

    def __init__(self, token_cache: TokenCache) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_TokenCacheCollector(token_cache))
        of = self.registry
        name = "pointsman_gateway_"
        self.requests = Counter(
            f"{name}requests", "Answers by model, route and HTTP status", ["model", "route", "status"], registry=of
        )
        self._answered: dict[tuple[str, str, int], Counter] = {}
        # Tenants are those of the keys file alone, and models those of the fleet.
        who = ["tenant", "model"]
        self._tenant_counters = (
            Counter(f"{name}tenant_requests", "Requests by tenant", who, registry=of),
            Counter(f"{name}tenant_prompt_tokens", "Tokens of answered prompts, cached ones too", who, registry=of),
            Counter(f"{name}tenant_cached_tokens", "Those of them that engines had cached", who, registry=of),
            Counter(f"{name}tenant_completion_tokens", "Tokens of answers", who, registry=of),
        )
        self._tenants: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self.outcomes = Counter(f"{name}attempts", "Placed attempts by outcome", ["outcome"], registry=of)
        self.retries = Counter(f"{name}retries", "Attempts after the first", registry=of)
        self.refusals = Counter(f"{name}refusals", "Requests that the router refused, by code", ["code"], registry=of)
        self.limited = Counter(f"{name}limited", "Requests beyond their key's limits", registry=of)
        self.accounted = Gauge(
            f"{name}limits_accounted",
            "1 while a router accounts for keys' limits, 0 while this gateway admits its share of them",
            registry=of,
        )
        self.limit_gateways = Gauge(
            f"{name}limit_gateways",
            "Gateways that share keys' limits: without a router each admits so small a part",
            registry=of,
        )
        self.stripped = Counter(f"{name}stripped_fields", "Fields taken out of requests", ["field"], registry=of)
        self.keyless = Counter(f"{name}keyless", "Requests placed without block keys", ["model"], registry=of)
        self.local = Counter(f"{name}degraded_placements", "Requests placed without a router", registry=of)
        self.kv_releases = Counter(
            f"{name}kv_releases", "KV kept for nobody that an engine was asked to let go", ["outcome"], registry=of
        )
        for outcome in ("released", "failed"):
            self.kv_releases.labels(outcome)  # from 0, or the first one would be no increase
        self.count_mismatch = Counter(
            f"{name}prompt_tokens_mismatch",
            "Answers whose usage.prompt_tokens was not our count",
            ["model"],
            registry=of,
        )
        self.open = Gauge(f"{name}open_requests", "Requests placed and not finished", registry=of)
        self.router = Gauge(f"{name}router_connected", "1 while a router's session is open", registry=of)
        self.exact = Gauge(f"{name}tokenizer_exact", "1 where our tokens equal the engine's", ["model"], registry=of)
        self.tokenize = Histogram(f"{name}tokenize_seconds", "Template, tokens and keys", buckets=_SECONDS, registry=of)
        self.place = Histogram(f"{name}place_seconds", "From asking to the first step", buckets=_SECONDS, registry=of)
        self.ttft = Histogram(
            f"{name}ttft_seconds", "From the request's last byte to the answer's first", buckets=_SECONDS, registry=of
        )
        self.tpot = Histogram(
            f"{name}tpot_seconds",
            "Time for each output token of a stream after its first, an answer's mean",
            buckets=_TPOT_S,
            registry=of,
        )
        self.total = Histogram(
            f"{name}request_seconds", "From the request's last byte to the answer's last", buckets=_SECONDS, registry=of
        )

    def answered(self, model: str, route: str, status: int) -> None:
        """Count one answer. A look-up by labels takes three times as long as counting."""
        named = (model, route, status)
        counter = self._answered.get(named)
        if counter is None:
            counter = self._answered[named] = self.requests.labels(model, route, str(status))
        counter.inc()

    def used(self, tenant: str, model: str, usage: RequestUsage) -> None:
        """Count one request of a tenant."""
        counters = self._tenants.get((tenant, model))
        if counters is None:
            counters = tuple(one.labels(tenant, model) for one in self._tenant_counters)
            self._tenants[tenant, model] = counters
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        for counter, amount in zip(counters, (1, *tokens), strict=True):
            counter.inc(amount)


class _TokenCacheCollector(Collector):
    """Read when asked, so that nothing is counted twice on the way of a request."""

    def __init__(self, cache: TokenCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """The cache's counters."""
        name = "pointsman_gateway_token_cache"
        characters = CounterMetricFamily(
            f"{name}_characters", "Characters of prompts by whether their tokens were known", labels=["known"]
        )
        characters.add_metric(["yes"], self._cache.hits)
        characters.add_metric(["no"], self._cache.misses)
        yield characters
        yield GaugeMetricFamily(f"{name}_bytes", "Room that remembered tokens and keys take", self._cache.bytes)
