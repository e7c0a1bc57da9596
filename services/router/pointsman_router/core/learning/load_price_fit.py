"""Learns what loading KV from one lower tier costs, from the first tokens of requests that loaded some. Pure.

The newest samples of several instances of one kind of hardware are kept, equally weighted by instance, and the price is the line
with the least absolute errors relative to the prediction. So up to half of the instances may be wrong without moving it far.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from pointsman_router.core.kv_load import KvLoad, LoadPrice, LoadPrices, prior_prices
from pointsman_router.core.placement_types import InstanceInfo

# Number of instances of which samples are kept, those that loaded last, and number of samples of each.
MAX_INSTANCES, MAX_SAMPLES = 16, 6


class LoadPriceFit:
    """Fits latency_s and token_s of a LoadPrice around a prior.

    The prior at the median scale of the samples determines what the samples leave open, as in PrefillCurveFit. Coefficients stay
    within 0 and `RANGE` times it, and the scale within a factor `SCALES` of the prior.
    """

    # Number of samples from which on the learned price is used.
    TRUSTED_AFTER = 4
    RANGE = 20.0
    SCALES = 1_000.0
    # Weight of the prior against the samples, each instance of which has 1.
    PRIOR = 0.05
    # Relative error below which a sample's weight does not grow any more.
    SMALL_ERROR = 0.1
    # Largest sample in multiples of the scaled prior.
    CLIP = 5.0
    ROUNDS = 8

    def __init__(self) -> None:
        self.samples = 0
        self._kept: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()
        self._fitted: tuple[LoadPrice, LoadPrice] | None = None

    def learn(self, instance_id: str, tokens: int, seconds: float) -> None:
        """Add a sample: an instance loaded `tokens` in `seconds`. Mutates."""
        if tokens <= 0:
            return
        kept = self._kept.pop(instance_id, None) or deque(maxlen=MAX_SAMPLES)
        kept.append((tokens, max(seconds, 0.0)))
        self._kept[instance_id] = kept
        if len(self._kept) > MAX_INSTANCES:
            self._kept.popitem(last=False)
        self.samples += 1
        self._fitted = None

    def price(self, prior: LoadPrice) -> LoadPrice:
        """Return the learned price; `prior` before TRUSTED_AFTER samples. The fit is made anew after a sample, O(samples
        kept)."""
        if self.samples < self.TRUSTED_AFTER:
            return prior
        if self._fitted is None or self._fitted[0] != prior:
            self._fitted = prior, self._solved(prior)
        return self._fitted[1]

    def _solved(self, prior: LoadPrice) -> LoadPrice:
        weighted = [(tokens, seconds, 1.0 / len(kept)) for kept in self._kept.values() for tokens, seconds in kept]
        scale = _median([(seconds / prior.seconds(tokens), weight) for tokens, seconds, weight in weighted])
        scale = min(max(scale, 1.0 / self.SCALES), self.SCALES)
        # (share of the latency, target, weight): in multiples of the scaled prior, where shares of latency and tokens sum to 1.
        rows = [
            (
                prior.latency_s / (expected := prior.seconds(tokens)),
                min(seconds / (scale * expected), self.CLIP),
                weight,
            )
            for tokens, seconds, weight in weighted
        ]
        latency = token = 1.0
        for _ in range(self.ROUNDS):
            latency, token = self._step(rows, latency, token)
        return LoadPrice(latency * scale * prior.latency_s, token * scale * prior.token_s)

    def _step(self, rows: list[tuple[float, float, float]], latency: float, token: float) -> tuple[float, float]:
        """Return the least squares with each sample weighted by its last error (iteratively reweighted least squares)."""
        # The prior: latency = 1 and token = 1.
        ll = tt = lb = tb = self.PRIOR
        lt = 0.0
        for share, target, weight in rows:
            error = abs(share * latency + (1.0 - share) * token - target)
            weight /= max(error, self.SMALL_ERROR)
            rest = 1.0 - share
            ll += weight * share * share
            lt += weight * share * rest
            tt += weight * rest * rest
            lb += weight * share * target
            tb += weight * rest * target
        determinant = ll * tt - lt * lt
        latency = min(max((lb * tt - tb * lt) / determinant, 0.0), self.RANGE)
        return latency, min(max((tb - lt * latency) / tt, 0.0), self.RANGE)


def _median(values: list[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs."""
    ordered = sorted(values)
    half, passed = sum(weight for _, weight in ordered) / 2.0, 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]


class LoadPriceObserver:
    """The learned prices of each pool, kind of hardware and tier, at most MAX_KINDS of them, those used last."""

    MAX_KINDS = 512
    # Minimum interval between two samples of one price, s. A fit takes some 100 us, and few samples are enough.
    INTERVAL_S = 0.05

    def __init__(self) -> None:
        self._fits: OrderedDict[tuple[str, str, str], tuple[LoadPriceFit, float]] = OrderedDict()

    def prices(self, pool: str, hardware: str, token_bytes: int) -> LoadPrices:
        """Return the prices of a pool on a kind of hardware whose engines announce `token_bytes` of KV per token (0: unknown)."""
        prior = prior_prices(token_bytes)
        host, storage = self._fits.get((pool, hardware, "host")), self._fits.get((pool, hardware, "storage"))
        if host is None and storage is None:
            return prior
        return LoadPrices(
            host[0].price(prior.host) if host is not None else prior.host,
            storage[0].price(prior.storage) if storage is not None else prior.storage,
        )

    def samples(self, pool: str, hardware: str, tier: str) -> int:
        """Return how many loads the price of a tier ("host" or "storage") was learned from."""
        known = self._fits.get((pool, hardware, tier))
        return known[0].samples if known is not None else 0

    def learn(self, pool: str, info: InstanceInfo, load: KvLoad, seconds: float, now: float) -> None:
        """Learn from a request that had loaded `load` in `seconds`. If it came from both tiers, the time is storage's as far as
        it exceeds host's learned price, and says nothing before that price is known. Mutates."""
        if not load.storage_tokens:
            self._add((pool, info.hardware, "host"), info.instance_id, load.host_tokens, seconds, now)
            return
        if load.host_tokens:
            if self.samples(pool, info.hardware, "host") < LoadPriceFit.TRUSTED_AFTER:
                return
            seconds -= self.prices(pool, info.hardware, info.kv_token_bytes).host.seconds(load.host_tokens)
        self._add((pool, info.hardware, "storage"), info.instance_id, load.storage_tokens, seconds, now)

    def forget_pool(self, pool: str) -> None:
        """Drop what was learned of a pool that has been gone for long. Mutates; O(kinds)."""
        for key in [key for key in self._fits if key[0] == pool]:
            del self._fits[key]

    def _add(self, key: tuple[str, str, str], instance_id: str, tokens: int, seconds: float, now: float) -> None:
        fit, learned_at = self._fits.pop(key) if key in self._fits else (LoadPriceFit(), -self.INTERVAL_S)
        if now - learned_at >= self.INTERVAL_S:
            fit.learn(instance_id, tokens, seconds)
            learned_at = now
        self._fits[key] = fit, learned_at
        if len(self._fits) > self.MAX_KINDS:
            self._fits.popitem(last=False)
