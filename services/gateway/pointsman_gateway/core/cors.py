"""CORS response header fields for requests from configured origins (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pointsman_gateway.core.http_message import Headers

ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
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
    """The origins whose pages may read responses. Credentials that a browser adds by itself (cookies) are never allowed: a page
    sends its API key in a header that the page sets."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def answer_fields(self, origin: str) -> dict[str, str]:
        """Return the CORS fields of every response to a request from `origin` ("": not a cross-origin request of a browser)."""
        if not self._origins:
            return {}
        if origin not in self._origins:
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
        if headers.get("Origin") not in self._origins or "Access-Control-Request-Method" not in headers:
            return {}
        allowed = {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": str(MAX_AGE_S)}
        asked = headers.get("Access-Control-Request-Headers")
        if _NAMES.fullmatch(asked):
            allowed["Access-Control-Allow-Headers"] = asked
        return allowed
