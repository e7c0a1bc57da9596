"""Measures of sessions: what became of those that started before, in and after a burst. Pure.

A session is done when all its turns were answered. One that was refused, whose client left or that never began is not done; it
has no session time, so its share stands beside the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.gateway import CLIENT_LEFT
from pointsman_lab.workload.session_starts import Arrivals, Session

Fate = Literal["done", "refused", "left", "failed", "never began"]
ALL = "all"
# Waits up to this are not counted as parked, s.
PARKED_S = 1e-6
# Length of a bin of session starts, s.
BIN_S = 120.0


class SessionOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a session. `start_s`: when it sent its first request; when it was to start if it never began. `time_s`: from
    then to its last answer. `turns`: number of turns."""

    start_s: float
    time_s: float
    fate: Fate
    turns: int


# Phase -> measure -> value.
SessionMeasures = dict[str, dict[str, float]]


def outcomes(sessions: Sequence[Session], records: Sequence[RequestRecord]) -> list[SessionOutcome]:
    """Return the outcome of each of the drawn `sessions`, in their order."""
    by_session: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    origin_s = sessions[0][0].timestamp_ms / 1e3 if sessions else 0.0
    return [_outcome(turns, by_session.get(turns[0].session, ()), origin_s) for turns in sessions]


def measure_sessions(
    sessions: Sequence[Session], records: Sequence[RequestRecord], arrivals: Arrivals
) -> SessionMeasures:
    """Return the measures of all sessions and of those that started in each phase of a burst.

    Of each phase: `sessions`, shares `done`, `refused`, `left` and `failed`, of those done `time_mean_s` and `time_p90_s`; of
    their requests `ttft_mean_s`, `ttft_p50_s` and `ttft_p90_s`, counted from the client's first try. Of all also: `done_per_hour`
    (sessions done while sessions started, per hour), `parked` (share of requests that waited to be admitted), `longest_wait_s`
    and `computed_tokens` (prompt tokens of complete answers that were not cached).
    """
    found = outcomes(sessions, records)
    phase_of = {turns[0].session: phase for turns, phase in zip(sessions, _phases(found, arrivals), strict=True)}
    measures: SessionMeasures = {}
    for phase in dict.fromkeys((ALL, *phase_of.values())):
        chosen = [outcome for outcome, its in zip(found, phase_of.values(), strict=True) if phase in (ALL, its)]
        answered = [record for record in records if phase in (ALL, phase_of[record.session])]
        measures[phase] = dict(_of_sessions(chosen)) | dict(_of_requests(answered))
    whole, span_s = measures[ALL], sum(length for length, _ in arrivals.phases)
    done_in_time = sum(outcome.fate == "done" and outcome.start_s + outcome.time_s <= span_s for outcome in found)
    whole["done_per_hour"] = done_in_time / span_s * 3600
    whole["parked"] = float(np.mean([record.parked_s > PARKED_S for record in records])) if records else 0.0
    whole["longest_wait_s"] = max((record.parked_s for record in records), default=0.0)
    whole["computed_tokens"] = float(
        sum((record.prompt_tokens or 0) - (record.cached_tokens or 0) for record in records if record.ok)
    )
    return measures


def _outcome(turns: Session, records: Sequence[RequestRecord], origin_s: float) -> SessionOutcome:
    if not records:
        return SessionOutcome(turns[0].timestamp_ms / 1e3 - origin_s, 0.0, "never began", len(turns))
    first, last = records[0], records[-1]
    time_s = last.t_send + last.e2e_s - first.t_send
    bad = next((record for record in records if not record.ok), None)
    fate: Fate = "done"
    if bad is not None:
        fate = "left" if bad.status == CLIENT_LEFT else "refused" if bad.status in (429, 503) else "failed"
    elif len(records) < len(turns):
        fate = "failed"
    return SessionOutcome(round(first.t_send, 3), round(time_s, 3), fate, len(turns))


def _phases(found: Sequence[SessionOutcome], arrivals: Arrivals) -> list[str]:
    """Return each session's phase."""
    if arrivals.starts != "burst":
        return [ALL] * len(found)
    begin, end = arrivals.before_burst_s, arrivals.before_burst_s + arrivals.burst_s
    return ["before" if outcome.start_s < begin else "burst" if outcome.start_s < end else "after" for outcome in found]


def _of_sessions(found: Sequence[SessionOutcome]) -> Iterator[tuple[str, float]]:
    count = len(found)
    yield "sessions", float(count)
    fates = {"done": ("done",), "refused": ("refused",), "left": ("left",), "failed": ("failed", "never began")}
    for name, its in fates.items():
        yield name, sum(outcome.fate in its for outcome in found) / count if count else 0.0
    times = [outcome.time_s for outcome in found if outcome.fate == "done"]
    if times:
        yield "time_mean_s", float(np.mean(times))
        yield "time_p90_s", float(np.percentile(times, 90))


def _of_requests(records: Sequence[RequestRecord]) -> Iterator[tuple[str, float]]:
    values = [record.ttft_s for record in records if record.ok and record.ttft_s is not None]
    if values:
        yield "ttft_mean_s", float(np.mean(values))
        for share in (50, 90):
            yield f"ttft_p{share}_s", float(np.percentile(values, share))


class StartBin(msgspec.Struct, frozen=True, array_like=True):
    """The sessions that started within the same BIN_S: how many there are, how many are done, and the sum of the times of these,
    s."""

    sessions: int = 0
    done: int = 0
    time_s: float = 0.0

    def __add__(self, other: StartBin) -> StartBin:
        return StartBin(self.sessions + other.sessions, self.done + other.done, self.time_s + other.time_s)


def bins_by_start(found: Iterable[SessionOutcome]) -> list[StartBin]:
    """Return the bins of BIN_S from 0 on, up to the last one in which a session started."""
    bins: dict[int, StartBin] = {}
    for outcome in found:
        at, done = int(outcome.start_s // BIN_S), outcome.fate == "done"
        bins[at] = bins.get(at, StartBin()) + StartBin(1, int(done), round(outcome.time_s, 1) if done else 0.0)
    return [bins.get(at, StartBin()) for at in range(max(bins, default=-1) + 1)]
