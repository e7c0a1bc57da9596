"""Counts on /metrics of requests whose KV from other engines was checked, and of those whose KV was wrong."""

from __future__ import annotations

from prometheus_client import Counter

from pointsman_connector.layerwise.kv_checks import CHECKED, LATE, WRONG_FROM

_CHECKED = Counter("pointsman_kv_checked_requests", "Requests whose KV from another engine was checked by checksums")
_LATE = Counter("pointsman_kv_late_requests", "Requests whose KV arrived after the answer that it is written")
_WRONG = Counter(
    "pointsman_kv_wrong_requests",
    "Requests whose KV from another engine differed from its checksums; the KV was not used",
    ("sender",),
)


def count_check(name: str, requests: float) -> None:
    """Count `requests` of the statistic `name`, if it is one of KV checks."""
    if name == CHECKED:
        _CHECKED.inc(requests)
    elif name == LATE:
        _LATE.inc(requests)
    elif name.startswith(WRONG_FROM):
        _WRONG.labels(sender=name.removeprefix(WRONG_FROM)).inc(requests)
