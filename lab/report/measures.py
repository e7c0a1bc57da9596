"""What one run comes to, as numbers that trials can be compared by: by group of requests, by metric. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pointsman.lab.report.request_record import RequestRecord

# group -> metric -> value. Times in s.
Measures = dict[str, dict[str, float]]

ALL = "all"
LATENCIES = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
# Completions between these shares of all are steady: neither the first sessions' start nor the last ones' long thinking counts.
STEADY = (0.05, 0.95)


def measure(records: Sequence[RequestRecord], busy_s: Mapping[str, float]) -> Measures:
    """The measures of all requests, of each route class and of each rule that placed some; of complete answers only.

    `{ttft,tpot,e2e}_{p50,p90,p99,mean}_s`, `requests`, `hit_ratio` (cached / prompt tokens), and for all: `failed`, `offloads`
    (share of answers whose prefill was elsewhere), `throughput` (answers per s while the middle 90 % of them ended) and
    `imbalance` (the busiest instance's time in steps over the mean: 1 is even), of `busy_s` (s by instance).
    """
    good = [record for record in records if record.ok]
    groups: dict[str, list[RequestRecord]] = {ALL: good}
    for record in good:
        groups.setdefault(class_of(record), []).append(record)
        groups.setdefault(f"by {record.rule}", []).append(record)
    measures = {name: _latencies(groups[name]) for name in (ALL, *sorted(groups.keys() - {ALL}))}
    whole = measures[ALL]
    whole["failed"] = float(len(records) - len(good))
    if good:
        whole["offloads"] = sum(record.mode == "OFFLOAD" for record in good) / len(good)
    ends = sorted(record.t_send + record.e2e_s for record in good)
    if len(ends) > 1:
        low, high = (round(share * (len(ends) - 1)) for share in STEADY)
        if ends[high] > ends[low]:
            whole["throughput"] = (high - low) / (ends[high] - ends[low])
    if total := sum(busy_s.values()):
        whole["imbalance"] = max(busy_s.values()) * len(busy_s) / total
    return measures


def class_of(record: RequestRecord) -> str:
    """LIGHT, MEDIUM, or HEAVY apart by where the prefill was: HEAVY_P2P elsewhere, HEAVY_COLO on the answering instance."""
    if record.route_class != "HEAVY":
        return record.route_class
    return "HEAVY_P2P" if record.mode == "OFFLOAD" else "HEAVY_COLO"


def _latencies(records: Sequence[RequestRecord]) -> dict[str, float]:
    found = {"requests": float(len(records))}
    prompt = sum(record.prompt_tokens or 0 for record in records)
    if prompt:
        found["hit_ratio"] = sum(record.cached_tokens or 0 for record in records) / prompt
    for name in LATENCIES:
        values = [value for record in records if (value := getattr(record, f"{name}_s")) is not None]
        if values:
            points = np.percentile(values, PERCENTILES)
            found |= {f"{name}_p{share}_s": float(point) for share, point in zip(PERCENTILES, points, strict=True)}
            found[f"{name}_mean_s"] = float(np.mean(values))
    return found
