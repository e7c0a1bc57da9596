"""What loading KV costs: the price in tokens, and how it is learned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.kv_load import LoadPrice, LoadPrices, prior_prices
from pointsman_router.core.learning.load_price_fit import MAX_INSTANCES, MAX_SAMPLES, LoadPriceFit, LoadPriceObserver
from pointsman_router.core.prefill_curve import PrefillCurve
from tests.support.router_values import info

CURVE = PrefillCurve(0.01, 1e-4, 1e-9)
PRICES = LoadPrices(LoadPrice(0.002, 1e-5), LoadPrice(0.01, 1e-4))
TOKENS = st.integers(0, 200_000)


@given(device=TOKENS, host=TOKENS, storage=TOKENS, factor=st.floats(0.01, 100.0))
def test_a_load_is_credited_with_what_it_saves_and_never_less_than_nothing(
    device: int, host: int, storage: int, factor: float
) -> None:
    prices = LoadPrices(*(LoadPrice(price.latency_s * factor, price.token_s * factor) for price in PRICES))
    load = prices.load(device, host, storage, CURVE)
    tokens = host + storage
    assert load.seconds == pytest.approx(prices.host.seconds(host) + prices.storage.seconds(storage))
    assert 0 <= load.price_tokens <= tokens == load.tokens
    computed_s = CURVE.cost_s(tokens, device) - CURVE.base_s if tokens else 0.0
    if load.seconds >= computed_s:
        assert load.credit_tokens == 0
    else:
        assert load.price_tokens == pytest.approx(tokens * load.seconds / computed_s, abs=1.0 + 1e-6 * tokens)


@given(host=st.integers(1, 200_000), more=st.floats(1.0, 10.0))
def test_a_dearer_load_is_credited_less(host: int, more: float) -> None:
    dearer = LoadPrices(LoadPrice(PRICES.host.latency_s * more, PRICES.host.token_s * more), PRICES.storage)
    assert dearer.load(1_000, host, 0, CURVE).credit_tokens <= PRICES.load(1_000, host, 0, CURVE).credit_tokens


def test_the_prior_follows_the_announced_size_of_a_token() -> None:
    unknown, small = prior_prices(0), prior_prices(1_000)
    assert small.host.token_s < unknown.host.token_s < unknown.storage.token_s
    assert small.host.token_s == pytest.approx(1_000 / 1e10)


def learned(samples: list[tuple[str, int, float]], prior: LoadPrice = PRICES.host) -> LoadPrice:
    fit = LoadPriceFit()
    for name, tokens, seconds in samples:
        fit.learn(name, tokens, seconds)
    return fit.price(prior)


def drawn(rng: random.Random, names: str, each: int, latency_s: float, token_s: float) -> list[tuple[str, int, float]]:
    sizes = [(name, int(500 * 240 ** rng.random())) for _ in range(each) for name in names]
    return [(name, size, (latency_s + token_s * size) * rng.uniform(0.8, 1.25)) for name, size in sizes]


def test_too_few_loads_leave_the_prior() -> None:
    assert learned([("a", 1_000, 5.0)] * (LoadPriceFit.TRUSTED_AFTER - 1)) == PRICES.host


@pytest.mark.parametrize("factor", [0.1, 1.0, 30.0])
def test_a_price_is_learned_from_loads(factor: float) -> None:
    rng = random.Random(3)
    price = learned(drawn(rng, "abc", MAX_SAMPLES, 0.05 * factor, 2e-5 * factor))
    for tokens in (2_000, 20_000, 100_000):
        assert price.seconds(tokens) == pytest.approx((0.05 + 2e-5 * tokens) * factor, rel=0.35)


@pytest.mark.parametrize("spoilt_s", [0.0, 1e-6, 60.0, 1e5])
def test_one_wrong_instance_does_not_spoil_the_price(spoilt_s: float) -> None:
    samples = drawn(random.Random(5), "abc", MAX_SAMPLES, 0.05, 2e-5)
    right = learned(samples)
    with_wrong = learned(samples + [("wrong", 30_000 + n, spoilt_s) for n in range(500)])
    for tokens in (2_000, 20_000, 100_000):
        assert with_wrong.seconds(tokens) == pytest.approx(right.seconds(tokens), rel=0.5)


@given(
    samples=st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(-5, 10**9), st.floats(-1e9, 1e9)), max_size=60)
)
def test_any_samples_give_a_finite_price_that_is_not_negative(samples: list[tuple[str, int, float]]) -> None:
    price = learned(samples)
    limit = LoadPriceFit.SCALES * LoadPriceFit.RANGE
    assert 0.0 <= price.latency_s <= limit * PRICES.host.latency_s
    assert 0.0 <= price.token_s <= limit * PRICES.host.token_s


def test_the_samples_kept_are_bounded() -> None:
    fit = LoadPriceFit()
    for number in range(2_000):
        fit.learn(f"i{number % 500}", 1_000, 0.1)
    assert len(fit._kept) == MAX_INSTANCES
    observer = LoadPriceObserver()
    for number in range(2_000):
        load = PRICES.load(0, 1_000, 0, CURVE)
        observer.learn("m", info("a", hardware=f"h{number}"), load, 0.1, float(number))
    assert len(observer._fits) == LoadPriceObserver.MAX_KINDS


def test_storage_is_learned_from_what_exceeds_host_memory() -> None:
    observer = LoadPriceObserver()
    mixed = PRICES.load(0, 10_000, 20_000, CURVE)
    observer.learn("m", info("a"), mixed, 3.0, 0.0)
    assert observer.samples("m", "", "storage") == 0, "host memory's price is not known yet"
    for number in range(8):
        observer.learn("m", info("a"), PRICES.load(0, 10_000, 0, CURVE), 0.2, 1.0 + number)
        observer.learn("m", info("a"), mixed, 3.2, 1.0 + number)
    assert observer.prices("m", "", 0).host.seconds(10_000) == pytest.approx(0.2, rel=0.1)
    assert observer.prices("m", "", 0).storage.seconds(20_000) == pytest.approx(3.0, rel=0.1)
    observer.forget_pool("m")
    assert observer.prices("m", "", 0) == prior_prices(0)
