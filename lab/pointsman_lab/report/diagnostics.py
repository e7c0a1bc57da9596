"""Diagnostics of a run: splits, tails, hotspots and timelines, and two runs compared request by request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.measures import class_of
from pointsman_lab.report.request_record import RequestRecord

# Limits above which answers are counted as slow, s.
TAIL_S = (5, 10, 20, 30, 50, 100)
# Name of a latency -> attribute of RequestRecord.
LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s"}
CLASSES = ("LIGHT", "MEDIUM", "HEAVY_COLO", "HEAVY_P2P")
# Number of rows in the tables of sessions and of requests.
TOP = 10
# Number of bootstrap resamples of a mean difference's interval.
RESAMPLES = 2_000
# Number of pieces of a timeline over which a hit rate is computed.
HIT_RATE_WINDOW = 6
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


def groups(records: Sequence[RequestRecord], of: Callable[[RequestRecord], str]) -> dict[str, list[RequestRecord]]:
    """Group complete answers by the name that `of` returns, the largest group first; answers with an empty name are left out."""
    found: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.ok and (name := of(record)):
            found.setdefault(name, []).append(record)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def by_class(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Group complete answers by class_of(), in the order of CLASSES; empty if the run did not read decisions."""
    found = groups(records, class_of)
    return {name: found[name] for name in CLASSES if name in found}


def by_decision(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Group complete answers by the rule that chose the answering instance, or by the reason without a rule."""
    return groups(records, lambda record: record.rule or record.reason)


def values(records: Sequence[RequestRecord], metric: str) -> FloatArray:
    """Return a latency (a value of LATENCIES, in s) of the complete answers that have it."""
    found = [value for record in records if record.ok and (value := getattr(record, metric)) is not None]
    return np.array(found, dtype=np.float64)


def tail_counts(records: Sequence[RequestRecord]) -> dict[str, list[int]]:
    """Return, for TTFT and E2E, how many answers took longer than each limit of TAIL_S."""
    return {
        name: [int((values(records, LATENCIES[name]) > limit).sum()) for limit in TAIL_S] for name in ("TTFT", "E2E")
    }


@dataclass(frozen=True)
class Timelines:
    """Figures of every instance over equal pieces of the run: rows are `instances`, columns begin at `times` (s).

    `panels`: name with unit -> array of shape (instances, times); NaN where no value is known. `sampled` is False if the run has
    no samples and the figures are computed from the requests' own times.
    """

    instances: list[str]
    times: FloatArray
    panels: dict[str, FloatArray]
    sampled: bool


def timelines(
    records: Sequence[RequestRecord], samples: Sequence[InstanceSample], pieces: int = 160
) -> Timelines | None:
    """Return load, KV usage and hit rates over time by instance; None for a run without answers."""
    placed = [record for record in records if record.instance]
    if not placed:
        return None
    end = max(record.t_send + record.e2e_s for record in placed)
    times = np.linspace(0.0, end, pieces + 1)[:-1] if end else np.zeros(1)
    if not samples:
        names = sorted({record.instance for record in placed})
        middles = times + end / pieces / 2
        rows = np.array([_in_flight(placed, name, middles) for name in names])
        return Timelines(names, times, {"requests in flight": rows}, sampled=False)
    names = sorted({sample.instance for sample in samples})
    by_name = {name: [sample for sample in samples if sample.instance == name] for name in names}
    panels: dict[str, Callable[[Sequence[InstanceSample]], FloatArray]] = {
        "requests in flight": lambda of: _last_known([(sample.t, sample.num_requests) for sample in of], times),
        "tokens still to prefill": lambda of: _last_known(
            [(sample.t, sample.pending_prefill_tokens) for sample in of], times
        ),
        "KV in use, %": lambda of: _last_known([(sample.t, sample.kv_usage * 100) for sample in of], times),
        "prompt tokens from cache, %": lambda of: _hit_rates(of, times),
    }
    if any(sample.gpus for sample in samples):
        panels["GPU busy, %"] = lambda of: _last_known([(sample.t, _gpu_busy(sample)) for sample in of], times)
    return Timelines(
        names,
        times,
        {name: np.array([row(by_name[instance]) for instance in names]) for name, row in panels.items()},
        sampled=True,
    )


def panel_maxima(found: Iterable[Timelines]) -> dict[str, float]:
    """Return for each panel the value of its brightest colour, common to all runs: the largest value, at least 1; 100 for per
    cent."""
    most: dict[str, float] = {}
    for shown in found:
        for name, grid in shown.panels.items():
            known = grid[~np.isnan(grid)]
            most[name] = max(most.get(name, 1.0), 100.0 if "%" in name else float(known.max()) if len(known) else 0.0)
    return most


@dataclass(frozen=True)
class Hotspot:
    """The instance with the most open requests: its mean number of open requests, and the mean over all instances."""

    instance: str
    open_mean: float
    fleet_mean: float
    sessions: list[SessionShare]

    @property
    def ratio(self) -> float:
        """The instance's mean over that of all instances; 1 means an even load."""
        return self.open_mean / self.fleet_mean if self.fleet_mean else 1.0


@dataclass(frozen=True)
class SessionShare:
    """The requests of one session on one instance."""

    session: str  # its id, as in RequestRecord
    requests: int  # their number, failed ones included
    prompt_tokens: int  # as the engine counted them; requests without a count are left out
    computed_tokens: int  # prompt tokens that were not cached
    output_tokens: int  # the same
    open_s: float  # sum of the requests' E2E
    ttft_max_s: float  # 0 if no request had a first token
    records: list[RequestRecord]  # the requests themselves, in the order of the run's records


def hotspot(records: Sequence[RequestRecord], known: Iterable[str] = ()) -> Hotspot | None:
    """Return the busiest instance with its TOP sessions, the longest open first; None for a run without answers. `known`:
    instances, also those without requests."""
    placed = [record for record in records if record.instance]
    if not placed:
        return None
    span = max(record.t_send + record.e2e_s for record in placed) - min(record.t_send for record in placed)
    open_s = dict.fromkeys(known, 0.0)
    for record in placed:
        open_s[record.instance] = open_s.get(record.instance, 0.0) + record.e2e_s
    name = max(open_s, key=lambda session: open_s[session])
    sessions: dict[str, list[RequestRecord]] = {}
    for record in placed:
        if record.instance == name:
            sessions.setdefault(record.session, []).append(record)
    shares = sorted((_share(session, of) for session, of in sessions.items()), key=lambda share: -share.open_s)[:TOP]
    mean = sum(open_s.values()) / len(open_s)
    return Hotspot(name, open_s[name] / span if span else 0.0, mean / span if span else 0.0, shares)


def slowest(records: Sequence[RequestRecord]) -> list[tuple[RequestRecord, int]]:
    """Return the TOP answers by TTFT, each with the number of other requests open on its instance when it was sent."""
    good = [record for record in records if record.ok and record.ttft_s is not None]
    worst = sorted(good, key=lambda record: -(record.ttft_s or 0.0))[:TOP]
    return [
        (
            record,
            sum(
                other.instance == record.instance and other.t_send <= record.t_send < other.t_send + other.e2e_s
                for other in records
                if other is not record
            ),
        )
        for record in worst
    ]


@dataclass(frozen=True)
class LatencyDifference:
    """Difference of a latency between two runs, request by request (s): other - base, negative is faster."""

    pairs: int  # number of requests that have the latency in both runs
    mean: float  # over the pairs
    # Ends of the mean's 95 % interval over resampled sessions of the same two runs. The interval does not include the variation
    # between different pairs of runs.
    low: float
    high: float  # upper end
    median: float  # over the pairs
    faster: float  # share of the pairs
    slower: float  # share of the pairs


@dataclass(frozen=True)
class MatchedRequests:
    """The requests that two runs both answered, in the same order; `unmatched` counts those that one run alone answered."""

    base: list[RequestRecord]
    other: list[RequestRecord]
    unmatched: int

    def difference(self, metric: str, route_class: str = "") -> LatencyDifference | None:
        """Return the difference over all pairs, or over those whose base has the class; None without pairs."""
        sessions: dict[str, list[float]] = {}
        for base, other in zip(self.base, self.other, strict=True):
            first, second = getattr(base, metric), getattr(other, metric)
            if first is not None and second is not None and route_class in ("", class_of(base)):
                sessions.setdefault(base.session, []).append(second - first)
        if not sessions:
            return None
        differences = np.array([difference for of in sessions.values() for difference in of])
        low, high = _bounds(list(sessions.values()))
        return LatencyDifference(
            pairs=len(differences),
            mean=float(differences.mean()),
            low=low,
            high=high,
            median=float(np.median(differences)),
            faster=float((differences < 0).mean()),
            slower=float((differences > 0).mean()),
        )

    def extremes(self) -> list[tuple[RequestRecord, RequestRecord]]:
        """Return the TOP pairs by absolute change of TTFT."""
        both = [
            pair for pair in zip(self.base, self.other, strict=True) if None not in (pair[0].ttft_s, pair[1].ttft_s)
        ]
        return sorted(both, key=lambda pair: -abs((pair[1].ttft_s or 0.0) - (pair[0].ttft_s or 0.0)))[:TOP]


def match_runs(base: Sequence[RequestRecord], other: Sequence[RequestRecord]) -> MatchedRequests:
    """Match two runs of one trace by session and turn."""
    first = {(record.session, record.turn): record for record in base if record.ok}
    second = {(record.session, record.turn): record for record in other if record.ok}
    common = [key for key in first if key in second]
    return MatchedRequests(
        [first[key] for key in common], [second[key] for key in common], len(first.keys() ^ second.keys())
    )


def _bounds(sessions: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean's 95 % interval by a bootstrap over whole sessions, since the turns of a session are not independent
    (Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). The random seed is fixed."""
    sums = np.array([sum(of) for of in sessions])
    counts = np.array([len(of) for of in sessions])
    rng = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES if len(sessions) > 1 else 1):
        drawn = rng.integers(len(sessions), size=len(sessions))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _share(session: str, records: list[RequestRecord]) -> SessionShare:
    prompt = sum(record.prompt_tokens or 0 for record in records)
    return SessionShare(
        session=session,
        requests=len(records),
        prompt_tokens=prompt,
        computed_tokens=prompt - sum(record.cached_tokens or 0 for record in records),
        output_tokens=sum(record.output_tokens or 0 for record in records),
        open_s=sum(record.e2e_s for record in records),
        ttft_max_s=max((record.ttft_s or 0.0 for record in records), default=0.0),
        records=records,
    )


def _in_flight(records: Sequence[RequestRecord], instance: str, moments: FloatArray) -> FloatArray:
    starts = np.sort([record.t_send for record in records if record.instance == instance])
    ends = np.sort([record.t_send + record.e2e_s for record in records if record.instance == instance])
    return (np.searchsorted(starts, moments, "right") - np.searchsorted(ends, moments, "right")).astype(np.float64)


def _last_known(points: Sequence[tuple[float, float]], times: FloatArray) -> FloatArray:
    """Return the last known value at the end of each piece; NaN before the first."""
    moments = np.array([moment for moment, _ in points])
    known = np.array([np.nan, *(value for _, value in points)])
    width = times[1] - times[0] if len(times) > 1 else 0.0
    found: FloatArray = known[np.searchsorted(moments, times + width, "right")]
    return found


def _hit_rates(samples: Sequence[InstanceSample], times: FloatArray) -> FloatArray:
    """Return the share of queried prompt tokens that were cached, in per cent, for each piece over the last HIT_RATE_WINDOW
    pieces; NaN without queries."""
    queries = _last_known([(sample.t, sample.prefix_queries) for sample in samples], times)
    hits = _last_known([(sample.t, sample.prefix_hits + sample.external_hits) for sample in samples], times)
    asked, found = (_increase(counts) for counts in (queries, hits))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(asked > 0, found / asked * 100, np.nan)


def _gpu_busy(sample: InstanceSample) -> float:
    """Return the mean utilisation of the sample's GPUs, in per cent; NaN without GPUs."""
    if not sample.gpus:
        return float("nan")
    return sum(gpu.utilisation for gpu in sample.gpus) / len(sample.gpus) * 100


def _increase(counts: FloatArray) -> FloatArray:
    """Return a counter's increase over the last HIT_RATE_WINDOW pieces; a decrease (a restart) counts as 0."""
    steps = np.diff(counts, prepend=counts[:1])
    steps = np.where(np.isnan(steps), 0.0, np.maximum(steps, 0.0))
    totals = np.cumsum(steps)
    before = np.concatenate([np.zeros(min(HIT_RATE_WINDOW, len(totals))), totals[:-HIT_RATE_WINDOW]])
    found: FloatArray = totals - before
    return found


def parts_table(breakdown: Mapping[str, Any] | None) -> dict[str, Mapping[str, float]]:
    """Return the percentiles of each part of a breakdown; empty for a run without one."""
    parts = (breakdown or {}).get("parts_s", {})
    return {name: figures for name, figures in parts.items() if figures}
