"""Measures whether a fleet was scaled in time: TTFT p90 in a moving window, and the times of the decisions. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.session_starts import Ramp
from studies.autoscaling.autoscaled_simulator import AutoscaledSimulator

# Length of the moving window, s.
WINDOW_S = 120.0
# Distance between the ends of two windows, s.
GRID_S = 5.0
# Length of the last part of a run, s. In a longer run the load is constant before it.
LAST_S = 300.0


@dataclass(frozen=True)
class TtftWindows:
    """TTFTs of a run, in s, by the time of the first token, as in a scraped histogram; in the order of `moments`."""

    moments: Sequence[float]
    ttft_s: Sequence[float]

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> TtftWindows:
        """Return the TTFTs of the complete answers."""
        seen = sorted(
            (record.t_send + record.ttft_s, record.ttft_s)
            for record in records
            if record.ok and record.ttft_s is not None
        )
        return cls([at for at, _ in seen], [ttft_s for _, ttft_s in seen])

    def p90(self, since: float, until: float) -> float:
        """Return the TTFT p90 of the first tokens after `since` and up to `until` (s), in s; NaN if there are none."""
        part = self.ttft_s[bisect_right(self.moments, since) : bisect_right(self.moments, until)]
        return float(np.percentile(part, 90)) if part else float("nan")

    def exceeded_at(self, limit_s: float, since: float, until: float) -> float | None:
        """Return the first time (s) from `since` on from which the p90 of the last WINDOW_S is above `limit_s` for WINDOW_S.

        Times are on a grid of GRID_S. After WINDOW_S two windows with no request in common were above the limit. None if there is
        no such time whose WINDOW_S end by `until`.
        """
        started: float | None = None
        for now in self._grid(since, until):
            if not self.p90(now - WINDOW_S, now) > limit_s:
                started = None
            elif started is None:
                started = now
            elif now - started >= WINDOW_S:
                return started
        return None

    def worst_p90(self, since: float, until: float) -> float:
        """Return the highest p90 of the windows that end between these times (s), in s."""
        return max(self.p90(now - WINDOW_S, now) for now in self._grid(since, until))

    @staticmethod
    def _grid(since: float, until: float) -> Sequence[float]:
        return [since + number * GRID_S for number in range(int((until - since) / GRID_S) + 1)]


@dataclass(frozen=True)
class ScalingOutcome:
    """The result of scaling a fleet on a ramp. Times are in s after the start of the rise; None if there was none. TTFT p90 is a
    ratio to the p90 before. Paid time is a ratio to the paid time of the initial fleet.

    `decided_s`: the first decision for more instances. `doubled_s`: TTFT p90 doubled, and remained so (TtftWindows.exceeded_at).
    `early` counts the decisions for more instances before the rise.
    """

    decided_s: float | None
    doubled_s: float | None
    early: int
    p90: float  # of all first tokens after the start of the rise
    worst_p90: float  # highest of the windows of WINDOW_S that end after the start of the rise
    last_p90: float  # of the first tokens in the last LAST_S
    paid_before: float  # from `settle_s` to the start of the rise
    paid_after: float  # from the start of the rise to the end
    most_instances: int  # highest number of wanted instances, starting ones included

    @property
    def in_time(self) -> bool:
        """Whether TTFT p90 never doubled, or doubled after the decision."""
        return self.doubled_s is None or (self.decided_s is not None and self.decided_s < self.doubled_s)


def outcome_of(
    simulator: AutoscaledSimulator, records: Sequence[RequestRecord], ramp: Ramp, settle_s: float, p90_before_s: float
) -> ScalingOutcome:
    """Return the outcome of a run until `ramp.end_s`, without its first `settle_s`. `p90_before_s` is the TTFT of reference."""
    windows, rise_at, end = TtftWindows.of(records), ramp.before_s, ramp.end_s
    ups = [sync.at for sync in simulator.syncs if sync.after > sync.before]
    decided = next((at for at in ups if at >= rise_at), None)
    doubled = windows.exceeded_at(2 * p90_before_s, rise_at, end)
    initial = sum(life.wanted_at == 0.0 for life in simulator.lives)

    def paid(since: float, until: float) -> float:
        seconds = sum(life.paid_s(until) - life.paid_s(since) for life in simulator.lives)
        return seconds / (initial * (until - since))

    return ScalingOutcome(
        decided_s=None if decided is None else decided - rise_at,
        doubled_s=None if doubled is None else doubled - rise_at,
        early=sum(at < rise_at for at in ups),
        p90=windows.p90(rise_at, end) / p90_before_s,
        worst_p90=windows.worst_p90(rise_at, end) / p90_before_s,
        last_p90=windows.p90(end - LAST_S, end) / p90_before_s,
        paid_before=paid(settle_s, rise_at),
        paid_after=paid(rise_at, end),
        most_instances=max(sync.after for sync in simulator.syncs),
    )
