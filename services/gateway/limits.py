"""How much a key may ask for: requests and tokens a minute as token buckets, and requests in flight. Pure."""

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
class Limits:
    """What one key may use; 0 means as much as it likes. A minute's worth may come at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts (cached ones too) and answers
    in_flight: int = 0


NO_LIMITS = Limits()


class Limited(Exception):
    """Too much. `what` names the limit; the same request may pass after `retry_after_s`, never 0."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s


@dataclass
class Bucket:
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
class Account:
    """What one key has used. Limits that change meet it as it is: what was drawn stays drawn, what is open stays open."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    in_flight: int = 0
    elsewhere: int = 0  # requests in flight at other processes


class Book(Protocol):
    """Where one key's account is kept."""

    def open(self) -> AbstractContextManager[Account]:
        """The account, which nobody else changes until it is closed."""


class OwnBook:
    """An account of this process alone."""

    def __init__(self) -> None:
        self._account = Account()

    def open(self) -> AbstractContextManager[Account]:
        """The account."""
        return nullcontext(self._account)


class Grant:
    """One admitted request. Closed exactly once in effect, however often close() is called."""

    def __init__(self, book: Book | None, limits: Limits) -> None:
        """`book`: None where nothing is counted."""
        self._book = book
        self._limits = limits
        self._charged = 0

    def charge(self, tokens: int, now: float) -> None:
        """Say how many tokens the request has used so far, in all; a later and better figure replaces the one before. Mutates."""
        if self._book is not None and self._limits.tokens_per_minute:
            with self._book.open() as account:
                account.tokens.take(tokens - self._charged, self._limits.tokens_per_minute, now)
        self._charged = tokens

    def close(self) -> None:
        """It is no longer in flight, and not charged any more. Mutates."""
        book, self._book = self._book, None
        if book is not None:
            with book.open() as account:
                account.in_flight -= 1


class Limiter:
    """Admits requests by their keys' accounts. Keys without any limit have none."""

    def __init__(self, book_of: Callable[[bytes], Book] = lambda _: OwnBook()) -> None:
        """`book_of`: a key's book, asked for once as long as the key is known."""
        self._book_of = book_of
        self._books: dict[bytes, Book] = {}

    def admit(self, key: bytes, limits: Limits, now: float) -> Grant:
        """Admit one request of `key` (any name for it). Raises Limited, and then nothing is used up. Mutates."""
        if limits == NO_LIMITS:
            return Grant(None, limits)
        book = self._books.get(key)
        if book is None:
            book = self._books[key] = self._book_of(key)
        requests, tokens, most = limits.requests_per_minute, limits.tokens_per_minute, limits.in_flight
        with book.open() as account:
            if most and account.in_flight + account.elsewhere >= most:
                raise Limited(f"{most} requests in flight", _IN_FLIGHT_RETRY_S)
            if requests and (wait := account.requests.wait_s(1.0, requests, now)):
                raise Limited(f"{requests} requests per minute", wait)
            if tokens and (wait := account.tokens.wait_s(1.0, tokens, now)):
                raise Limited(f"{tokens} tokens per minute", wait)
            if requests:
                account.requests.take(1.0, requests, now)
            account.in_flight += 1
        return Grant(book, limits)

    def in_flight(self, key: bytes) -> int:
        """How many requests of `key` are open in this process."""
        book = self._books.get(key)
        if book is None:
            return 0
        with book.open() as account:
            return account.in_flight

    def keep(self, keys: set[bytes]) -> None:
        """Forget the books of all other keys; their open requests end as ever. Mutates."""
        self._books = {key: book for key, book in self._books.items() if key in keys}
