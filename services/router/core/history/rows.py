"""What is kept of one pool and of one instance: the bucket that is still open, and the values of those before. Pure.

Each row closes its open bucket when it is next touched, so that no moment has all rows to close at once. Times are in s on the
router's clock; a bucket is the number of a step of time since that clock's zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from pointsman.router.core.history.log_histogram import LogHistogram
from pointsman.router.core.history.series_ring import NONE, SeriesRing

WINDOW_S = 900.0
POOL_STEP_S, INSTANCE_STEP_S = 5.0, 15.0
POOL_BUCKETS, INSTANCE_BUCKETS = int(WINDOW_S / POOL_STEP_S), int(WINDOW_S / INSTANCE_STEP_S)


class PoolMeasure(IntEnum):
    """What is kept of a pool. TTFT and BACKLOG in s; PLACEMENTS and REFUSALS for each s; shares 0 to 1; BACKLOG and KV_USAGE are
    means, as HELD_REQUESTS, OPEN_REQUESTS and PENDING_PREFILL_TOKENS are."""

    TTFT_P50 = 0
    TTFT_P90 = 1
    PLACEMENTS = 2
    REFUSALS = 3
    HELD_REQUESTS = 4
    OPEN_REQUESTS = 5
    PENDING_PREFILL_TOKENS = 6
    PREDICTED_HITS = 7
    REPORTED_HITS = 8
    KV_USAGE = 9
    KV_USAGE_MAX = 10
    BACKLOG = 11


class InstanceMeasure(IntEnum):
    """What is kept of an instance. TTFT in s; PREFIX_HITS and KV_USAGE are shares, 0 to 1."""

    TTFT_P50 = 0
    TTFT_P90 = 1
    OPEN_REQUESTS = 2
    RUNNING_REQUESTS = 3
    PREFIX_HITS = 4
    KV_USAGE = 5


@dataclass(slots=True)
class PoolSample:
    """A pool at one moment. Without `owned` this router knows nothing of its requests, and only the KV use counts, which is NaN
    without a fresh report."""

    owned: bool
    held: int = 0
    open_requests: int = 0
    pending_tokens: int = 0
    backlog_s: float = 0.0
    kv_mean: float = math.nan
    kv_max: float = math.nan


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """An instance at one moment: NaN what is not known. `lookups` and `hits` are its engine's counters of prompt tokens, which
    run from the start of `incarnation`; None without a fresh report."""

    model: str
    incarnation: str
    open_requests: float
    running: float
    kv_usage: float
    lookups: int | None = None
    hits: int = 0


class _Mean:
    """The mean of some values that are not NaN."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        if value == value:  # not NaN, in a tenth of the time of math.isnan
            self._sum += value
            self._count += 1

    def take(self) -> float:
        """The mean, NaN of none; begins anew."""
        mean = self._sum / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        return mean


class PoolRow:
    """One pool, or the sum of all that this router owns. `owned_since`: since when it places the pool's requests, None while it
    does not."""

    __slots__ = (
        "_backlog",
        "_held",
        "_input",
        "_kv",
        "_kv_max",
        "_open",
        "_owned",
        "_pending",
        "_placements",
        "_predicted",
        "_refusals",
        "_reported",
        "_reported_input",
        "_ttft",
        "bucket",
        "owned_since",
        "ring",
        "sampled_at",
    )

    def __init__(self) -> None:
        self.ring = SeriesRing(len(PoolMeasure), POOL_BUCKETS)
        self.bucket = NONE
        self.sampled_at = -math.inf
        self.owned_since: float | None = None
        self._ttft = LogHistogram()
        self._held, self._open, self._pending = _Mean(), _Mean(), _Mean()
        self._kv, self._backlog = _Mean(), _Mean()
        self._begin()

    def _begin(self) -> None:
        self._ttft.clear()
        self._owned = False
        self._kv_max = math.nan
        self._placements = self._refusals = 0
        self._input = self._predicted = 0
        self._reported_input = self._reported = 0

    def sample(self, sample: PoolSample, now: float) -> None:
        """Take up how the pool is at `now`. Mutates."""
        self.advance(now)
        self.sampled_at = now
        self._kv.add(sample.kv_mean)
        # max() of NaN and a number is whichever comes first.
        self._kv_max = sample.kv_max if math.isnan(self._kv_max) else max(self._kv_max, sample.kv_max)
        if not sample.owned:
            self.owned_since = None
            return
        self._owned = True
        if self.owned_since is None:
            self.owned_since = now
        self._held.add(sample.held)
        self._open.add(sample.open_requests)
        self._pending.add(sample.pending_tokens)
        self._backlog.add(sample.backlog_s)

    def placed(self, input_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a placement; its tokens, if its hits are to count, else 0. Mutates."""
        self.advance(now)
        self._placements += 1
        self._input += input_tokens
        self._predicted += cached_tokens

    def refused(self, now: float) -> None:
        """Count a refusal. Mutates."""
        self.advance(now)
        self._refusals += 1

    def ended(self, ttft_s: float, input_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a request that ended: its time to the first token (NaN: none), the tokens of its prompt and those that were
        cached (0 and 0 where its engine told nothing). Mutates."""
        self.advance(now)
        self._ttft.add(ttft_s)
        self._reported_input += input_tokens
        self._reported += cached_tokens

    def advance(self, now: float) -> None:
        """Close the open bucket if it is over at `now`. Mutates."""
        bucket = int(now // POOL_STEP_S)
        if bucket <= self.bucket:
            return
        if self.bucket != NONE:
            # Of a bucket of which a part is not known counts say nothing.
            begun = self.bucket * POOL_STEP_S
            whole = self._owned and self.owned_since is not None and self.owned_since <= begun
            rates = (self._placements, self._refusals)
            placements, refusals = (count / POOL_STEP_S if whole else math.nan for count in rates)
            values = (
                *self._ttft.quantiles(0.5, 0.9),
                placements,
                refusals,
                self._held.take(),
                self._open.take(),
                self._pending.take(),
                _share(self._predicted, self._input),
                _share(self._reported, self._reported_input),
                self._kv.take(),
                self._kv_max,
                self._backlog.take(),
            )
            self.ring.put(self.bucket, [_rounded(value) for value in values])
            self._begin()
        self.bucket = bucket


class InstanceRow:
    """One instance, in whatever incarnation. `model` is its pool."""

    __slots__ = (
        "_counted",
        "_hits",
        "_kv",
        "_lookups",
        "_open",
        "_running",
        "_ttft",
        "bucket",
        "model",
        "ring",
        "sampled_at",
    )

    def __init__(self) -> None:
        self.model = ""
        self.ring = SeriesRing(len(InstanceMeasure), INSTANCE_BUCKETS)
        self.bucket = NONE
        self.sampled_at = -math.inf
        self._ttft: LogHistogram | None = None
        self._open, self._running, self._kv = _Mean(), _Mean(), _Mean()
        self._lookups = self._hits = 0
        self._counted: tuple[str, int, int] | None = None

    def sample(self, sample: InstanceSample, now: float) -> None:
        """Take up how the instance is at `now`. Mutates."""
        self.advance(now)
        self.sampled_at, self.model = now, sample.model
        self._open.add(sample.open_requests)
        self._running.add(sample.running)
        self._kv.add(sample.kv_usage)
        if sample.lookups is None:
            return
        if self._counted is not None:
            incarnation, lookups, hits = self._counted
            # Another incarnation counts from 0, and so does an engine whose counters were reset.
            if incarnation == sample.incarnation and lookups <= sample.lookups and hits <= sample.hits:
                self._lookups += sample.lookups - lookups
                self._hits += sample.hits - hits
        self._counted = (sample.incarnation, sample.lookups, sample.hits)

    def ended(self, ttft_s: float, now: float) -> None:
        """Count a request that it answered, with its time to the first token. Mutates."""
        self.advance(now)
        if self._ttft is None:
            self._ttft = LogHistogram()
        self._ttft.add(ttft_s)

    def advance(self, now: float) -> None:
        """Close the open bucket if it is over at `now`. Mutates."""
        bucket = int(now // INSTANCE_STEP_S)
        if bucket <= self.bucket:
            return
        if self.bucket != NONE:
            ttft = (math.nan, math.nan) if self._ttft is None else self._ttft.quantiles(0.5, 0.9)
            hits = _share(self._hits, self._lookups)
            values = (*ttft, self._open.take(), self._running.take(), hits, self._kv.take())
            self.ring.put(self.bucket, [_rounded(value) for value in values])
            if self._ttft is not None:
                self._ttft.clear()
            self._lookups = self._hits = 0
        self.bucket = bucket


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _rounded(value: float) -> float:
    # Four digits are more than a curve shows, and short as text. What no float of 4 bytes holds is no figure.
    return float(f"{value:.4g}") if abs(value) < 1e30 else math.nan
