"""The allow-lists of headers that the gateway forwards between clients and instances, one for each direction."""

from __future__ import annotations

from pointsman_gateway.core.http_message import JSON_FIELDS, Headers
from pointsman_gateway.core.streaming.answer_form import METADATA

REQUEST_HEADERS = ("Content-Type", "Accept", "traceparent", "tracestate")
RESPONSE_HEADERS = ("Content-Type", "Content-Encoding", "Cache-Control", "Retry-After", METADATA)


def upstream_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of a client that are forwarded to an instance."""
    return {name: headers[name] for name in REQUEST_HEADERS if name in headers}


def error_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of the client's answer in place of an instance's error, whose body is written anew."""
    wait = {"Retry-After": headers["Retry-After"]} if "Retry-After" in headers else {}
    return JSON_FIELDS | wait


def client_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of an instance that are forwarded to the client."""
    return {name: headers[name] for name in RESPONSE_HEADERS if name in headers}
