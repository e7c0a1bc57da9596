"""Draws of a trace: its sessions with other start times. Pure.

A trial is a draw under a seed. All variants that are compared see the same draws, so chance in the draws causes no difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from pointsman.lab.workload.traces import TraceRequest, by_session

# One session's turns, in order.
Session = Sequence[TraceRequest]
Starts = Literal["trace", "jitter", "resample"]


@dataclass(frozen=True)
class Arrivals:
    """Start times of sessions. A session's turns keep their distances from its start.

    `starts` is "trace" (as recorded), "jitter" (each moved by up to `jitter_s` in either direction, uniformly) or "resample"
    (drawn anew, uniform over the trace's span: a Poisson process conditioned on its number of arrivals). Then all start times
    are divided by `rate`.
    """

    starts: Starts = "jitter"
    jitter_s: float = 30.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate: {self.rate:g} is not above 0")
        if self.jitter_s < 0:
            raise ValueError(f"jitter_s: {self.jitter_s:g} is negative")


def draw_sessions(requests: Sequence[TraceRequest], arrivals: Arrivals, seed: int) -> list[Session]:
    """Return the sessions of a trace in the order of their new starts, the first at 0. Equal arguments give equal draws. The
    draws of one seed at two rates differ by the rate alone."""
    rng = random.Random(f"starts {seed}")
    sessions = list(by_session(requests).values())
    starts = [turns[0].timestamp_ms for turns in sessions]
    first, last = min(starts), max(starts)
    if arrivals.starts == "jitter":
        starts = [start + rng.uniform(-1, 1) * arrivals.jitter_s * 1e3 for start in starts]
    elif arrivals.starts == "resample":
        starts = [rng.uniform(first, last) for _ in starts]
    first = min(starts)
    drawn = [_moved(turns, (start - first) / arrivals.rate) for turns, start in zip(sessions, starts, strict=True)]
    return sorted(drawn, key=lambda turns: turns[0].timestamp_ms)


@dataclass(frozen=True)
class Ramp:
    """A rate of session starts that is constant for `before_s`, then rises linearly for `rise_s` to `factor` times the initial
    rate, and keeps that rate for `after_s`."""

    before_s: float
    rise_s: float
    after_s: float
    factor: float

    @property
    def constant_s(self) -> float:
        """Return the time in which the initial rate starts as many sessions as the whole ramp, in s."""
        return self.before_s + self.rise_s * (1 + self.factor) / 2 + self.after_s * self.factor

    @property
    def end_s(self) -> float:
        """Return the end of the ramp, in s."""
        return self.before_s + self.rise_s + self.after_s

    def moment(self, constant_s: float) -> float:
        """Return the start on the ramp of the session that starts at `constant_s` under the initial rate; both in s.

        x s into the rise, x + (factor - 1) x^2 / (2 rise_s) seconds of the constant rate have elapsed. The result solves this
        for x.
        """
        over = constant_s - self.before_s
        risen = self.rise_s * (1 + self.factor) / 2
        if over <= 0:
            return constant_s
        if over >= risen:
            return self.before_s + self.rise_s + (over - risen) / self.factor
        return self.before_s + 2 * over / (1 + math.sqrt(1 + 2 * (self.factor - 1) * over / self.rise_s))


def ramp_sessions(requests: Sequence[TraceRequest], ramp: Ramp) -> list[Session]:
    """Return the sessions of a trace that start at a constant rate over `ramp.constant_s`, in the order of their starts on the
    ramp."""
    sessions = by_session(requests).values()
    drawn = [_moved(turns, ramp.moment(turns[0].timestamp_ms / 1e3) * 1e3) for turns in sessions]
    return sorted(drawn, key=lambda turns: turns[0].timestamp_ms)


def _moved(turns: Session, start_ms: float) -> Session:
    shift = start_ms - turns[0].timestamp_ms
    return [replace(turn, timestamp_ms=max(turn.timestamp_ms + shift, start_ms)) for turn in turns]
