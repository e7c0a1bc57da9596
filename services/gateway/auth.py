"""Which tenant a client's key belongs to."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

DEFAULT_TENANT = "default"


class ApiKeys:
    """Keys by tenant. Without any, every client is the tenant "default"."""

    def __init__(self, keys: dict[str, str] | None = None) -> None:
        """`keys` maps key -> tenant; None lets everyone in."""
        self._digests = None if keys is None else [(_digest(key), tenant) for key, tenant in keys.items()]

    @classmethod
    def load(cls, file: Path) -> ApiKeys:
        """Read lines TENANT:KEY; blank lines and lines that begin with # do not count. Raises ValueError naming the line (never
        the key), OSError when the file cannot be read. An empty file lets nobody in."""
        keys: dict[str, str] = {}
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            tenant, colon, key = text.partition(":")
            if not (colon and tenant.strip() and key.strip()):
                raise ValueError(f"{file}:{number}: TENANT:KEY is needed")
            if key.strip() in keys:
                raise ValueError(f"{file}:{number}: this key was given before")
            keys[key.strip()] = tenant.strip()
        return cls(keys)

    def tenant_of(self, authorization: str) -> str | None:
        """The tenant whose key `authorization` ("Bearer KEY") shows, or None. Takes the same time for every key."""
        if self._digests is None:
            return DEFAULT_TENANT
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip())
        found = None
        for digest, tenant in self._digests:
            if hmac.compare_digest(digest, shown) and scheme.lower() == "bearer":
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
