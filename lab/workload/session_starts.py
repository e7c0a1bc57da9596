"""One draw of a trace: its sessions, starting at other moments. Pure.

A trial is a draw under a seed. Whatever is compared sees the same draws, so that what differs is not the luck of the draw.
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
    """When sessions start. Within a session nothing changes: its turns keep their distances from its start.

    `starts`: "trace" as recorded; "jitter" moves each by up to `jitter_s` to either side, uniformly; "resample" deals them anew,
    uniform over the trace's span (a Poisson process that is known to have had so many arrivals is that). Then all starts
    come `rate` times as fast.
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
    """The sessions of a trace in the order of their new starts, the first at 0. Equal arguments give equal draws; the draws of
    one seed at two rates differ by the rate alone."""
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
    """A rate of session starts that is constant for `before_s`, then rises in a line for `rise_s` to `factor` times as much, and
    stays there for `after_s`."""

    before_s: float
    rise_s: float
    after_s: float
    factor: float

    @property
    def constant_s(self) -> float:
        """How long as many sessions take to start at the first rate, in s."""
        return self.before_s + self.rise_s * (1 + self.factor) / 2 + self.after_s * self.factor

    @property
    def end_s(self) -> float:
        """When it is over, in s."""
        return self.before_s + self.rise_s + self.after_s

    def moment(self, constant_s: float) -> float:
        """When the session starts that would start at `constant_s` if the first rate stayed; both in s.

        With x s of the rise over, x + (factor - 1) x^2 / (2 rise_s) have passed of the constant rate: solved for x.
        """
        over = constant_s - self.before_s
        risen = self.rise_s * (1 + self.factor) / 2
        if over <= 0:
            return constant_s
        if over >= risen:
            return self.before_s + self.rise_s + (over - risen) / self.factor
        return self.before_s + 2 * over / (1 + math.sqrt(1 + 2 * (self.factor - 1) * over / self.rise_s))


def ramp_sessions(requests: Sequence[TraceRequest], ramp: Ramp) -> list[Session]:
    """The sessions of a trace that start at a constant rate over `ramp.constant_s`, in the order of their starts on the ramp."""
    sessions = by_session(requests).values()
    drawn = [_moved(turns, ramp.moment(turns[0].timestamp_ms / 1e3) * 1e3) for turns in sessions]
    return sorted(drawn, key=lambda turns: turns[0].timestamp_ms)


def _moved(turns: Session, start_ms: float) -> Session:
    shift = start_ms - turns[0].timestamp_ms
    return [replace(turn, timestamp_ms=max(turn.timestamp_ms + shift, start_ms)) for turn in turns]
