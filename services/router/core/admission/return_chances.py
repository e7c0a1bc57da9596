"""Learns how likely an idle session sends its next request soon, from its idle time and how its last answer ended. Pure.

The hazard of a return is constant within each bin of idle time, and is estimated by returns / seconds of exposure (the
occurrence-exposure rate; Kalbfleisch and Prentice, The Statistical Analysis of Failure Time Data, 2002). So the sessions that
have not returned yet count as well. Before anything is observed, the hazards are those of 46,000 requests of coding agents: the
next request came within 30, 120 and 600 s after 81, 92 and 98 % of the answers that called a tool, and after 18, 34 and 62 % of
those that ended their turn.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from itertools import pairwise
from math import exp, log

# Lower ends of the bins of idle time, s, and the end of the last bin: a session that is idle for longer is forgotten.
EDGES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 600.0, 1_200.0, 3_600.0)
BINS = len(EDGES_S) - 1
# How long a cache is to keep a session for its next request, s. A session counts by the chance that it returns within this time.
KEEP_S = 120.0
# PRIOR_SESSIONS: number of idle sessions whose returns the prior stands for. MOST_RETURNS: number of returns of a kind from which
# its observations are halved, so that older ones lose weight.
PRIOR_SESSIONS, MOST_RETURNS = 20.0, 4_000.0
# Number of observations of a kind after which its chances are computed anew.
REFRESH_AFTER = 128


class AnswerKind(IntEnum):
    """How the last answer of a session ended. A session's first answer is a kind of its own, because most sessions of one-turn
    traffic have no second one."""

    TOOL = 0
    STOP = 1
    OTHER = 2
    FIRST_TOOL = 3
    FIRST_STOP = 4
    FIRST_OTHER = 5


KINDS = tuple(AnswerKind)
# By kind modulo 3: shares of sessions that have returned by these idle times, s. OTHER (no reason known): the mean of both.
_TIMES_S = (0.0, 30.0, 120.0, 600.0, 3_600.0)
_RETURNED = ((0.0, 0.81, 0.92, 0.98, 0.992), (0.0, 0.18, 0.34, 0.62, 0.87), (0.0, 0.5, 0.63, 0.8, 0.93))


def answer_kind(finish_reason: str, turns: int) -> AnswerKind:
    """Return the kind of an answer by its finish reason (as in ev.Finished) and the number of answers of its session."""
    ended = AnswerKind.OTHER
    if finish_reason == "TOOL_CALLS":
        ended = AnswerKind.TOOL
    elif finish_reason == "STOP":
        ended = AnswerKind.STOP
    return AnswerKind(ended + 3) if turns <= 1 else ended


def bin_of(idle_s: float) -> int:
    """Return the bin of an idle time; BINS if it is beyond the last one."""
    return bisect_right(EDGES_S, max(idle_s, 0.0)) - 1


class ReturnChances:
    """The learned chances of one pool. Memory: KINDS x BINS numbers."""

    def __init__(self) -> None:
        prior = [_prior(_RETURNED[kind % 3]) for kind in KINDS]
        self._returns = [list(returns) for returns, _ in prior]
        self._exposure_s = [list(exposure) for _, exposure in prior]
        self._unread = [0 for _ in KINDS]
        self._chances = [self._computed(kind) for kind in KINDS]

    def chance(self, kind: AnswerKind, bin_: int) -> float:
        """Return the probability that a session that has just entered `bin_` returns within KEEP_S."""
        return self.chances(kind)[bin_]

    def chances(self, kind: AnswerKind) -> list[float]:
        """Return the probabilities of all bins, as `chance`. The caller must not change the list."""
        if self._unread[kind] >= REFRESH_AFTER:
            self._unread[kind] = 0
            self._chances[kind] = self._computed(kind)
        return self._chances[kind]

    def passed(self, kind: AnswerKind, bin_: int) -> None:
        """Record that a session has been idle through all of `bin_`. Mutates."""
        self._exposure_s[kind][bin_] += EDGES_S[bin_ + 1] - EDGES_S[bin_]
        self._unread[kind] += 1

    def lost_sight(self, kind: AnswerKind, bin_: int, idle_s: float) -> None:
        """Record that a session that had been idle for `idle_s`, in `bin_`, is no longer watched. Mutates."""
        self._exposure_s[kind][bin_] += max(idle_s - EDGES_S[bin_], 0.0)

    def returned(self, kind: AnswerKind, bin_: int, idle_s: float) -> None:
        """Record a session's return from `bin_` after `idle_s` in total. Mutates."""
        returns = self._returns[kind]
        returns[bin_] += 1.0
        self._exposure_s[kind][bin_] += max(idle_s - EDGES_S[bin_], 0.0)
        self._unread[kind] += 1
        if sum(returns) > MOST_RETURNS:
            self._returns[kind] = [one / 2 for one in returns]
            self._exposure_s[kind] = [one / 2 for one in self._exposure_s[kind]]

    def _computed(self, kind: AnswerKind) -> list[float]:
        hazards = [a / b for a, b in zip(self._returns[kind], self._exposure_s[kind], strict=True)]
        found = []
        for start in EDGES_S[:-1]:
            total = 0.0
            for low, high, hazard in zip(EDGES_S, EDGES_S[1:], hazards, strict=False):
                total += hazard * max(min(high, start + KEEP_S) - max(low, start), 0.0)
            found.append(1.0 - exp(-total))
        return found


def _prior(returned: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Return the returns and the seconds of exposure, by bin, of PRIOR_SESSIONS sessions of which these shares have returned by
    _TIMES_S, with a constant hazard between these times."""

    def idle_share(at: float) -> float:
        place = min(max(bisect_right(_TIMES_S, at) - 1, 0), len(_TIMES_S) - 2)
        low, high = _TIMES_S[place], _TIMES_S[place + 1]
        left, right = 1.0 - returned[place], 1.0 - returned[place + 1]
        return float(left * (right / left) ** ((at - low) / (high - low)))

    returns, exposure = [], []
    for low, high in pairwise(EDGES_S):
        left, right = idle_share(low), idle_share(high)
        returns.append(PRIOR_SESSIONS * (left - right))
        # The mean of an exponential decay from `left` to `right`.
        exposure.append(PRIOR_SESSIONS * (left - right) * (high - low) / log(left / right))
    return returns, exposure
