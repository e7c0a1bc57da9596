"""Decides from paired trials whether a policy is no worse than `unified` in a cell, within limits. Pure.

The figure is the relative change against `unified` under the same draw. Latencies differ by factors between draws, so
the changes are averaged as logarithms: the mean is a geometric one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pointsman_lab.experiments.paired_statistics import estimate
from pointsman_lab.report.measures import ALL, Measures
from pointsman_lab.report.request_record import RequestRecord

SESSION = "session_mean_s"
FAILED = "failed"
# Metric -> its name in tables, and the largest relative change that the upper end of the interval may reach.
LIMITS: Mapping[str, tuple[str, float]] = {
    "ttft_p50_s": ("TTFT p50", 0.05),
    "ttft_p90_s": ("TTFT p90", 0.05),
    "ttft_p99_s": ("TTFT p99", 0.15),
    "e2e_p90_s": ("E2E p90", 0.05),
    "e2e_p99_s": ("E2E p99", 0.05),
    SESSION: ("session time", 0.05),
    "tpot_p90_s": ("TPOT p90", 0.5),
}
# Numbers of seeds after which a cell is looked at. After the last one every limit is decided.
SEEDS = (5, 10, 20)
PASS, FAIL, OPEN = "pass", "FAIL", "open"


@dataclass(frozen=True)
class Change:
    """The relative change of one metric over `trials` pairs: its geometric mean and its 95 % confidence interval."""

    metric: str  # key of LIMITS
    mean: float  # 0.05: 5 % more than under `unified`; `low` and `high` likewise
    low: float  # -1 with a single pair
    high: float  # infinite with a single pair
    trials: int

    @property
    def verdict(self) -> str:
        """PASS if the interval's upper end is within the limit, else FAIL if its lower end is not or no seed is left, else
        OPEN."""
        limit = LIMITS[self.metric][1]
        if self.high <= limit:
            return PASS
        return FAIL if self.low > limit or self.trials >= SEEDS[-1] else OPEN


def figures(records: Sequence[RequestRecord], measures: Measures) -> dict[str, float]:
    """Return the figures of a trial: the metrics of LIMITS, and the number of failed requests. A session's time is from the first
    time that its client sent its first request to the end of its last answer."""
    times: dict[str, tuple[float, float]] = {}
    for record in records:
        begin, end = times.get(record.session, (math.inf, 0.0))
        times[record.session] = min(begin, record.t_send), max(end, record.t_send + record.e2e_s)
    whole = measures[ALL]
    session_s = float(np.mean([end - begin for begin, end in times.values()])) if times else 0.0
    return {name: whole[name] for name in (*LIMITS, FAILED) if name in whole} | {SESSION: session_s}


def changes(ours: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]) -> list[Change]:
    """Return the change of each metric of LIMITS over the seeds that both have, at most SEEDS[-1] of them; figures by seed and
    metric.

    The interval is that of the paired differences of the logarithms (paired_statistics.estimate), as a relative change. Its upper
    end is the bound that the limits are for: 97.5 % of the distribution are below it.
    """
    seeds = [seed for seed in sorted(ours) if seed in base][: SEEDS[-1]]
    found = []
    for metric in LIMITS if seeds else ():
        logs = [math.log(ours[seed][metric] / base[seed][metric]) for seed in seeds]
        change = estimate(logs)
        found.append(
            Change(metric, math.expm1(change.mean), math.expm1(change.low), _expm1(change.high), change.trials)
        )
    return found


def failed_more(ours: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]) -> bool:
    """Return whether more requests failed than under `unified`, over the seeds that both have."""
    seeds = ours.keys() & base.keys()
    return sum(ours[seed][FAILED] for seed in seeds) > sum(base[seed][FAILED] for seed in seeds)


def verdict(found: Sequence[Change], *, more_failed: bool) -> str:
    """Return PASS, FAIL or OPEN for a cell: FAIL if any limit is exceeded or more requests failed."""
    verdicts = {outcome.verdict for outcome in found}
    if FAIL in verdicts or (more_failed and found):
        return FAIL
    return PASS if verdicts == {PASS} else OPEN


def seeds_needed(found: Sequence[Change], *, more_failed: bool) -> int:
    """Return how many seeds a cell must have run next; those that it has if it is decided."""
    done = found[0].trials if found else 0
    if done >= SEEDS[0] and verdict(found, more_failed=more_failed) != OPEN:
        return done
    return next((count for count in SEEDS if count > done), SEEDS[-1])


def table(cells: Mapping[str, tuple[Sequence[Change], bool]]) -> str:
    """Return a Markdown table of cells by name, each with its changes and whether more requests failed. A limit that is not kept
    is in bold."""
    names = [f"{name} (<= {limit:+.0%})" for name, limit in LIMITS.values()]
    lines = [
        f"| cell | seeds | {' | '.join(names)} | verdict |",
        "|" + "---|" * (len(names) + 3),
    ]
    for cell, (found, more_failed) in cells.items():
        text_of = {outcome.metric: _text(outcome) for outcome in found}
        trials = str(found[0].trials) if found else "0"
        row = [cell, trials, *(text_of.get(metric, "-") for metric in LIMITS), verdict(found, more_failed=more_failed)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _text(change: Change) -> str:
    if math.isinf(change.high):
        return f"{change.mean:+.1%}"
    text = f"{change.mean:+.1%} (to {change.high:+.1%})"
    return text if change.verdict == PASS else f"**{text}**"


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700 else math.inf
