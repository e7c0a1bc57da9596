"""CORS response header fields for requests from configured origins (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pointsman_gateway.core.http_message import Headers

# An origin, or a pattern of origins: "*" in its host stands for any characters, and alone for every origin, also "null".
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._*-]+)(:([0-9]{1,5}|\*))?")
EXPOSED = (
    "X-Request-ID",
    "Retry-After",
    "X-Pointsman-Instance",
    "X-Pointsman-Decision",
    "X-Pointsman-Degraded",
    "X-Pointsman-Queue-Place",
    *(f"x-ratelimit-{kind}-{of}" for of in ("requests", "tokens") for kind in ("limit", "remaining", "reset")),
    "request-id",
    *(f"anthropic-ratelimit-{of}-{kind}" for of in ("requests", "tokens") for kind in ("limit", "remaining", "reset")),
)
# How long a browser may cache the response to a preflight, s.
MAX_AGE_S = 600
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")


class CorsPolicy:
    """The origins (patterns as ORIGIN) whose pages may read responses. Credentials that a browser adds by itself (cookies) are
    never allowed: a page sends its API key in a header that the page sets."""

    def __init__(self, origins: Iterable[str]) -> None:
        patterns = "|".join(_pattern(origin) for origin in origins)
        self._origins = re.compile(patterns) if patterns else None

    def answer_fields(self, origin: str) -> dict[str, str]:
        """Return the CORS fields of every response to a request from `origin` ("": not a cross-origin request of a browser)."""
        if self._origins is None:
            return {}
        if not self._allows(origin):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": ", ".join(EXPOSED),
        }

    def preflight_fields(self, headers: Headers, methods: str) -> dict[str, str]:
        """Return the further fields of the response to a preflight; empty if the preflight is not allowed.

        All header fields that the page requests are allowed: the fields of official clients change with their versions
        (X-Stainless-*), and the gateway does not forward fields that it does not know.
        """
        if not self._allows(headers.get("Origin")) or "Access-Control-Request-Method" not in headers:
            return {}
        allowed = {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": str(MAX_AGE_S)}
        asked = headers.get("Access-Control-Request-Headers")
        if _NAMES.fullmatch(asked):
            allowed["Access-Control-Allow-Headers"] = asked
        return allowed

    def _allows(self, origin: str) -> bool:
        return bool(origin) and self._origins is not None and self._origins.fullmatch(origin) is not None


def _pattern(origin: str) -> str:
    if origin == "*":
        return "[!-~]+"
    without_port = origin.removesuffix(":*")
    host = re.escape(without_port).replace(r"\*", "[a-z0-9._-]+")
    return host if without_port == origin else f"{host}:[0-9]{{1,5}}"
