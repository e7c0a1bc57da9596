"""Measures of one run, by group of requests and metric, by which trials are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pointsman_lab.report.request_record import RequestRecord

# group -> metric -> value. Times in s.
Measures = dict[str, dict[str, float]]

ALL = "all"
LATENCIES = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
# Range of the completions, as shares of all, over which throughput is measured. It excludes the start of the first sessions and
# the long think times of the last ones.
STEADY = (0.05, 0.95)


def measure(records: Sequence[RequestRecord], busy_s: Mapping[str, float]) -> Measures:
    """Return the measures of all requests, of each route class and of each rule that placed requests; over complete answers only.

    Metrics of each group: `{ttft,tpot,e2e}_{p50,p90,p99,mean}_s`, `requests` and `hit_ratio` (cached / prompt tokens), and if
    blocks were loaded from tiers below also `host_hit_ratio` and `storage_hit_ratio`, which are parts of `hit_ratio`. For all
    requests also: `session_{mean,p90}_s` (from a session's first request to its last answer, over sessions whose requests were
    all answered), `failed`, `offloads` (share of answers with mode OFFLOAD), `throughput` (answers per s while the middle 90 %
    of them ended) and `imbalance` (largest of `busy_s`, each instance's seconds in steps, over their mean: 1 is even).
    """
    good = [record for record in records if record.ok]
    groups: dict[str, list[RequestRecord]] = {ALL: good}
    for record in good:
        groups.setdefault(class_of(record), []).append(record)
        groups.setdefault(f"by {record.rule}", []).append(record)
    measures = {name: _latencies(groups[name]) for name in (ALL, *sorted(groups.keys() - {ALL}))}
    whole = measures[ALL]
    if times := [time for time in session_times(records) if time is not None]:
        whole |= {"session_mean_s": float(np.mean(times)), "session_p90_s": float(np.percentile(times, 90))}
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


def session_times(records: Sequence[RequestRecord]) -> list[float | None]:
    """Return the time from the first request to the last answer of each session, s; None if a request was not answered."""
    sessions: dict[str, list[RequestRecord]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    return [
        max(turn.t_send + turn.e2e_s for turn in turns) - min(turn.t_send for turn in turns)
        if all(turn.ok for turn in turns)
        else None
        for turns in sessions.values()
    ]


def class_of(record: RequestRecord) -> str:
    """Return the route class, with HEAVY split by place of prefill: HEAVY_P2P on another instance, HEAVY_COLO on the answering
    one."""
    if record.route_class != "HEAVY":
        return record.route_class
    return "HEAVY_P2P" if record.mode == "OFFLOAD" else "HEAVY_COLO"


def _latencies(records: Sequence[RequestRecord]) -> dict[str, float]:
    found = {"requests": float(len(records))}
    prompt = sum(record.prompt_tokens or 0 for record in records)
    if prompt:
        found["hit_ratio"] = sum(record.cached_tokens or 0 for record in records) / prompt
        for tier in ("host", "storage"):
            if loaded := sum(getattr(record, f"{tier}_tokens") for record in records):
                found[f"{tier}_hit_ratio"] = loaded / prompt
    for name in LATENCIES:
        values = [value for record in records if (value := getattr(record, f"{name}_s")) is not None]
        if values:
            points = np.percentile(values, PERCENTILES)
            found |= {f"{name}_p{share}_s": float(point) for share, point in zip(PERCENTILES, points, strict=True)}
            found[f"{name}_mean_s"] = float(np.mean(values))
    return found
