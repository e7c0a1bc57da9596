"""Span attributes by OpenTelemetry's conventions for generative AI.

Names and meanings: OpenTelemetry semantic conventions, "Semantic conventions for generative client AI spans". Content (messages,
tools, stop sequences) is never among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_common.core.addresses import address_of_url
from pointsman_common.core.tracing import Value, known_attributes
from pointsman_gateway.core.api import ApiCall, Endpoint
from pointsman_gateway.core.streaming.parse_stream_end import Usage

PROVIDER = "vllm"  # not one of the well-known names: the conventions allow a custom name
# Operation names that the conventions define. Other operations are named after their endpoint.
_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETION: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
# Fields of the body, the same in all APIs, that have their own names after "gen_ai.request.".
_FIELDS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_INT64 = 1 << 63


def request_attributes(call: ApiCall) -> dict[str, Value]:
    """Return the attributes of a request's parameters."""
    values: dict[str, Value | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(call.endpoint, call.endpoint.name.lower()),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model,
        "gen_ai.request.stream": call.stream,
        "gen_ai.request.max_tokens": call.max_output_tokens or None,
    }
    values |= {f"gen_ai.request.{field}": _number(call.body, field) for field in _FIELDS}
    values["gen_ai.request.choice.count"] = _number(call.body, "n")
    return known_attributes(values)


def span_name(attributes: Mapping[str, Value]) -> str:
    """Return a span's name from its `request_attributes`."""
    return f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"


def answer_attributes(usage: Usage, url: str, time_to_first_chunk_s: float | None, error: str) -> dict[str, Value]:
    """Return the attributes of the response of an engine at `url` (http(s)://HOST:PORT). Token counts are the engine's own; input
    tokens include cached ones. `error` is empty if the request succeeded."""
    host, port = address_of_url(url)
    return known_attributes(
        {
            "server.address": host,
            "server.port": port,
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.usage.output_tokens": usage.output,
            "gen_ai.response.finish_reasons": (usage.finish_reason,) if usage.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": time_to_first_chunk_s,
            "error.type": error,
        }
    )


def _number(body: Mapping[str, Any], field: str) -> Value | None:
    """Return the body's field if it is a number that a span can hold (a float or an int64), else None."""
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or -_INT64 <= value < _INT64 else None
