"""Learns how likely an idle session sends its next request soon, from its idle time and how its last answer ended. Pure.

The hazard of a return is constant within each bin of idle time, and is estimated by returns / seconds of exposure (the
occurrence-exposure rate; Kalbfleisch and Prentice, The Statistical Analysis of Failure Time Data, 2002). So the sessions that
have not returned yet count as well. Before anything is observed, the hazards are those of 46,000 requests of coding agents: the
next request came within 30, 120 and 600 s after 81, 92 and 98 % of the answers that called a tool, and after 18, 34 and 62 % of
those that ended their turn.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp, log

from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, Observed, bin_of

# How long a cache is to keep a session for its next request, s. A session counts by the chance that it returns within this time.
KEEP_S = 120.0
# PRIOR_SESSIONS: number of idle sessions whose returns the prior stands for. MOST_RETURNS: number of returns of a kind from which
# its observations are halved, so that older ones lose weight.
PRIOR_SESSIONS, MOST_RETURNS = 20.0, 4_000.0
# Number of observations of a kind after which its chances are computed anew.
REFRESH_AFTER = 128
# By kind modulo 3: shares of sessions that have returned by these idle times, s. OTHER (no reason known): the mean of both.
_TIMES_S = (0.0, 30.0, 120.0, 600.0, 3_600.0)
_RETURNED = ((0.0, 0.81, 0.92, 0.98, 0.992), (0.0, 0.18, 0.34, 0.62, 0.87), (0.0, 0.5, 0.63, 0.8, 0.93))


class ReturnChances:
    """The learned chances of one pool. Memory: KINDS x BINS numbers."""

    def __init__(self) -> None:
        prior = [_prior(_RETURNED[kind % 3]) for kind in KINDS]
        self._returns = [list(returns) for returns, _ in prior]
        self._exposure_s = [list(exposure) for _, exposure in prior]
        self._unread = [0 for _ in KINDS]
        self._chances = [self._computed(kind) for kind in KINDS]

    def observed(self) -> tuple[Observed, Observed]:
        """Return what is observed, by kind and bin: the returns, and the seconds of exposure."""
        returns, exposure_s = self._returns, self._exposure_s
        return tuple(map(tuple, returns)), tuple(map(tuple, exposure_s))

    def restore(self, returns: Observed, exposure_s: Observed) -> None:
        """Replace what is observed by what another router's `observed` returned. Mutates."""
        self._returns, self._exposure_s = list(map(list, returns)), list(map(list, exposure_s))
        self._unread = [0 for _ in KINDS]
        self._chances = [self._computed(kind) for kind in KINDS]

    def stays_idle(self, kind: AnswerKind, idle_s: float, until_s: float) -> float:
        """Return the probability that a session that is idle for `idle_s` is still idle at the idle time `until_s`. O(BINS)."""
        total = 0.0
        for bin_ in range(bin_of(idle_s), min(bin_of(until_s) + 1, BINS)):
            inside = min(EDGES_S[bin_ + 1], until_s) - max(EDGES_S[bin_], idle_s)
            total += self._returns[kind][bin_] / self._exposure_s[kind][bin_] * max(inside, 0.0)
        return exp(-total)

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
            self._returns[kind] = [count / 2 for count in returns]
            self._exposure_s[kind] = [seconds / 2 for seconds in self._exposure_s[kind]]

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
