"""The models in a gateway's /metrics: those of the fleet, and for a while those that have left."""

from __future__ import annotations

from itertools import pairwise

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pointsman_gateway.core.request_usage import RequestUsage
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.telemetry.metrics import GONE_MODEL_S, REMOVED_AT_ONCE, GatewayMetrics

ROUTE = "/v1/chat/completions"


class Page:
    """The metrics of one gateway, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = GatewayMetrics(TokenCache(1 << 20), lambda: self.now)

    def count_all(self, model: str) -> None:
        """One of everything that is counted by model."""
        self.metrics.answered(model, ROUTE, 200)
        self.metrics.used("tenant", model, RequestUsage(prompt_tokens=3))
        self.metrics.placed_without_keys(model)
        self.metrics.token_counts_differ(model)
        self.metrics.tokenizer_is(model, exact=True, fast=None)

    def samples(self) -> dict[tuple[str, str], float]:
        """(name, model) -> value, of all samples with a model."""
        families = text_string_to_metric_families(generate_latest(self.metrics.registry).decode())
        return {
            (sample.name.removeprefix("pointsman_gateway_"), sample.labels["model"]): sample.value
            for family in families
            for sample in family.samples
            if "model" in sample.labels
        }

    def models(self) -> set[str]:
        return {model for _, model in self.samples()}


COUNTED = (
    "requests_total",
    "tenant_requests_total",
    "tenant_prompt_tokens_total",
    "tenant_cached_tokens_total",
    "tenant_completion_tokens_total",
    "keyless_total",
    "prompt_tokens_mismatch_total",
)


def test_a_model_that_left_the_fleet_keeps_its_counters_for_a_while() -> None:
    page = Page()
    page.metrics.keep_models(["a", "b"])
    for model in ("a", "b"):
        page.count_all(model)
    page.metrics.keep_models(["b"])
    page.now = GONE_MODEL_S - 1.0
    page.metrics.answered("a", ROUTE, 200)  # a request that was open
    samples = page.samples()
    assert {name for name, model in samples if model == "a"} == set(COUNTED)
    assert (samples["requests_total", "a"], samples["tenant_prompt_tokens_total", "a"]) == (2, 3)
    assert ("tokenizer_exact", "b") in samples
    page.now = GONE_MODEL_S
    assert page.models() == {"b"}
    page.count_all("a")
    assert page.models() == {"b", ""}
    assert page.samples()["requests_total", ""] == 1


def test_a_model_that_comes_back_goes_on_counting() -> None:
    page = Page()
    page.metrics.keep_models(["a"])
    page.count_all("a")
    page.metrics.keep_models([])
    page.now = GONE_MODEL_S / 2
    page.metrics.keep_models(["a"])
    page.now = 2 * GONE_MODEL_S
    page.count_all("a")
    assert [page.samples()[name, "a"] for name in ("requests_total", "keyless_total")] == [2, 2]
    assert page.samples()["tokenizer_exact", "a"] == 1


def test_a_name_that_no_model_of_the_fleet_has_makes_no_series() -> None:
    page = Page()
    page.metrics.keep_models(["a"])
    for number in range(100):
        page.count_all(f"invented-{number}")
    assert page.models() == {"a", ""}
    assert page.samples()["requests_total", ""] == 100


def test_series_stay_few_while_thousands_of_models_come_and_go() -> None:
    page = Page()
    for number in range(3_000):
        page.now += GONE_MODEL_S / 10
        page.metrics.keep_models([f"m{number}"])
        page.count_all(f"m{number}")
    assert len(page.models()) <= 12


def test_no_call_removes_more_than_some_of_many_tenants_series() -> None:
    page = Page()
    page.metrics.keep_models(["a", "b"])
    tenants = REMOVED_AT_ONCE // 2
    for model in ("a", "b"):
        for number in range(tenants):
            page.metrics.used(f"t{number}", model, RequestUsage())
    page.metrics.keep_models(["b"])
    page.now = GONE_MODEL_S
    left = []
    for _ in range(9):
        families = text_string_to_metric_families(generate_latest(page.metrics.registry).decode())
        names = [sample.labels.get("model", "") for family in families for sample in family.samples]
        left.append(names.count("a") // 2)  # without creation times
    assert 0 < left[0] < 4 * tenants
    assert all(before - after <= REMOVED_AT_ONCE for before, after in pairwise(left))
    assert left[-1] == 0
    assert page.models() == {"b"}


def test_refusals_are_counted_by_the_names_that_routers_have_for_codes() -> None:
    metrics = Page().metrics
    for code in (8, 8, 77):
        metrics.refused(code)
    refusals = {
        code: metrics.registry.get_sample_value("pointsman_gateway_refusals_total", {"code": code})
        for code in ("RESOURCE_EXHAUSTED", "77", "8")
    }
    assert refusals == {"RESOURCE_EXHAUSTED": 2, "77": 1, "8": None}
