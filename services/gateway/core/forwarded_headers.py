"""The headers that pass between clients and instances: an allow-list in each direction."""

from __future__ import annotations

from pointsman.gateway.core.http_message import Headers

REQUEST_HEADERS = ("Content-Type", "Accept", "traceparent", "tracestate")
RESPONSE_HEADERS = ("Content-Type", "Content-Encoding", "Cache-Control", "Retry-After")


def upstream_headers(headers: Headers) -> dict[str, str]:
    """What of a client's headers reaches an instance."""
    return {name: headers[name] for name in REQUEST_HEADERS if name in headers}


def client_headers(headers: Headers) -> dict[str, str]:
    """What of an instance's headers reaches the client."""
    return {name: headers[name] for name in RESPONSE_HEADERS if name in headers}
