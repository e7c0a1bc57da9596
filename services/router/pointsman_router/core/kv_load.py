"""KV that an instance would load from below its GPU for a prompt: how much, how long it takes, and its price. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pointsman_router.core.prefill_curve import PrefillCurve

# Prior of the price until loads are observed. Bytes per second and latency in s: pinned host memory over PCIe 4 x16, at 40 % of
# its 25 GB/s; and vLLM's own figure for networked storage (v1/kv_offload/tiering/backpressure.py).
HOST_BYTES_S, HOST_LATENCY_S = 1.0e10, 0.002
STORAGE_BYTES_S, STORAGE_LATENCY_S = 1.5e9, 0.010
# KV of a token if the engine does not announce it, in bytes: a model of 48 layers with 4 KV heads of 128 in 16 bits.
ASSUMED_TOKEN_BYTES = 98_304


class KvLoad(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The tokens of a prompt that an instance has after those on its GPU, in HOST and then in STORAGE.

    `seconds`: the predicted time to load them. `price_tokens`: this time in tokens of prefill, at most all of them. The cached
    tokens of a candidate are those on the GPU, plus these, minus the price.
    """

    host_tokens: int = 0
    storage_tokens: int = 0
    seconds: float = 0.0
    price_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens to load."""
        return self.host_tokens + self.storage_tokens

    @property
    def credit_tokens(self) -> int:
        """By how much the candidate's cached tokens exceed those on the GPU."""
        return self.host_tokens + self.storage_tokens - self.price_tokens


NO_LOAD = KvLoad()


class LoadPrice(NamedTuple):
    """The time that loading n tokens from one tier takes: latency_s + token_s * n, in s; 0 for no tokens."""

    latency_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        """Return the time to load `tokens`, s."""
        return self.latency_s + self.token_s * tokens if tokens else 0.0


class LoadPrices(NamedTuple):
    """The prices of a kind of hardware by tier."""

    host: LoadPrice
    storage: LoadPrice

    def load(self, device: int, host: int, storage: int, curve: PrefillCurve) -> KvLoad:
        """Return the load of `host` and `storage` tokens after `device` tokens on the GPU, priced by the pool's curve.

        The price is what share of the tokens could be computed in the time that loading them takes. By the curve, computing h
        tokens after c takes h * (token_s + pair_s * (2c + h)) more, besides the base time of the prefill, which is needed anyway.
        """
        tokens = host + storage
        seconds = self.host.latency_s + self.host.token_s * host if host else 0.0
        if storage:
            seconds += self.storage.latency_s + self.storage.token_s * storage
        token_s = curve.token_s + curve.pair_s * (2 * device + tokens)
        price = math.ceil(seconds / token_s) if seconds < tokens * token_s else tokens
        return KvLoad(host, storage, seconds, price)


def prior_prices(token_bytes: int) -> LoadPrices:
    """Return the prices before any load was observed, for KV of `token_bytes` per token (0: unknown)."""
    size = token_bytes or ASSUMED_TOKEN_BYTES
    return LoadPrices(
        LoadPrice(HOST_LATENCY_S, size / HOST_BYTES_S), LoadPrice(STORAGE_LATENCY_S, size / STORAGE_BYTES_S)
    )
