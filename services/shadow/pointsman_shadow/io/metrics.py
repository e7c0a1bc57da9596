"""The Prometheus metrics of a serving shadow."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pointsman_lab.simulation.counterfactual import RequestPair

_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
# Reasons for which a request is excluded: the backlog was full; its body or log line, its model, or its path is unusable; it
# failed at the other router; no modelled engine could serve it; the shadow has a fault.
LEFT_OUT = ("backlog", "invalid", "model", "path", "failed", "unserved", "fault")


class ShadowMetrics:
    """The metrics of one shadow, in a separate registry."""

    def __init__(self) -> None:
        of = self.registry = CollectorRegistry()
        name = "pointsman_shadow_"
        self.requests = Counter(
            f"{name}requests",
            "Requests compared, by whether the other router's instance is known",
            ["placed"],
            registry=of,
        )
        self.excluded = Counter(f"{name}excluded", "Requests excluded from all figures", ["reason"], registry=of)
        for reason in LEFT_OUT:
            self.excluded.labels(reason)  # starts at 0: without a previous value the first count would be no increase
        self.prompt_tokens = Counter(f"{name}prompt_tokens", "Prompt tokens of compared requests", registry=of)
        self.cached_tokens = Counter(
            f"{name}cached_tokens",
            "Prompt tokens cached in the modelled fleet that places as recorded, or as Pointsman would",
            ["placement"],
            registry=of,
        )
        self.ttft = Histogram(
            f"{name}ttft_seconds", "Modelled time to first token", ["placement"], buckets=_SECONDS, registry=of
        )
        self.same = Counter(
            f"{name}same_instance", "Requests that Pointsman would have sent to the same instance", registry=of
        )
        self.said_tokens = Counter(
            f"{name}engine_cached_tokens", "Cached tokens as reported by engines in the access log", registry=of
        )
        self.said_modelled_tokens = Counter(
            f"{name}engine_cached_tokens_modelled", "Cached tokens of the same requests in the model", registry=of
        )
        self.waiting = Gauge(f"{name}waiting_requests", "Requests whose end is not known yet", registry=of)
        self.behind = Gauge(f"{name}lag_seconds", "Lag of the modelled fleets behind the clock", registry=of)

    def counts_left_out(self) -> dict[str, int]:
        """Return the number of excluded requests by reason."""
        name = "pointsman_shadow_excluded_total"
        return {reason: int(self.registry.get_sample_value(name, {"reason": reason}) or 0) for reason in LEFT_OUT}

    def compared(self, pair: RequestPair) -> None:
        """Count a request that has ended in both fleets."""
        if not (pair.recorded.ok and pair.counterfactual.ok):
            self.excluded.labels("unserved").inc()
            return
        request = pair.request
        self.requests.labels(str(bool(request.instance)).lower()).inc()
        self.prompt_tokens.inc(request.input_length)
        for placement, record in (("recorded", pair.recorded), ("pointsman", pair.counterfactual)):
            self.cached_tokens.labels(placement).inc(record.cached_tokens or 0)
            self.ttft.labels(placement).observe(record.ttft_s or 0.0)
        if request.instance == pair.counterfactual.instance:
            self.same.inc()
        if request.cached_tokens is not None and request.instance == pair.recorded.instance:
            self.said_tokens.inc(request.cached_tokens)
            self.said_modelled_tokens.inc(pair.recorded.cached_tokens or 0)
