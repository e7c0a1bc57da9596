"""Comparison of paired live and simulated runs of several policies: means, differences between policies, and their signs. Pure.

A draw is the sessions of a load under a seed. Every policy serves every draw, live and simulated, so that differences are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal
from zlib import crc32

import msgspec

from pointsman_lab.experiments.paired_statistics import Estimate, difference_by_seed
from pointsman_lab.live.model_accuracy import GOAL
from pointsman_lab.report.measures import ALL, measure, session_times
from pointsman_lab.report.request_record import RequestRecord

Kind = Literal["live", "simulated"]
LIVE: Kind = "live"
SIMULATED: Kind = "simulated"
# The compared metrics with their labels. TTFT and session time have a goal for the difference of live and simulated means.
METRICS = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p90_s": "TTFT p90",
    "session_mean_s": "session time mean",
    "e2e_mean_s": "E2E mean",
    "tpot_mean_s": "TPOT mean",
    "hit_ratio": "cached share",
}
GOAL_METRICS = ("ttft_mean_s", "session_mean_s")


@dataclass(frozen=True)
class Case:
    """One run to make: `policy` serves the draw of `seed` at `rate` times the recorded rate of session starts."""

    policy: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.policy}-rate-{self.rate:g}-seed-{self.seed}"

    @property
    def number(self) -> int:
        """A number that other cases do not have, nor the seven after it: no case must find the prompts of another one cached."""
        return crc32(self.name.encode()) * 8


class StoredRun(msgspec.Struct, frozen=True):
    """The measures of a run."""

    kind: Kind  # live or simulated
    policy: str  # with the ending +admission for a router with session admission
    rate: float  # factor on the recorded rate of session starts
    seed: int  # of the draw
    measures: dict[str, float]  # by metric, as run_measures() returns them
    costs: int  # number of the fleet's costs, which are measured around a live run and used for a simulated run
    wake_delay_s: float = 0.0  # mean delay of a task that sleeps during a live run: a busy machine wakes it late

    @property
    def case(self) -> Case:
        """The run's case."""
        return Case(self.policy, self.rate, self.seed)


def rounds(policies: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> Iterator[list[Case]]:
    """Yield the cases of each seed. The order of the policies is reversed from one seed to the next (ABBA): a drift of the
    machine's speed then has the same effect on all."""
    for number, seed in enumerate(seeds):
        ordered = policies if number % 2 == 0 else policies[::-1]
        yield [Case(policy, rate, seed) for rate in rates for policy in ordered]


def run_measures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the measures of a run: those of measure() for all requests, and the numbers of `sessions` whose requests were all
    answered, and of other ones (`sessions_failed`)."""
    times = session_times(records)
    failed = times.count(None)
    return measure(records, {})[ALL] | {"sessions": float(len(times) - failed), "sessions_failed": float(failed)}


class MeanComparison(msgspec.Struct, frozen=True):
    """The means of one metric of one policy, live and simulated."""

    rate: float  # as StoredRun.rate
    policy: str  # as StoredRun.policy
    metric: str  # a key of METRICS
    live: float  # mean of the live runs, in s; of hit_ratio a share, 0 to 1
    simulated: float  # mean of the simulated runs of the same draws
    trials: int  # number of draws that the means are over

    @property
    def error(self) -> float:
        """Error of the simulated mean, relative to the live one; infinite if only the live mean is 0."""
        if not self.live:
            return float("inf") if self.simulated else 0.0
        return self.simulated / self.live - 1


@dataclass(frozen=True)
class SignComparison:
    """The paired difference of `policy` to `baseline` in one metric, live and simulated."""

    rate: float  # as StoredRun.rate
    policy: str
    baseline: str
    metric: str  # a key of METRICS
    live: Estimate  # policy - baseline in the live runs, over the draws that both served live and simulated
    simulated: Estimate  # the same of the simulated runs

    @property
    def verdict(self) -> str:
        """Say "one sign" or "signs differ" if the live interval excludes 0, else "no difference live"."""
        if not self.live.differs:
            return "no difference live"
        return "one sign" if self.live.mean * self.simulated.mean > 0 else "signs differ"


def compare_means(runs: Sequence[StoredRun]) -> list[MeanComparison]:
    """Compare METRICS over the draws that were served both live and simulated, by rate and policy in order of appearance."""
    found = []
    by_kind = _by_kind(runs)
    for rate, policy in _cells(runs):
        for metric in METRICS:
            live, simulated = (_values(by_kind[kind], rate, policy, metric) for kind in (LIVE, SIMULATED))
            if common := sorted(live.keys() & simulated.keys()):
                live_mean, simulated_mean = (fmean(values[seed] for seed in common) for values in (live, simulated))
                found.append(MeanComparison(rate, policy, metric, live_mean, simulated_mean, len(common)))
    return found


def compare_signs(runs: Sequence[StoredRun]) -> list[SignComparison]:
    """Compare the differences between all pairs of policies, over the draws that both served live and simulated."""
    found = []
    by_kind = _by_kind(runs)
    cells = _cells(runs)
    for at, (rate, policy) in enumerate(cells):
        for other_rate, baseline in cells[:at]:
            if other_rate != rate:
                continue
            for metric in METRICS:
                both = [
                    (_values(by_kind[kind], rate, policy, metric), _values(by_kind[kind], rate, baseline, metric))
                    for kind in (LIVE, SIMULATED)
                ]
                common = set.intersection(*(set(values) for pair in both for values in pair))
                differences = [
                    difference_by_seed({seed: own[seed] for seed in sorted(common)}, others) for own, others in both
                ]
                if differences[0] is not None and differences[1] is not None:
                    found.append(SignComparison(rate, policy, baseline, metric, differences[0], differences[1]))
    return found


def _by_kind(runs: Sequence[StoredRun]) -> dict[Kind, Mapping[Case, StoredRun]]:
    return {kind: {run.case: run for run in runs if run.kind == kind} for kind in (LIVE, SIMULATED)}


def _cells(runs: Sequence[StoredRun]) -> list[tuple[float, str]]:
    """Return rates and policies, rates ascending, policies in order of appearance."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    return sorted({(run.rate, run.policy) for run in runs}, key=lambda cell: (cell[0], policies.index(cell[1])))


def _values(runs: Mapping[Case, StoredRun], rate: float, policy: str, metric: str) -> dict[int, float]:
    return {
        case.seed: run.measures[metric]
        for case, run in runs.items()
        if (case.rate, case.policy) == (rate, policy) and metric in run.measures
    }


def page(runs: Sequence[StoredRun]) -> str:
    """Return the comparison as Markdown: means with their errors, differences between policies, and what the goals say."""
    means, signs = compare_means(runs), compare_signs(runs)
    live = [run for run in runs if run.kind == LIVE]
    lines = ["| load | policy | figure | live | simulated | error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {mean.rate:g} | {mean.policy} | {METRICS[mean.metric]} | {_shown(mean.metric, mean.live)} | "
        f"{_shown(mean.metric, mean.simulated)} | {mean.error:+.1%} |"
        for mean in means
    ]
    lines += ["", "| load | difference | figure | live | simulated | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {sign.rate:g} | {sign.policy} - {sign.baseline} | {METRICS[sign.metric]} | {_interval(sign.metric, sign.live)} | "
        f"{_interval(sign.metric, sign.simulated)} | {sign.verdict} |"
        for sign in signs
    ]
    decided = [sign for sign in signs if sign.live.differs]
    agreed = [sign for sign in decided if sign.verdict == "one sign"]
    errors = [abs(mean.error) for mean in means if mean.metric in GOAL_METRICS]
    trials = [mean.trials for mean in means] or [0]
    draws = " to ".join(str(number) for number in sorted({min(trials), max(trials)}))
    delays = [run.wake_delay_s for run in live] or [0.0]
    failed = sum(run.measures.get("failed", 0.0) for run in live)
    lines += [
        "",
        f"{draws} paired draws of each load. The intervals are at 95 % (Student's t, paired).",
        f"The live interval excludes 0 for {len(decided)} of {len(signs)} differences; of these, live and simulated difference "
        f"have one sign for {len(agreed)}.",
        f"The greatest error of a mean TTFT or session time is {max(errors, default=0.0):.1%} (goal: {GOAL:.0%}).",
        f"During live runs a sleeping task woke up {fmean(delays) * 1e3:.1f} ms late on average, at most {max(delays) * 1e3:.1f} "
        f"ms (means of runs). {failed:.0f} live requests failed.",
    ]
    return "\n".join(lines) + "\n"


def _shown(metric: str, value: float) -> str:
    if metric == "hit_ratio":
        return f"{value:.1%}"
    return f"{value:,.2f} s" if abs(value) >= 1 else f"{value * 1e3:,.0f} ms"


def _interval(metric: str, estimate: Estimate) -> str:
    mean = ("+" if estimate.mean >= 0 else "") + _shown(metric, estimate.mean)
    return mean if estimate.half_width is None else f"{mean} ± {_shown(metric, estimate.half_width)}"
