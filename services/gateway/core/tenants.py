"""The clients that API keys stand for: tenant, limits, cache salt and priority, parsed from lines of a keys file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from pointsman.common.core.enum_words import values
from pointsman.gateway.core.rate_limits import RateLimits
from pointsman.router.v1 import placement_pb2

DEFAULT_TENANT = "default"
_LIMITS = tuple(one.name for one in fields(RateLimits))
_PRIORITIES = {word.lower(): value for word, value in values(placement_pb2.Priority).items() if value}
MAX_WEIGHT = 1_000
_OPTIONS = (*_LIMITS, "cache_salt", "priority", "weight")


@dataclass(frozen=True)
class Client:
    """Whoever shows one key. `key` is its digest; `cache_salt` keeps its tenant's cached prefixes apart ("": shared). `priority`
    (placement_pb2.Priority) and `weight` count while its requests wait in a router."""

    tenant: str
    key: bytes = b""
    limits: RateLimits = field(default_factory=RateLimits)
    cache_salt: str = ""
    priority: placement_pb2.Priority.ValueType = placement_pb2.PRIORITY_STANDARD
    weight: int = 1


ANYONE = Client(DEFAULT_TENANT)


def parse_keys(lines: Iterable[str], source: str) -> dict[bytes, Client]:
    """Digest -> client, from lines `TENANT:KEY [NAME=VALUE ...]` with requests_per_minute, tokens_per_minute, in_flight,
    cache_salt, priority (batch, standard, interactive) and weight (1 to 1,000) as names. Blank lines and lines that begin with
    # do not count. Raises ValueError with the line's number."""
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        shown, *options = text.split()
        tenant, colon, key = shown.partition(":")
        if not (colon and tenant and key):
            raise ValueError(f"{source}:{number}: TENANT:KEY is needed")
        digest = digest_of(key)
        if digest in clients:
            raise ValueError(f"{source}:{number}: this key was given before")
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
            raise ValueError(f"options are {', '.join(_OPTIONS[:-1])} and {_OPTIONS[-1]}, each once and as NAME=VALUE")
        given[name] = value
    salt, priority = given.pop("cache_salt", ""), given.pop("priority", "standard")
    if priority not in _PRIORITIES:
        raise ValueError(f"priority is one of {', '.join(_PRIORITIES)}")
    if not all(value.isascii() and value.isdigit() and len(value) < 12 for value in given.values()):
        raise ValueError("limits and weights are whole numbers")
    weight = int(given.pop("weight", "1"))
    if not 1 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight is from 1 to {MAX_WEIGHT:,}")
    limits = RateLimits(**{name: int(value) for name, value in given.items()})
    return Client(tenant, digest, limits, salt, _PRIORITIES[priority], weight)


def digest_of(key: str) -> bytes:
    """What a key is known by here."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
