"""The gateway's Prometheus metrics; label values are bounded, and never what a client wrote."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pointsman.common.io.metric_children import MetricChildren
from pointsman.gateway.core.request_usage import RequestUsage
from pointsman.gateway.core.tokens.token_cache import TokenCache

_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}

_TPOT_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
# A model that has left the fleet keeps its counters for so long: its open requests end, and a scrape sees their last values.
GONE_MODEL_S = 900.0


class GatewayMetrics:
    """One gateway's metrics, in a registry of its own so that several can live in one process.

    Series with a model are those of the fleet's models (`keep_models`) and of those that left it in the last GONE_MODEL_S; what
    belongs to another one is counted with the model "".
    """

    def __init__(self, token_cache: TokenCache, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells s."""
        self._clock = clock
        # Model -> until when its counters stay; infinite while the fleet has it.
        self._models: dict[str, float] = {}
        self.registry = CollectorRegistry()
        # Before all others: they are read in this order.
        self.registry.register(_EndOfGoneModels(self._end_gone_models))
        self.registry.register(_TokenCacheCollector(token_cache))
        of = self.registry
        name = "pointsman_gateway_"
        self._requests = MetricChildren(
            Counter(
                f"{name}requests", "Answers by model, route and HTTP status", ["model", "route", "status"], registry=of
            )
        )
        # Tenants are those of the keys file alone, and models those of the fleet.
        who = ["tenant", "model"]
        self._tenant_counters = tuple(
            MetricChildren(Counter(f"{name}tenant_{what}", documentation, who, registry=of))
            for what, documentation in (
                ("requests", "Requests by tenant"),
                ("prompt_tokens", "Tokens of answered prompts, cached ones too"),
                ("cached_tokens", "Those of them that engines had cached"),
                ("completion_tokens", "Tokens of answers"),
            )
        )
        self.outcomes = Counter(f"{name}attempts", "Placed attempts by outcome", ["outcome"], registry=of)
        self.retries = Counter(f"{name}retries", "Attempts after the first", registry=of)
        self._refusals = Counter(f"{name}refusals", "Requests that the router refused, by code", ["code"], registry=of)
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
        self._keyless = MetricChildren(
            Counter(f"{name}keyless", "Requests placed without block keys", ["model"], registry=of)
        )
        self.local = Counter(f"{name}degraded_placements", "Requests placed without a router", registry=of)
        self.kv_releases = Counter(
            f"{name}kv_releases", "KV kept for nobody that an engine was asked to let go", ["outcome"], registry=of
        )
        for outcome in ("released", "failed"):
            self.kv_releases.labels(outcome)  # from 0, or the first one would be no increase
        self._count_mismatch = MetricChildren(
            Counter(
                f"{name}prompt_tokens_mismatch",
                "Answers whose usage.prompt_tokens was not our count",
                ["model"],
                registry=of,
            )
        )
        self.open = Gauge(f"{name}open_requests", "Requests placed and not finished", registry=of)
        self.router = Gauge(f"{name}router_connected", "1 while a router's session is open", registry=of)
        self._exact = MetricChildren(
            Gauge(f"{name}tokenizer_exact", "1 where our tokens equal the engine's", ["model"], registry=of)
        )
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

    def refused(self, code: int) -> None:
        """Count a refusal by its google.rpc.Code, by name, as routers do; by number one that only a newer router knows."""
        self._refusals.labels(_CODES.get(code, str(code))).inc()

    def answered(self, model: str, route: str, status: int) -> None:
        """Count one answer."""
        self._requests[self._label(model), route, str(status)].inc()

    def used(self, tenant: str, model: str, usage: RequestUsage) -> None:
        """Count one request of a tenant."""
        who = (tenant, self._label(model))
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        for counters, amount in zip(self._tenant_counters, (1, *tokens), strict=True):
            counters[who].inc(amount)

    def placed_without_keys(self, model: str) -> None:
        """Count a request of whose prompt no block keys are known."""
        self._keyless[self._label(model),].inc()

    def token_counts_differ(self, model: str) -> None:
        """Count an answer whose engine counts other prompt tokens than this gateway."""
        self._count_mismatch[self._label(model),].inc()

    def keep_models(self, models: Iterable[str]) -> None:
        """Take over the fleet's models, all of them. Those that have left it keep their counters for GONE_MODEL_S. Mutates."""
        now = self._clock()
        present = set(models)
        for model in present:
            if self._models.get(model) != math.inf:
                self._models[model] = math.inf
                self._count_mismatch[model,]  # from 0, or the first would be no increase
        for model, until in self._models.items():
            if until == math.inf and model not in present:
                self._models[model] = now + GONE_MODEL_S
                # A state, which nobody has any more.
                self._exact.forget((model,))
        self._end_gone_models()

    def tokenizer_is_exact(self, model: str, exact: bool) -> None:
        """Tell whether a model's tokens equal its engines'; no effect for one that the fleet does not have. Mutates."""
        if self._models.get(model) == math.inf:
            self._exact[model,].set(exact)

    def _label(self, model: str) -> str:
        return model if model in self._models else ""

    def _end_gone_models(self) -> None:
        """O(series) where one has been gone for long enough."""
        now = self._clock()
        ended = {model for model, until in self._models.items() if until <= now}
        for model in ended:
            del self._models[model]
            self._keyless.forget((model,))
            self._count_mismatch.forget((model,))
        if ended:
            for requests in [labels for labels in self._requests if labels[0] in ended]:
                self._requests.forget(requests)
            for counters in self._tenant_counters:
                for who in [labels for labels in counters if labels[1] in ended]:
                    counters.forget(who)


class _EndOfGoneModels(Collector):
    """Tells nothing; whoever reads the metrics reads those of present models."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def collect(self) -> Iterable[Metric]:
        """End what is over."""
        self._end()
        return ()


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
