"""Whether a fleet was scaled in time: TTFT p90 in a moving window beside the moments of decision. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.autoscaling.autoscaled_simulator import AutoscaledSimulator
from pointsman.lab.workload.session_starts import Ramp

WINDOW_S = 120.0
GRID_S = 5.0
# What counts as the end of a ramp: the load has stayed the same before, where it is longer.
LAST_S = 300.0


@dataclass(frozen=True)
class TtftWindows:
    """TTFT of a run by the moment of the first token, in s, as a scraped histogram has them: in the order of `moments`."""

    moments: Sequence[float]
    ttft_s: Sequence[float]

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> TtftWindows:
        """Those of the complete answers."""
        seen = sorted((one.t_send + one.ttft_s, one.ttft_s) for one in records if one.ok and one.ttft_s is not None)
        return cls([at for at, _ in seen], [ttft_s for _, ttft_s in seen])

    def p90(self, since: float, until: float) -> float:
        """Of the first tokens after `since` and up to `until` (s), in s; NaN where there are none."""
        part = self.ttft_s[bisect_right(self.moments, since) : bisect_right(self.moments, until)]
        return float(np.percentile(part, 90)) if part else float("nan")

    def exceeded_at(self, limit_s: float, since: float, until: float) -> float | None:
        """The first moment from `since` on, on a grid of GRID_S, from which the p90 of the last WINDOW_S is above `limit_s` in
        all windows for WINDOW_S: so is then that of two windows with no request in common. All of it before `until`, in s."""
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
        """The highest p90 of a window that ends between these moments (s), in s."""
        return max(self.p90(now - WINDOW_S, now) for now in self._grid(since, until))

    def exceeded_share(self, limit_s: float, since: float, until: float) -> float:
        """The share of the windows that end between these moments (s) whose p90 is above `limit_s`, 0 to 1."""
        grid = self._grid(since, until)
        return sum(self.p90(now - WINDOW_S, now) > limit_s for now in grid) / len(grid)

    @staticmethod
    def _grid(since: float, until: float) -> Sequence[float]:
        return [since + number * GRID_S for number in range(int((until - since) / GRID_S) + 1)]


@dataclass(frozen=True)
class ScalingOutcome:
    """What became of a fleet on a ramp. Moments are in s after the rise began, None where there was none; TTFT p90 is told as a
    ratio to that of before, what was paid as one to instances x time of the fleet at the beginning.

    `decided_s`: the first decision for more instances. `doubled_s`: TTFT p90 doubled, and stayed so (TtftWindows.exceeded_at).
    `early` counts the decisions for more instances before the rise.
    """

    decided_s: float | None
    doubled_s: float | None
    early: int
    p90: float
    worst_p90: float
    last_p90: float
    doubled_share: float
    paid_before: float
    paid_after: float
    most_instances: int

    @property
    def in_time(self) -> bool:
        """Whether TTFT p90 never doubled, or not before the decision."""
        return self.doubled_s is None or (self.decided_s is not None and self.decided_s < self.doubled_s)


def outcome_of(
    simulator: AutoscaledSimulator, records: Sequence[RequestRecord], ramp: Ramp, settle_s: float, p90_before_s: float
) -> ScalingOutcome:
    """Of a run until `ramp.end_s`, whose first `settle_s` do not count; `p90_before_s` is what TTFT is compared to."""
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
        doubled_share=windows.exceeded_share(2 * p90_before_s, rise_at, end),
        paid_before=paid(settle_s, rise_at),
        paid_after=paid(rise_at, end),
        most_instances=max(sync.after for sync in simulator.syncs),
    )
