"""Learns how likely an idle session sends its next request soon, from its idle time and how its last answer ended. Pure.

The hazard of a return is constant within each bin of idle time, and is estimated by returns / seconds of exposure (the
occurrence-exposure rate; Kalbfleisch and Prentice, The Statistical Analysis of Failure Time Data, 2002). So the sessions that
have not returned yet count as well, from the moment on at which they become idle. Before anything is observed, the hazards are
those of 46,000 requests of coding agents: the next request came within 30, 120 and 600 s after 81, 92 and 98 % of the answers
that called a tool, and after 18, 34 and 62 % of those that ended their turn.

Sessions may go together: a batch job ends, and none of its agents returns. The learned hazards, of thousands of sessions, take
minutes to show it. So the returns of the last minute are compared with those that the hazards expected of the idle sessions:

    presence = (returned + 2 sqrt(returned + 1) + 2) / expected, at most 1: nearly the upper 97.5 % limit of the mean of a Poisson
               number (Garwood, 1936), so that chance alone seldom lowers it
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt

from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, Observed, bin_of

# How long a cache is to keep a session for its next request, s. A session counts by the chance that it returns within this time.
# In the burst of the study of admission, with 120 as many sessions are let in that TTFT p90 is 34 in place of 24 s; with 480 as
# few that 13 % are refused in place of 10.
KEEP_S = 240.0
# PRIOR_SESSIONS: number of idle sessions whose returns the prior stands for. MOST_RETURNS: number of returns of a kind from which
# its observations are halved, so that older ones lose weight; those of a bin only while they have twice the prior's exposure: a
# bin in which no session was for long would end without any.
PRIOR_SESSIONS, MOST_RETURNS = 20.0, 4_000.0
# The chances of a kind are computed anew after as many returns, or after this time, s.
REFRESH_AFTER, REFRESH_S = 128, 1.0
# RECENT_S: time in which the weight of a return, or of an expected one, falls by the factor e, s. SAME_BINS: number of bins whose
# returns are compared together: sessions of one bin were in those before it shortly ago.
RECENT_S, SAME_BINS = 60.0, 3
# Each bin, and the bin of the idle time that is KEEP_S later.
_HORIZONS = tuple((bin_, min(bin_of(EDGES_S[bin_] + KEEP_S), BINS - 1)) for bin_ in range(BINS))
# By kind modulo 3: shares of sessions that have returned by these idle times, s. OTHER (no reason known): the mean of both.
_TIMES_S = (0.0, 30.0, 120.0, 600.0, 3_600.0)
_RETURNED = ((0.0, 0.81, 0.92, 0.98, 0.992), (0.0, 0.18, 0.34, 0.62, 0.87), (0.0, 0.5, 0.63, 0.8, 0.93))


class ReturnChances:
    """The learned chances of one pool. Memory: KINDS x BINS numbers."""

    def __init__(self) -> None:
        self._returns = [list(_PRIORS[kind % 3][0]) for kind in KINDS]
        self._exposure_s = [list(_PRIORS[kind % 3][1]) for kind in KINDS]
        self._unread = [0 for _ in KINDS]
        self._chances = [self._computed(kind) for kind in KINDS]
        # By bin: the returns of about the last RECENT_S, and those that were expected.
        self._recent = [0.0] * BINS
        self._expected = [0.0] * BINS
        # By bin of idle time: the share of the sessions that may still be there, above 0 to 1, as of the last `watch`.
        self.presence = [1.0] * BINS
        self._watched_at = self._read_at = 0.0

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

    def watch(self, idle: Sequence[Sequence[int]], now: float) -> None:
        """Count the time since the last call, in which these numbers of sessions were idle, by kind and bin. Mutates;
        O(kinds x bins)."""
        passed_s, self._watched_at = max(now - self._watched_at, 0.0), now
        fading = exp(-passed_s / RECENT_S)
        for bin_ in range(BINS):
            self._recent[bin_] *= fading
            self._expected[bin_] *= fading
        for kind, counts in zip(KINDS, idle, strict=True):
            for bin_, count in enumerate(counts):
                if count:
                    # The returns of this time are counted already, so it must be, too.
                    self._exposure_s[kind][bin_] += count * passed_s
                    self._expected[bin_] += count * passed_s * self._returns[kind][bin_] / self._exposure_s[kind][bin_]
        for bin_ in range(BINS):
            first = max(bin_ + 1 - SAME_BINS, 0)
            returned, expected = sum(self._recent[first : bin_ + 1]), sum(self._expected[first : bin_ + 1])
            most = returned + 2.0 * sqrt(returned + 1.0) + 2.0
            self.presence[bin_] = most / expected if expected > most else 1.0
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            self._unread = [REFRESH_AFTER for _ in KINDS]

    def returned(self, kind: AnswerKind, bin_: int) -> None:
        """Record a session's return from a bin of idle time. Mutates."""
        returns = self._returns[kind]
        returns[bin_] += 1.0
        self._recent[bin_] += 1.0
        self._unread[kind] += 1
        if sum(returns) > MOST_RETURNS:
            exposure_s = self._exposure_s[kind]
            for place, prior_s in enumerate(_PRIORS[kind % 3][1]):
                if exposure_s[place] >= 2 * prior_s:
                    returns[place] /= 2
                    exposure_s[place] /= 2

    def _computed(self, kind: AnswerKind) -> list[float]:
        # The cumulative hazard at each edge.
        sums = [0.0]
        for returns, exposure_s, (low, high) in zip(
            self._returns[kind], self._exposure_s[kind], pairwise(EDGES_S), strict=True
        ):
            sums.append(sums[-1] + returns / exposure_s * (high - low))
        found = []
        for bin_, end in _HORIZONS:
            inside, width = min(EDGES_S[bin_] + KEEP_S, EDGES_S[-1]) - EDGES_S[end], EDGES_S[end + 1] - EDGES_S[end]
            until = sums[end] + (sums[end + 1] - sums[end]) * inside / width
            found.append(1.0 - exp(sums[bin_] - until))
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


_PRIORS = tuple(map(_prior, _RETURNED))
