"""The clients of API keys (tenant, limits, cache salt, priority, weight, pings), parsed from the lines of a keys file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.enum_words import values
from pointsman_gateway.core.rate_limits import RateLimits

DEFAULT_TENANT = "default"
_LIMITS = tuple(limit.name for limit in fields(RateLimits))
_PRIORITIES = {word.lower(): value for word, value in values(placement_pb2.Priority).items() if value}
MAX_WEIGHT = 1_000
MAX_SILENCE_S = 3_600.0
_OPTIONS = (*_LIMITS, "cache_salt", "priority", "weight", "silence_s")


@dataclass(frozen=True)
class Client:
    """The client of one API key. `key` is the key's digest. `cache_salt` separates the tenant's cached prefixes from those of
    other tenants ("": shared). `priority` (placement_pb2.Priority) and `weight` apply while the client's requests wait in a
    router. `silence_s`: interval of pings in its streams, s (0: none; None: the gateway's own)."""

    tenant: str  # as in the keys file; several keys may have the same
    key: bytes = b""
    limits: RateLimits = field(default_factory=RateLimits)  # of this key alone
    cache_salt: str = ""
    priority: placement_pb2.Priority.ValueType = placement_pb2.PRIORITY_STANDARD
    weight: int = 1
    silence_s: float | None = None


ANYONE = Client(DEFAULT_TENANT)


def parse_keys(lines: Iterable[str], source: str) -> dict[bytes, Client]:
    """Parse lines `TENANT:KEY [NAME=VALUE ...]`; return the clients by the digests of their keys.

    The names are requests_per_minute, tokens_per_minute, in_flight, cache_salt, priority (batch, standard, interactive),
    weight (1 to 1,000) and silence_s (0 to 3,600). Blank lines and lines that begin with # are ignored. Raises ValueError with
    the line's number.
    """
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        shown, *options = text.split()
        tenant, colon, key = shown.partition(":")
        if not (colon and tenant and key):
            raise ValueError(f"{source}:{number}: expected TENANT:KEY")
        digest = digest_of(key)
        if digest in clients:
            raise ValueError(f"{source}:{number}: duplicate key")
        try:
            clients[digest] = _client(tenant, digest, options)
        except ValueError as error:
            raise ValueError(f"{source}:{number}: {error}") from None
    return clients


def _client(tenant: str, digest: bytes, options: list[str]) -> Client:
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (equals and value) or name not in _OPTIONS or name in given:
            raise ValueError(
                f"options must be {', '.join(_OPTIONS[:-1])} and {_OPTIONS[-1]}, each at most once, as NAME=VALUE"
            )
        given[name] = value
    salt, priority = given.pop("cache_salt", ""), given.pop("priority", "standard")
    silence_s = _silence_s(given.pop("silence_s")) if "silence_s" in given else None
    if priority not in _PRIORITIES:
        raise ValueError(f"priority must be one of {', '.join(_PRIORITIES)}")
    if not all(value.isascii() and value.isdigit() and len(value) < 12 for value in given.values()):
        raise ValueError("limits and weights must be whole numbers of at most 11 digits")
    weight = int(given.pop("weight", "1"))
    if not 1 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be from 1 to {MAX_WEIGHT:,}")
    limits = RateLimits(**{name: int(value) for name, value in given.items()})
    return Client(tenant, digest, limits, salt, _PRIORITIES[priority], weight, silence_s)


def _silence_s(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SILENCE_S:
        raise ValueError(f"silence_s must be from 0 to {MAX_SILENCE_S:,.0f}")
    return seconds


def digest_of(key: str) -> bytes:
    """Return the digest by which the gateway identifies a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
