"""Rate limits of API keys: requests and tokens a minute as token buckets, and requests in flight."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

_MINUTE_S = 60.0
_IN_FLIGHT_RETRY_S = 1.0
_ALMOST = 1e-6  # what rounding may take from a level that is exactly enough


@dataclass(frozen=True)
class RateLimits:
    """What one key may use; 0 means as much as it likes. A minute's worth may come at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts (cached ones too) and answers
    in_flight: int = 0


UNLIMITED = RateLimits()


class RateLimited(Exception):
    """Too much. `what` names the limit; the same request may pass after `retry_after_s`, never 0."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s


@dataclass
class TokenBucket:
    """A level, as it was `at` a moment (s, any clock that does not go back), that fills with so much a minute up to a minute's
    worth. It may be drawn below zero: an answer's length is known only afterwards, and a prompt longer than a whole minute's
    worth must pass at some time."""

    level: float = math.inf
    at: float = -math.inf

    def left(self, per_minute: int, now: float) -> float:
        """What is there at `now`. Does not mutate."""
        if self.level == math.inf:
            return float(per_minute)
        return min(self.level + max(0.0, now - self.at) * per_minute / _MINUTE_S, float(per_minute))

    def take(self, amount: float, per_minute: int, now: float) -> None:
        """Draw `amount`; a negative one gives back. Mutates."""
        self.level = min(self.left(per_minute, now) - amount, float(per_minute))
        self.at = max(now, self.at)

    def wait_s(self, amount: float, per_minute: int, now: float) -> float:
        """Until `amount` is there; 0 when it is."""
        missing = amount - self.left(per_minute, now)
        return missing * _MINUTE_S / per_minute if missing > _ALMOST else 0.0


@dataclass
class KeyUsage:
    """What one key has used. Limits that change meet it as it is: what was drawn stays drawn, what is open stays open."""

    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    in_flight: int = 0
    in_flight_elsewhere: int = 0  # requests in flight at other processes


class UsageStore(Protocol):
    """Where one key's account is kept."""

    def open(self) -> AbstractContextManager[KeyUsage]:
        """The account, which nobody else changes until it is closed."""


class LocalUsage:
    """An account of this process alone."""

    def __init__(self) -> None:
        self._usage = KeyUsage()

    def open(self) -> AbstractContextManager[KeyUsage]:
        """The account."""
        return nullcontext(self._usage)


class Admission:
    """One admitted request. Closed exactly once in effect, however often close() is called."""

    def __init__(self, store: UsageStore | None, limits: RateLimits) -> None:
        """`book`: None where nothing is counted."""
        self._store = store
        self._limits = limits
        self._charged = 0

    def charge(self, tokens: int, now: float) -> None:
        """Say how many tokens the request has used so far, in all; a later and better figure replaces the one before. Mutates."""
        if self._store is not None and self._limits.tokens_per_minute:
            with self._store.open() as usage:
                usage.tokens.take(tokens - self._charged, self._limits.tokens_per_minute, now)
        self._charged = tokens

    def close(self) -> None:
        """It is no longer in flight, and not charged any more. Mutates."""
        store, self._store = self._store, None
        if store is not None:
            with store.open() as usage:
                usage.in_flight -= 1


class RateLimiter:
    """Admits requests by their keys' accounts. Keys without any limit have none."""

    def __init__(self, store_for: Callable[[bytes], UsageStore] = lambda _: LocalUsage()) -> None:
        """`store_for`: a key's usage store, asked for once as long as the key is known."""
        self._store_for = store_for
        self._stores: dict[bytes, UsageStore] = {}

    def admit(self, key: bytes, limits: RateLimits, now: float) -> Admission:
        """Admit one request of `key` (any name for it). Raises RateLimited, and then nothing is used up. Mutates."""
        if limits == UNLIMITED:
            return Admission(None, limits)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = self._store_for(key)
        requests, tokens, most = limits.requests_per_minute, limits.tokens_per_minute, limits.in_flight
        with store.open() as usage:
            if most and usage.in_flight + usage.in_flight_elsewhere >= most:
                raise RateLimited(f"{most} requests in flight", _IN_FLIGHT_RETRY_S)
            if requests and (wait := usage.requests.wait_s(1.0, requests, now)):
                raise RateLimited(f"{requests} requests per minute", wait)
            if tokens and (wait := usage.tokens.wait_s(1.0, tokens, now)):
                raise RateLimited(f"{tokens} tokens per minute", wait)
            if requests:
                usage.requests.take(1.0, requests, now)
            usage.in_flight += 1
        return Admission(store, limits)

    def in_flight(self, key: bytes) -> int:
        """How many requests of `key` are open in this process."""
        store = self._stores.get(key)
        if store is None:
            return 0
        with store.open() as usage:
            return usage.in_flight

    def keep(self, keys: set[bytes]) -> None:
        """Forget the books of all other keys; their open requests end as ever. Mutates."""
        self._stores = {key: store for key, store in self._stores.items() if key in keys}
