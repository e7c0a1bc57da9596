"""The remainders of an API key's limits as header fields of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from pointsman_gateway.core.rate_limits import LimitStatus


def openai_fields(status: LimitStatus) -> dict[str, str]:
    """Return the fields of https://platform.openai.com/docs/guides/rate-limits for the limits that the key has."""
    fields = {}
    for name, limit in (("requests", status.requests), ("tokens", status.tokens)):
        if limit is not None:
            fields[f"x-ratelimit-limit-{name}"] = str(limit.limit)
            fields[f"x-ratelimit-remaining-{name}"] = str(limit.remaining)
            fields[f"x-ratelimit-reset-{name}"] = duration(limit.reset_s)
    return fields


def anthropic_fields(status: LimitStatus, now: datetime) -> dict[str, str]:
    """Return the fields of https://docs.anthropic.com/en/api/rate-limits, with times in RFC 3339 format; `now` is in UTC."""
    fields = {}
    for name, limit in (("requests", status.requests), ("tokens", status.tokens)):
        if limit is not None:
            full_at = (now + timedelta(seconds=math.ceil(limit.reset_s))).astimezone(UTC)
            fields[f"anthropic-ratelimit-{name}-limit"] = str(limit.limit)
            fields[f"anthropic-ratelimit-{name}-remaining"] = str(limit.remaining)
            fields[f"anthropic-ratelimit-{name}-reset"] = full_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return fields


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's format (120ms, 1s, 6m0s, 1h0m0s), rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1_000 - 1e-6)}ms"
    whole = math.ceil(seconds - 1e-6)
    hours, minutes = whole // 3_600, whole // 60 % 60
    return f"{hours}h" * bool(hours) + f"{minutes}m" * bool(hours or minutes) + f"{whole % 60}s"
