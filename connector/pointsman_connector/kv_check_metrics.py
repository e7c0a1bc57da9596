"""Counts on /metrics of requests whose KV from other engines was checked, and of those whose KV was wrong."""

from __future__ import annotations

from prometheus_client import Counter

from pointsman_connector.layerwise.kv_checks import CHECKED, LATE, WRONG_FROM

_CHECKED = Counter("pointsman_kv_checked_requests", "Requests whose KV from another engine was checked by checksums")
_LATE = Counter(
    "pointsman_kv_late_requests",
    "Requests whose KV arrived after the answer that it is written, by the first tensor parallel worker",
)
_WRONG = Counter(
    "pointsman_kv_wrong_requests",
    "Requests whose KV from another engine differed from its checksums and was not used, by each tensor parallel worker",
    ("sender", "engine_id", "engine"),
)


def counts_checks(name: object) -> bool:
    """Return whether a connector's statistic of this name is one of KV checks. Other connectors' names can be other than str."""
    return isinstance(name, str) and (name in (CHECKED, LATE) or name.startswith(WRONG_FROM))


def count_check(name: str, requests: float, engine: int) -> None:
    """Count `requests` of the statistic `name` of the data-parallel rank `engine`, which is one of KV checks. Of wrong KV the
    sender is named by its bootstrap server's URL and its engine id, which the rank refuses from now on."""
    if name == CHECKED:
        _CHECKED.inc(requests)
    elif name == LATE:
        _LATE.inc(requests)
    else:
        sender, _, engine_id = name.removeprefix(WRONG_FROM).partition(" ")
        _WRONG.labels(sender=sender, engine_id=engine_id, engine=engine).inc(requests)
