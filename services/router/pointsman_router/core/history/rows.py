"""The history of one pool (PoolRow) and of one instance (InstanceRow): an open bucket, and the values of closed ones. Pure.

Each row closes its open bucket at its next use, so that not all rows are closed at once. Times are in s on the router's clock. A
bucket is a time step, numbered from that clock's zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from pointsman_router.core.history.log_histogram import LogHistogram
from pointsman_router.core.history.series_ring import NONE, SeriesRing

# Length of the history, s.
WINDOW_S = 900.0
# Length of a bucket of pools and of instances, s.
POOL_STEP_S, INSTANCE_STEP_S = 5.0, 15.0
POOL_BUCKETS, INSTANCE_BUCKETS = int(WINDOW_S / POOL_STEP_S), int(WINDOW_S / INSTANCE_STEP_S)


class PoolMeasure(IntEnum):
    """The measures of a pool. TTFT and BACKLOG are in s, PLACEMENTS and REFUSALS per s, hits and KV usage shares from 0 to 1.
    BACKLOG, KV_USAGE, HELD_REQUESTS, OPEN_REQUESTS and PENDING_PREFILL_TOKENS are means over the bucket."""

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
    """The measures of an instance. TTFT is in s; PREFIX_HITS and KV_USAGE are shares, 0 to 1."""

    TTFT_P50 = 0
    TTFT_P90 = 1
    OPEN_REQUESTS = 2
    RUNNING_REQUESTS = 3
    PREFIX_HITS = 4
    KV_USAGE = 5


@dataclass(slots=True)
class PoolSample:
    """A sample of a pool."""

    owned: bool  # if not, this router knows nothing of the pool's requests, and only the KV figures count
    held: int = 0  # requests
    open_requests: int = 0  # placed on its instances, each sequence of a request counted
    pending_tokens: int = 0  # prompt tokens placed and not computed yet
    backlog_s: float = 0.0  # until a new HEAVY request would begin its prefill (PoolBacklogs); in the total the longest
    kv_mean: float = math.nan  # share of KV blocks in use, 0 to 1; NaN without a fresh report
    kv_max: float = math.nan  # the highest of an instance; NaN without a fresh report


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """A sample of an instance; NaN: unknown."""

    model: str  # name of its pool
    incarnation: str  # of the engine, with which the counters below begin at 0
    open_requests: float  # each sequence of a request counts; NaN if another router owns the pool
    running: float  # requests in the engine's batch
    kv_usage: float  # share of KV blocks in use, 0 to 1
    # Its engine's counter of prompt tokens since the start of `incarnation`; None without a fresh report, or
    # if the engine does not report both counters.
    lookups: int | None = None
    hits: int = 0  # the same, of those that were cached


class _Mean:
    """The mean of the values that were added; NaN is ignored."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        if value == value:  # not NaN, in a tenth of the time of math.isnan
            self._sum += value
            self._count += 1

    def take(self) -> float:
        """Return the mean (NaN if there are no values), and reset."""
        mean = self._sum / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        return mean


class PoolRow:
    """The history of one pool, or the sum of all pools that this router owns. `owned_since`: since when this router places the
    pool's requests; None while it does not."""

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
        """Record a sample of the pool at `now`. Mutates."""
        self.advance(now)
        self.sampled_at = now
        self._kv.add(sample.kv_mean)
        # max() of NaN and a number returns the first of them, so NaN is tested.
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
        """Count a placement. Both token counts are 0 if it does not count for the hit ratio. Mutates."""
        self.advance(now)
        self._placements += 1
        self._input += input_tokens
        self._predicted += cached_tokens

    def refused(self, now: float) -> None:
        """Count a refusal. Mutates."""
        self.advance(now)
        self._refusals += 1

    def ended(self, ttft_s: float, input_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a request that ended: its TTFT (NaN: none), its prompt's tokens, and how many of them were cached (both 0 if the
        engine did not report this). Mutates."""
        self.advance(now)
        self._ttft.add(ttft_s)
        self._reported_input += input_tokens
        self._reported += cached_tokens

    def advance(self, now: float) -> None:
        """Close the open bucket if it has ended at `now`. Mutates."""
        bucket = int(now // POOL_STEP_S)
        if bucket <= self.bucket:
            return
        if self.bucket != NONE:
            # In a bucket during which the pool was not always owned, the counts are incomplete.
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
    """The history of one instance over all its incarnations. `model` is its pool."""

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
        """Record a sample of the instance at `now`. Mutates."""
        self.advance(now)
        self.sampled_at, self.model = now, sample.model
        self._open.add(sample.open_requests)
        self._running.add(sample.running)
        self._kv.add(sample.kv_usage)
        if sample.lookups is None:
            return
        if self._counted is not None:
            incarnation, lookups, hits = self._counted
            # The counters of another incarnation, or of an engine that reset them, start from 0.
            if incarnation == sample.incarnation and lookups <= sample.lookups and hits <= sample.hits:
                self._lookups += sample.lookups - lookups
                self._hits += sample.hits - hits
        self._counted = (sample.incarnation, sample.lookups, sample.hits)

    def ended(self, ttft_s: float, now: float) -> None:
        """Count a request that the instance answered, with its TTFT. Mutates."""
        self.advance(now)
        if self._ttft is None:
            self._ttft = LogHistogram()
        self._ttft.add(ttft_s)

    def advance(self, now: float) -> None:
        """Close the open bucket if it has ended at `now`. Mutates."""
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
    # Four digits are more than a curve shows, and short as text. Values near or beyond the range of a 4-byte float become NaN.
    return float(f"{value:.4g}") if abs(value) < 1e30 else math.nan
