"""The gateway's Prometheus metrics. The number of label values is bounded, and none is text from a client."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pointsman_common.io.metric_children import M, MetricChildren
from pointsman_gateway.core.request_usage import RequestUsage
from pointsman_gateway.core.tokens.token_cache import TokenCache

_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}

_NAMESPACE = "pointsman_gateway"
_TPOT_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
# Time for which a model that has left the fleet keeps its counters, s. Its open requests end in it, and a scrape reads their last
# values.
GONE_MODEL_S = 900.0
# Maximum number of series that are removed at once: one takes 4 us.
REMOVED_AT_ONCE = 1_000


class GatewayMetrics:
    """One gateway's metrics, in a separate registry so that a process can have several gateways.

    The label `model` is a model of the fleet (`keep_models`) or one that left it in the last GONE_MODEL_S. Requests for any other
    model are counted with the model "".
    """

    def __init__(self, token_cache: TokenCache, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns s."""
        self._clock = clock
        # Model -> time until which its counters are kept; infinite while the fleet has the model.
        self._models: dict[str, float] = {}
        self._removal: Iterator[None] = iter(())  # each step removes at most one series of a model that is gone
        self.registry = CollectorRegistry()
        # Registered first, because collectors run in this order: series of gone models end before they are read.
        self.registry.register(_AtEachScrape(self._end_gone_models, token_cache))
        of = self.registry

        def children(kind: type[M], name: str, text: str, *labels: str) -> MetricChildren[M]:
            return MetricChildren(kind(name, text, labels, _NAMESPACE, registry=None), of)

        def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
            """`values` of the label start at 0, so that increase() counts the first one."""
            made = Counter(name, text, [label] if label else [], _NAMESPACE, registry=of)
            for value in values:
                made.labels(value)
            return made

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, namespace=_NAMESPACE, registry=of)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(name, text, namespace=_NAMESPACE, buckets=buckets, registry=of)

        self._requests = children(
            Counter, "requests", "Answers by model, route and HTTP status", "model", "route", "status"
        )
        # Tenants come only from the API keys, and models only from the fleet.
        self._tenant_counters = tuple(
            children(Counter, f"tenant_{what}", text, "tenant", "model")
            for what, text in (
                ("requests", "Requests by tenant"),
                ("prompt_tokens", "Prompt tokens of answered requests, including cached ones"),
                ("cached_tokens", "Prompt tokens of answered requests that engines had cached"),
                ("completion_tokens", "Tokens of answers"),
            )
        )
        self.outcomes = counter("attempts", "Placed attempts by outcome", "outcome")
        self.retries = counter("retries", "Attempts after the first")
        self.continued = counter("continued", "Streams that another instance went on with")
        self._refusals = counter("refusals", "Requests that the router refused, by code", "code")
        self.limited = counter("limited", "Requests refused by their key's limits")
        self.accounted = gauge(
            "limits_accounted",
            "1 while a router accounts for keys' limits, 0 while this gateway admits its share of them",
        )
        self.limit_gateways = gauge(
            "limit_gateways", "Gateways that share keys' limits; without a router each admits an equal share"
        )
        self.stripped = counter("stripped_fields", "Fields removed from requests", "field")
        self._keyless = children(Counter, "keyless", "Requests placed without block keys", "model")
        self.local = counter("degraded_placements", "Requests placed without a router")
        self.kv_releases = counter(
            "kv_releases", "KV releases for transfers that did not happen", "outcome", ("released", "failed")
        )
        self.kv_fetches = counter(
            "kv_fetches",
            "Fetches of prefixes from other instances' caches: cached there, computed there since they were evicted, failed, "
            "given_up at the time limit or because the client left",
            "outcome",
            ("cached", "computed", "failed", "given_up"),
        )
        self.session_ends = counter(
            "session_ends", "Sessions that clients have ended, by a DELETE or a header", "by", ("delete", "header")
        )
        self.unconfirmed_ends = gauge(
            "session_ends_unconfirmed", "Ends of sessions that not all owners of pools have confirmed"
        )
        self._count_mismatch = children(
            Counter,
            "prompt_tokens_mismatch",
            "Answers whose usage.prompt_tokens differs from the gateway's count",
            "model",
        )
        self.open = gauge("open_requests", "Requests placed and not finished")
        self.router = gauge("router_connected", "1 while a session with a router is open")
        self._exact = children(Gauge, "tokenizer_exact", "1 if the gateway's tokens equal the engine's", "model")
        self._fast = children(Gauge, "tokenizer_fast", "1 if fastokens encodes, 0 if tokenizers does", "model")
        self.tokenize = histogram("tokenize_seconds", "Time to render and tokenize a prompt and compute its keys")
        self.place = histogram("place_seconds", "Time from asking a router to the first step")
        self.ttft = histogram(
            "ttft_seconds", "Time from the request's last byte to the first byte of a streamed answer"
        )
        self.tpot = histogram(
            "tpot_seconds", "Mean time per output token after the first, of a streamed answer", _TPOT_S
        )
        self.total = histogram("request_seconds", "Time from the request's last byte to the answer's last byte")

    def refused(self, code: int) -> None:
        """Count a refusal by the name of its google.rpc.Code, as routers do, or by its number if only a newer router defines the
        code."""
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
        """Count a request whose prompt has no block keys."""
        self._keyless[self._label(model),].inc()

    def token_counts_differ(self, model: str) -> None:
        """Count an answer whose engine counts another number of prompt tokens than this gateway."""
        self._count_mismatch[self._label(model),].inc()

    def keep_models(self, models: Iterable[str]) -> None:
        """Set the models of the fleet. Models that have left the fleet keep their counters for GONE_MODEL_S. Mutates."""
        now = self._clock()
        present = set(models)
        for model in present:
            if self._models.get(model) != math.inf:
                self._models[model] = math.inf
                self._count_mismatch[model,]  # starts at 0, so that increase() counts the first one
        for model, until in self._models.items():
            if until == math.inf and model not in present:
                self._models[model] = now + GONE_MODEL_S
                # These gauges show a present state, which a model outside the fleet does not have.
                self._exact.forget((model,))
                self._fast.forget((model,))
        self._end_gone_models()

    def tokenizer_is(self, model: str, *, exact: bool, fast: bool | None) -> None:
        """Set whether a model's tokens equal its engines', and whether fastokens encodes its prompts (None: nothing does yet). No
        effect for a model outside the fleet. Mutates."""
        if self._models.get(model) == math.inf:
            self._exact[model,].set(exact)
            if fast is not None:
                self._fast[model,].set(fast)

    def _label(self, model: str) -> str:
        return model if model in self._models else ""

    def _end_gone_models(self) -> None:
        """Remove series of models that left the fleet GONE_MODEL_S ago, the rest of them with the next calls. Mutates."""
        now = self._clock()
        ended = {model for model, until in self._models.items() if until <= now}
        for model in ended:
            del self._models[model]
            self._keyless.forget((model,))
            self._count_mismatch.forget((model,))
        if ended:
            self._removal = chain(self._removal, self._remove(ended))
        deque(islice(self._removal, REMOVED_AT_ONCE), maxlen=0)

    def _remove(self, ended: Collection[str]) -> Iterator[None]:
        """Remove the series of these models, unless the fleet has the model again. Mutates at each step."""
        for counters, at in ((self._requests, 0), *((counters, 1) for counters in self._tenant_counters)):
            for labels in list(counters):
                if labels[at] in ended and labels[at] not in self._models:
                    counters.forget(labels)
                yield


class _AtEachScrape(Collector):
    """Removes series of gone models, and reads the token cache's counters, so that requests need not count them again."""

    def __init__(self, end_gone_models: Callable[[], None], cache: TokenCache) -> None:
        self._end_gone_models = end_gone_models
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """The cache's counters."""
        self._end_gone_models()
        name = f"{_NAMESPACE}_token_cache"
        characters = CounterMetricFamily(
            f"{name}_characters", "Characters of prompts, by whether their tokens were cached", labels=["known"]
        )
        characters.add_metric(["yes"], self._cache.hits)
        characters.add_metric(["no"], self._cache.misses)
        yield characters
        yield GaugeMetricFamily(f"{name}_bytes", "Size of the cached tokens and keys", self._cache.bytes)
