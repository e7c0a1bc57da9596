"""A source of requests that mixes the sessions of two traces. Pure, but for reading the files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TraceRequest, by_session


@dataclass(frozen=True)
class Mixture:
    """All sessions of the trace `main`, and so many of `other` that they are a `share` (0 to below 1) of all, or all that it has.
    With `one_turn` only the first turn of each session of `other` is used.

    Those of `other` are drawn at random for each seed, and start at random within the span of `main`, so the rate of the main
    trace's sessions is the same with and without them.
    """

    main: Path
    other: Path
    share: float
    one_turn: bool = False

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests of a seed's draw. Raises TraceError, and ValueError for a share that is out of range."""
        return mixed(load_trace(self.main), load_trace(self.other), self.share, seed, one_turn=self.one_turn)


def mixed(
    main: Sequence[TraceRequest], other: Sequence[TraceRequest], share: float, seed: int, *, one_turn: bool = False
) -> list[TraceRequest]:
    """Return the requests of a mixture (see Mixture), ordered by time. No session of one trace shares a name or a block with one
    of the other."""
    if not 0 <= share < 1:
        raise ValueError(f"share: {share:g} is not in 0 to below 1")
    rng = random.Random(f"mixture {seed}")
    sessions, others = list(by_session(main).values()), list(by_session(other).values())
    first, last = (extreme(turns[0].timestamp_ms for turns in sessions) for extreme in (min, max))
    ids, others_ids = ([block for request in trace for block in request.hash_ids] for trace in (main, other))
    blocks = 1 + max(ids, default=0) - min(0, min(others_ids, default=0))
    found = list(main)
    chosen = rng.sample(others, min(round(len(sessions) * share / (1 - share)), len(others)))
    for number, turns in enumerate(chosen):
        found += _moved(turns[:1] if one_turn else turns, rng.uniform(first, last), f"mixed{number}", blocks)
    return sorted(found, key=lambda request: request.timestamp_ms)


def _moved(turns: Session, start_ms: float, name: str, blocks: int) -> list[TraceRequest]:
    shift = start_ms - turns[0].timestamp_ms
    return [
        replace(
            turn,
            timestamp_ms=max(turn.timestamp_ms + shift, start_ms),
            session_id=name,
            hash_ids=tuple(block + blocks for block in turn.hash_ids),
        )
        for turn in turns
    ]
