"""Open fetches of cached prefixes from other instances: what arrives where, and what such a fetch costs. Pure.

A fetch is a PREFILL step with a KV source: the source sends the KV of a prompt's first tokens, which it has cached, to the
step's instance, which computes none of them. Its price is a latency and a time per token, learned as those of lower tiers, for
each pool. Fetches from one source may share its network interface: how much of what was asked for before a fetch waits for is
learned, too, as a share from none to all of it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.kv_load import ASSUMED_TOKEN_BYTES, LoadPrice
from pointsman_router.core.learning.load_price_fit import LoadPriceFit
from pointsman_router.core.placement_types import Transfers

# Prior of the price until fetches are observed: two requests to engines, one after the other, and a network of 100 Gbit/s. It is
# a fast one since a price that is too high is never corrected: nothing is fetched then.
FETCH_LATENCY_S, FETCH_BYTES_S = 0.05, 1.25e10
# How long after a failed fetch nothing is fetched from its source, nor to its target, s.
AFTER_FAILURE_S = 30.0
# Weight of a new sample of the share for which a fetch waits, in the moving average.
SHARE_WEIGHT = 0.2
# How long after a pool's last fetch what was learned of its fetches counts, s. Without this a price learned while the network was
# slow would never be corrected: nothing is fetched then.
FORGET_S = 6 * 3_600.0
# Nobody waits for a fetch that has taken longer than so many times the expected time.
OVERDUE_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One open fetch."""

    pool: str  # of both instances
    source: str  # the instance that sends
    target: str  # the instance of the step
    tokens: int  # those that are sent
    begun_at: float  # s
    price: LoadPrice  # when it began
    expected_s: float  # by that price
    arrives_s: float  # from its begin until it arrives, waits included, as it was decided
    behind: bool  # whether its source or target had prefills when it began: the time is not that of the transfer alone
    ahead: int  # tokens that the source was sending to others
    end: int  # number of leading blocks of the prompt that the target has after it
    last_key: int  # the key of the last of these blocks, which says what all of them are


class Fetches:
    """The open fetches, and the price of a fetch by pool."""

    def __init__(self) -> None:
        self._open: dict[str, _Fetch] = {}
        # By target and by source: the same fetches, by request id.
        self._to: dict[str, dict[str, _Fetch]] = {}
        self._from: dict[str, dict[str, _Fetch]] = {}
        self._fits: dict[str, LoadPriceFit] = {}
        # Pool -> share of what a source sends to others that a fetch waits for; nothing before it was observed.
        self._shares: dict[str, float] = {}
        # Pool of which something was learned -> when a fetch last ended there, s.
        self._fetched_at: dict[str, float] = {}
        # Source -> until when nothing is fetched from it, s; target -> until when nothing is fetched to it.
        self._failed_from: dict[str, float] = {}
        self._failed_to: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def price(self, pool: str, token_bytes: int) -> LoadPrice:
        """Return the price of a fetch in a pool whose engines announce `token_bytes` of KV per token (0: unknown)."""
        prior = LoadPrice(FETCH_LATENCY_S, (token_bytes or ASSUMED_TOKEN_BYTES) / FETCH_BYTES_S)
        fit = self._fits.get(pool)
        return fit.price(prior) if fit is not None else prior

    def samples(self, pool: str) -> int:
        """Return how many fetches the price of a pool was learned from."""
        fit = self._fits.get(pool)
        return fit.samples if fit is not None else 0

    def failing(self, now: float) -> tuple[frozenset[str], frozenset[str]]:
        """Return the instances from which nothing is fetched, and those to which nothing is, since a fetch failed lately."""
        sources, targets = (
            frozenset(name for name, until in failed.items() if until > now)
            for failed in (self._failed_from, self._failed_to)
        )
        return sources, targets

    def transfers(self, instance_id: str, keys: Sequence[int], now: float) -> Transfers | None:
        """Return what concerns a prompt with these block keys: what an instance sends to others, and which part of the prompt
        arrives there for another request. None if there is neither. O(fetches to and from the instance)."""
        sending = self._sending(instance_id)
        arriving, arrives_at = 0, 0.0
        for fetch in self._to.get(instance_id, {}).values():
            overdue = now - fetch.begun_at > OVERDUE_FACTOR * fetch.arrives_s
            if not overdue and arriving < fetch.end <= len(keys) and keys[fetch.end - 1] == fetch.last_key:
                arriving, arrives_at = fetch.end, fetch.begun_at + fetch.arrives_s
        if not sending and not arriving:
            return None
        if not arriving:
            return Transfers(sending)
        return Transfers(sending, arriving * KEY_TOKENS, max(arrives_at - now, 0.0))

    def opened(
        self,
        request_id: str,
        pool: str,
        source: str,
        target: str,
        keys: Sequence[int],
        end_tokens: int,
        tokens: int,
        price: LoadPrice,
        now: float,
        *,
        behind: bool,
        predicted_s: float = 0.0,
    ) -> None:
        """Begin a fetch that leaves the first `end_tokens` of a prompt with these `keys` on `target`, `tokens` of them sent by
        `source`. `behind`: whether source or target have prefills to compute first. `predicted_s`: how long it takes with them;
        0: not predicted. Mutates."""
        self.gone(request_id)
        end = min(end_tokens // KEY_TOKENS, len(keys))
        if not end:
            return
        expected_s = price.seconds(tokens + self._sending(source))
        ahead = sum(fetch.tokens for fetch in self._from.get(source, {}).values())
        fetch = _Fetch(
            pool, source, target, tokens, now, price, expected_s, predicted_s or expected_s, behind, ahead, end, keys[end - 1]
        )  # fmt: skip
        self._open[request_id] = fetch
        self._to.setdefault(target, {})[request_id] = fetch
        self._from.setdefault(source, {})[request_id] = fetch

    def done(self, request_id: str, instance_id: str, now: float) -> None:
        """End a fetch whose KV has arrived, if the request has one, and learn what it cost. Mutates."""
        if (fetch := self._open.get(request_id)) is None:
            return
        self.gone(request_id)
        self._failed_from.pop(fetch.source, None)
        self._failed_to.pop(fetch.target, None)
        seconds = now - fetch.begun_at
        # Behind prefills it took longer than the transfer, so it says something only if it was faster than expected.
        learns = not fetch.behind or seconds < fetch.expected_s
        if learns or fetch.pool in self._fetched_at:
            self._fetched_at[fetch.pool] = now
        if not learns:
            return
        if not fetch.ahead:
            self._fits.setdefault(fetch.pool, LoadPriceFit()).learn(instance_id, fetch.tokens, seconds)
        # By a price at which tokens take no time, nothing can be told of how many it waited for.
        elif fetch.price.token_s > 0.0:
            waited = (seconds - fetch.price.seconds(fetch.tokens)) / (fetch.price.token_s * fetch.ahead)
            share = self._share(fetch.pool)
            self._shares[fetch.pool] = share + SHARE_WEIGHT * (min(max(waited, 0.0), 1.0) - share)

    def failed(self, request_id: str, now: float) -> None:
        """End a fetch that failed, if the request has one. It may be the fault of its source or of its target: of the one that
        another fetch has shown to fail, or else it counts for both. Mutates."""
        if (fetch := self._open.get(request_id)) is None:
            return
        self.gone(request_id)
        ends = ((self._failed_from, fetch.source), (self._failed_to, fetch.target))
        for failed, name in [(failed, name) for failed, name in ends if failed.get(name, now) > now] or ends:
            failed[name] = now + AFTER_FAILURE_S

    def gone(self, request_id: str) -> None:
        """End a fetch, if the request has one, of which nothing is learned. Mutates."""
        if (fetch := self._open.pop(request_id, None)) is not None:
            for index, name in ((self._to, fetch.target), (self._from, fetch.source)):
                del index[name][request_id]
                if not index[name]:
                    del index[name]

    def expire(self, now: float) -> None:
        """Drop failures, and what was learned of pools, that no longer count. Mutates."""
        for failed in (self._failed_from, self._failed_to):
            for name in [name for name, until in failed.items() if until <= now]:
                del failed[name]
        for pool in [pool for pool, at in self._fetched_at.items() if at + FORGET_S <= now]:
            self.forget_pool(pool)

    def forget_pool(self, pool: str) -> None:
        """Drop what was learned of a pool that has been gone for long, or has had no fetch for long. Mutates."""
        self._fetched_at.pop(pool, None)
        self._fits.pop(pool, None)
        self._shares.pop(pool, None)

    def _share(self, pool: str) -> float:
        return self._shares.get(pool, 0.0)

    def _sending(self, instance_id: str) -> int:
        """Return how many of the tokens that an instance sends to others a further fetch from it waits for."""
        fetches = self._from.get(instance_id, {}).values()
        return round(sum(fetch.tokens * self._share(fetch.pool) for fetch in fetches))

    def check_invariants(self, requests: Container[str]) -> None:
        """Raise AssertionError if a fetch is not that of an open request (`requests`: their ids), or the indexes differ."""
        assert all(request_id in requests for request_id in self._open)
        for index in (self._to, self._from):
            assert all(index.values())
            assert {name: fetch for there in index.values() for name, fetch in there.items()} == self._open
