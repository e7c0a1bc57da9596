"""Times as header fields tell them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pointsman_gateway.core.rate_limit_headers import anthropic_fields, duration, openai_fields
from pointsman_gateway.core.rate_limits import LimitStatus, Remaining


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (0.9999, "1000ms"), (1, "1s"), (1.2, "2s"), (360, "6m0s"), (3_661, "1h1m1s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_limits_that_are_there_are_sent() -> None:
    status = LimitStatus(tokens=Remaining(600, 90, 51.0))
    assert openai_fields(status) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "90",
        "x-ratelimit-reset-tokens": "51s",
    }
    assert anthropic_fields(status, datetime(2026, 1, 1, 23, 59, 30, tzinfo=UTC)) == {
        "anthropic-ratelimit-tokens-limit": "600",
        "anthropic-ratelimit-tokens-remaining": "90",
        "anthropic-ratelimit-tokens-reset": "2026-01-02T00:00:21Z",
    }
