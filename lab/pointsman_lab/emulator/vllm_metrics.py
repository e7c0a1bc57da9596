"""The emulated engine's /metrics: the engine model's counters under vLLM's names and labels."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pointsman_lab.engine.model import EngineModel

# Bucket bounds in s, from vllm/v1/metrics/loggers.py.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT_BUCKETS,
    "inter_token_latency_seconds": TOKEN_BUCKETS,
    "e2e_request_latency_seconds": REQUEST_BUCKETS,
    "request_queue_time_seconds": REQUEST_BUCKETS,
    "request_prefill_time_seconds": REQUEST_BUCKETS,
    "request_decode_time_seconds": REQUEST_BUCKETS,
}


class Histogram:
    """Counts per bucket. Cheaper than prometheus_client's, whose cost is noticeable at thousands of tokens per second."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` (s) `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """Return the histogram as a Prometheus metric, with cumulative buckets."""
        bounds = [*map(str, self._bounds), "+Inf"]
        family = HistogramMetricFamily(name, name, labels=list(labels))
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class EngineMetrics(Collector):
    """Reads the model at each scrape. The engine loop records times and outcomes."""

    def __init__(
        self, model: EngineModel, model_name: str, started_at: float, identity: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`identity`: labels of pointsman_engine_identity_info; without a value it is not shown."""
        self._model = model
        self._started_at = started_at
        self._labels = {"engine": "0", "model_name": model_name}
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0})
        self.suspension: Callable[[dict[str, str]], Iterable[Metric]] = lambda _: ()
        """Returns the metrics of the sleep state, given the engine's labels."""
        self._identity = {name: value for name, value in identity.items() if value}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        model, config, counters = self._model, self._model.config, self._model.counters
        names, values = list(self._labels), list(self._labels.values())
        gauges = {
            "num_requests_running": model.num_running,
            "num_requests_waiting": model.num_waiting,
            "kv_cache_usage_perc": model.kv_usage,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name in (
            "prefix_cache_queries",
            "prefix_cache_hits",
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
            "num_preemptions",
            "prompt_tokens",
            "generation_tokens",
        ):
            counter = CounterMetricFamily(f"vllm:{name}", name, labels=names)
            counter.add_metric(values, getattr(counters, name))
            yield counter
        sources = CounterMetricFamily("vllm:prompt_tokens_by_source", "by source", labels=[*names, "source"])
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            sources.add_metric([*values, source], getattr(counters, source))
        yield sources
        success = CounterMetricFamily("vllm:request_success", "by reason", labels=[*names, "finished_reason"])
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, histogram in self.histograms.items():
            yield histogram.family(f"vllm:{name}", self._labels)
        yield from self.suspension(self._labels)
        # vLLM's count includes one block that it never fills.
        blocks = config.kv_blocks + 1
        info = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(blocks * config.block_size),
            "num_gpu_blocks": str(blocks),
        }
        cache = GaugeMetricFamily("vllm:cache_config_info", "cache configuration", labels=list(info))
        cache.add_metric(list(info.values()), 1)
        yield cache
        if identity := self._identity:
            shown = GaugeMetricFamily("pointsman_engine_identity_info", "identity", labels=list(identity))
            shown.add_metric(list(identity.values()), 1)
            yield shown
        # In vLLM it is the process's start. Here it is the emulated engine's, since several engines may share a process.
        yield GaugeMetricFamily("process_start_time_seconds", "start since the epoch in s", value=self._started_at)
