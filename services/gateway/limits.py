"""How much a key may ask for: requests and tokens a minute as token buckets, and requests in flight. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE_S = 60.0
_IN_FLIGHT_RETRY_S = 1.0
_ALMOST = 1e-6  # what rounding may take from a level that is exactly enough


@dataclass(frozen=True)
class Limits:
    """What one key may use; 0 means as much as it likes. A minute's worth may come at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts (cached ones too) and answers
    in_flight: int = 0


class Limited(Exception):
    """Too much. `what` names the limit; the same request may pass after `retry_after_s`, never 0."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s


class Bucket:
    """A level that fills with `per_minute` a minute up to `per_minute`. It may be drawn below zero: an answer's length is known
    only afterwards, and a prompt longer than a whole minute's worth must pass at some time."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is there at `now` (s, any clock that does not go back). Does not mutate."""
        filled = self._level + max(0.0, now - self._at) * self.per_minute / _MINUTE_S
        return min(filled, float(self.per_minute))

    def take(self, amount: float, now: float) -> None:
        """Draw `amount`; a negative one gives back. Mutates."""
        self._level = min(self.level(now) - amount, float(self.per_minute))
        self._at = max(now, self._at)

    def wait_s(self, amount: float, now: float) -> float:
        """Until `amount` is there; 0 when it is."""
        missing = amount - self.level(now)
        return missing * _MINUTE_S / self.per_minute if missing > _ALMOST else 0.0


class _Account:
    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, now)
        self.tokens = Bucket(limits.tokens_per_minute, now)
        self.in_flight = 0


class Grant:
    """One admitted request. Closed exactly once in effect, however often close() is called."""

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._charged = 0
        self._open = True

    def charge(self, tokens: int, now: float) -> None:
        """Say how many tokens the request has used so far, in all; a later and better figure replaces the one before. Mutates."""
        if self._account.limits.tokens_per_minute:
            self._account.tokens.take(tokens - self._charged, now)
        self._charged = tokens

    @property
    def charged(self) -> int:
        """The figure last given to charge()."""
        return self._charged

    def close(self) -> None:
        """It is no longer in flight. Mutates."""
        if self._open:
            self._open = False
            self._account.in_flight -= 1


class Limiter:
    """The accounts of all keys; each gateway process keeps its own."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, _Account] = {}

    def admit(self, key: bytes, limits: Limits, now: float) -> Grant:
        """Admit one request of `key` (any name for it). Raises Limited, and then nothing is used up. Mutates."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(limits, now)
        elif account.limits != limits:
            account = self._accounts[key] = self._changed(account, limits, now)
        if limits.in_flight and account.in_flight >= limits.in_flight:
            raise Limited(f"{limits.in_flight} requests in flight", _IN_FLIGHT_RETRY_S)
        if limits.requests_per_minute and (wait := account.requests.wait_s(1.0, now)):
            raise Limited(f"{limits.requests_per_minute} requests per minute", wait)
        if limits.tokens_per_minute and (wait := account.tokens.wait_s(1.0, now)):
            raise Limited(f"{limits.tokens_per_minute} tokens per minute", wait)
        if limits.requests_per_minute:
            account.requests.take(1.0, now)
        account.in_flight += 1
        return Grant(account)

    def in_flight(self, key: bytes) -> int:
        """How many requests of `key` are open."""
        account = self._accounts.get(key)
        return 0 if account is None else account.in_flight

    def keep(self, keys: set[bytes]) -> None:
        """Forget the accounts of all other keys; their open requests end as ever. Mutates."""
        self._accounts = {key: account for key, account in self._accounts.items() if key in keys}

    @staticmethod
    def _changed(account: _Account, limits: Limits, now: float) -> _Account:
        """The account under new limits. Open requests stay with it: their grants know this very object."""
        debt = min(0.0, account.tokens.level(now)) if account.limits.tokens_per_minute else 0.0
        account.limits = limits
        account.requests = Bucket(limits.requests_per_minute, now)
        account.tokens = Bucket(limits.tokens_per_minute, now)
        if limits.tokens_per_minute and debt:
            account.tokens.take(limits.tokens_per_minute - debt, now)
        return account
