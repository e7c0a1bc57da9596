"""Draws of a trace: its sessions with other start times. Pure.

A trial is a draw under a seed. All variants that are compared see the same draws, so chance in the draws causes no difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from msgspec.structs import replace

from pointsman_lab.workload.traces import TraceRequest, by_session, id_span

# One session's turns, in order.
Session = Sequence[TraceRequest]
Starts = Literal["trace", "jitter", "resample", "burst", "sustained"]


@dataclass(frozen=True)
class Arrivals:
    """Start times of sessions. A session's turns keep their distances from its start.

    With "sustained" and "burst" the trace's sessions are drawn again and again, for as long as wanted. Their starts are a Poisson
    process.
    """

    # "trace": as recorded; "jitter": each moved by up to `jitter_s` in either direction, uniformly; "resample": drawn anew,
    # uniform over the trace's span (a Poisson process conditioned on its number of arrivals).
    starts: Starts = "jitter"
    jitter_s: float = 30.0  # s
    # All start times are divided by it. Of "sustained" and "burst": times the trace's rate (its sessions / its span).
    rate: float = 1.0
    burst_rate: float = 1.8  # as `rate`, for `burst_s`
    before_burst_s: float = 600.0  # time of `rate` before the burst
    burst_s: float = 600.0  # length of the burst
    after_burst_s: float = 1200.0  # time of `rate` after it
    sustained_s: float = 7200.0  # length of "sustained"

    def __post_init__(self) -> None:
        for name in ("rate", "burst_rate", "sustained_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is not above 0")
        for name in ("jitter_s", "before_burst_s", "burst_s", "after_burst_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is negative")

    @property
    def phases(self) -> Sequence[tuple[float, float]]:
        """Return length (s) and rate of each phase of "sustained" and "burst", in order."""
        if self.starts == "sustained":
            return ((self.sustained_s, self.rate),)
        return ((self.before_burst_s, self.rate), (self.burst_s, self.burst_rate), (self.after_burst_s, self.rate))


def draw_sessions(requests: Sequence[TraceRequest], arrivals: Arrivals, seed: int) -> list[Session]:
    """Return the sessions of a trace in the order of their new starts, the first at 0. Equal arguments give equal draws. The
    draws of one seed at two rates differ by the rate alone. Raises ValueError if a trace that is drawn again has no span."""
    rng = random.Random(f"starts {seed}")
    sessions = list(by_session(requests).values())
    starts = [turns[0].timestamp_ms for turns in sessions]
    first, last = min(starts), max(starts)
    if arrivals.starts in ("sustained", "burst"):
        if first == last:
            raise ValueError(f"starts: {arrivals.starts} needs a trace whose sessions do not all start at one time")
        trace_rate = len(sessions) / (last - first) * 1e3
        moments = _poisson_starts(arrivals.phases, trace_rate, rng)
        # The order has its own random numbers: the same sessions start in the same order, whatever the rates.
        drawn_again = _drawn_again(sessions, random.Random(f"order {seed}"))
        return [_moved(turns, moment * 1e3) for moment, turns in zip(moments, drawn_again, strict=False)]
    if arrivals.starts == "jitter":
        starts = [start + rng.uniform(-1, 1) * arrivals.jitter_s * 1e3 for start in starts]
    elif arrivals.starts == "resample":
        starts = [rng.uniform(first, last) for _ in starts]
    first = min(starts)
    drawn = [_moved(turns, (start - first) / arrivals.rate) for turns, start in zip(sessions, starts, strict=True)]
    return sorted(drawn, key=lambda turns: turns[0].timestamp_ms)


def _poisson_starts(phases: Iterable[tuple[float, float]], trace_rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the starts, in s, of a Poisson process that has `trace_rate` (1/s) times each phase's rate; the first is at 0.

    Its gaps are those of a process with `trace_rate`, which a phase's rate divides (inversion of the cumulative rate).
    """
    due = begin = 0.0
    for length, rate in phases:
        while due < length * rate:
            yield begin + due / rate
            due += rng.expovariate(trace_rate)
        due -= length * rate
        begin += length


def _drawn_again(sessions: Sequence[Session], rng: random.Random) -> Iterator[Session]:
    """Yield all sessions in a random order, and then again in another one, without an end. Each time has other names of sessions
    and blocks, so that no request can use the KV of an earlier time."""
    blocks = id_span(turn for turns in sessions for turn in turns)
    for time in count():
        for turns in rng.sample(sessions, len(sessions)):
            yield [
                replace(
                    turn,
                    session_id=f"{turn.session}+{time}",
                    hash_ids=tuple(block + time * blocks for block in turn.hash_ids),
                )
                for turn in turns
            ]


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
