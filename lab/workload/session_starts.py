"""One draw of a trace: its sessions, starting at other moments. Pure.

A trial is a draw under a seed. Whatever is compared sees the same draws, so that what differs is not the luck of the draw.
"""

from __future__ import annotations

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


def _moved(turns: Session, start_ms: float) -> Session:
    shift = start_ms - turns[0].timestamp_ms
    return [replace(turn, timestamp_ms=max(turn.timestamp_ms + shift, start_ms)) for turn in turns]
