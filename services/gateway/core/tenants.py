"""The clients that API keys stand for: tenant, limits and cache salt, parsed from lines of a keys file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from pointsman.gateway.core.rate_limits import RateLimits

DEFAULT_TENANT = "default"
_LIMITS = tuple(one.name for one in fields(RateLimits))


@dataclass(frozen=True)
class Client:
    """Whoever shows one key. `key` is its digest; `cache_salt` keeps its tenant's cached prefixes apart ("": shared)."""

    tenant: str
    key: bytes = b""
    limits: RateLimits = field(default_factory=RateLimits)
    cache_salt: str = ""


ANYONE = Client(DEFAULT_TENANT)


def parse_keys(lines: Iterable[str], source: str) -> dict[bytes, Client]:
    """Digest -> client, from lines `TENANT:KEY [NAME=VALUE ...]` with requests_per_minute, tokens_per_minute, in_flight and
    cache_salt as names. Blank lines and lines that begin with # do not count. Raises ValueError with the line's number."""
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
        if not (equals and value) or name not in (*_LIMITS, "cache_salt") or name in given:
            raise ValueError(f"options are {', '.join(_LIMITS)} and cache_salt, each once and as NAME=VALUE")
        given[name] = value
    salt = given.pop("cache_salt", "")
    if not all(value.isascii() and value.isdigit() and len(value) < 12 for value in given.values()):
        raise ValueError("limits are whole numbers")
    return Client(tenant, digest, RateLimits(**{name: int(value) for name, value in given.items()}), salt)


def digest_of(key: str) -> bytes:
    """What a key is known by here."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
