"""Statistics of a trace: lengths, turns, reuse and the best hit ratios of caches. Pure. One pass, for traces of any size.

Each modelled cache serves all requests, and no request waits. A request hits every whole block that an earlier one named, unless
a cache of limited size has evicted it (LRU). Blocks of answers are excluded, since traces name a block only when a prompt has it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pointsman_lab.workload.trace_formats import ANSWER_MS, ANSWER_TOKEN_MS
from pointsman_lab.workload.traces import TraceRequest, shared_prefix
from pointsman_router.core.placement_types import route_class

# Cache sizes of the statistics, tokens: one instance's KV cache, and eight of them.
CACHE_TOKENS = (300_000, 2_400_000)
PERCENTILES = (10, 50, 90, 99)
# Number of points of the curve of sessions in flight.
POINTS = 60


def statistics(requests: Iterable[TraceRequest], cache_tokens: Sequence[int] = CACHE_TOKENS) -> dict[str, Any]:
    """Return a trace's statistics, JSON-ready; `requests` in time order. Lengths in tokens, times in s, ratios 0 to 1.

    `later_turn_cached` is the share of a later turn's input that its own session named before, one value for each such turn.
    `ideal_hit_ratio` is over all tokens; `within_session` is the part of these hits that the session itself made possible.
    `reuse_gap_s` is the time from a block's last use to its reuse, one value for each reuse of a block. Every entry of `caches`
    has `tokens` (None: unlimited), its hit ratio and the route classes that requests would have with it. Raises ValueError
    without requests.
    """
    inputs, outputs, firsts, laters = (array("d") for _ in range(4))
    thinks = array("d")
    pool = _NamedBlocks()
    caches = [_Cache(tokens) for tokens in (*cache_tokens, None)]
    sessions: dict[str, _Session] = {}
    for request in requests:
        path, known = pool.add(request)
        length = request.input_length
        session = sessions.setdefault(request.session, _Session(request.timestamp_ms))
        own = session.add(request, path)
        pool.own_tokens += min(own, known) * request.block_size
        inputs.append(length)
        outputs.append(request.output_length)
        if session.turns == 1:
            firsts.append(length)
        else:
            laters.append(min(own * request.block_size / length, 1.0))
            if request.think_ms is not None:
                thinks.append(request.think_ms / 1e3)
        for cache in caches:
            cache.add(path, length, request.block_size)
    if not inputs:
        raise ValueError("the trace has no requests")
    starts_ms = np.array([session.began_ms for session in sessions.values()])
    ends_ms = np.array([session.ends_ms for session in sessions.values()])
    return {
        "requests": len(inputs),
        "sessions": len(sessions),
        "span_s": round(float(ends_ms.max() - starts_ms.min()) / 1e3, 3),
        "input_tokens": _figures(inputs),
        "first_input_tokens": _figures(firsts),
        "output_tokens": _figures(outputs),
        "turns": _figures([session.turns for session in sessions.values()]),
        "think_s": _figures(thinks),
        "later_turn_cached": _figures(laters),
        "ideal_hit_ratio": round(caches[-1].hit_tokens / sum(inputs), 4),
        "within_session": round(pool.own_tokens / pool.hit_tokens, 4) if pool.hit_tokens else None,
        "reuse_gap_s": _weighted(pool.gaps),
        "caches": [cache.figures() for cache in caches],
        "sessions_in_flight": _in_flight(starts_ms, ends_ms),
    }


class _NamedBlocks:
    """All blocks that were named so far, by the number of the block before and the id, with the time of their last use."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._used_ms = array("d")
        self.gaps: Counter[float] = Counter()
        self.hit_tokens = 0
        self.own_tokens = 0

    def add(self, request: TraceRequest) -> tuple[list[int], int]:
        """Return the numbers of the request's whole blocks, and how many leading ones are known. Mutates."""
        path: list[int] = []
        known = 0
        before = -1
        now = request.timestamp_ms
        for block in request.whole_blocks:
            number = self._numbers.get((before, block))
            if number is None:
                number = self._numbers[before, block] = len(self._used_ms)
                self._used_ms.append(now)
            else:
                known += 1
                self.gaps[round((now - self._used_ms[number]) / 1e3, 1)] += 1
                self._used_ms[number] = now
            path.append(number)
            before = number
        self.hit_tokens += known * request.block_size
        return path, known


class _Session:
    def __init__(self, began_ms: float) -> None:
        self.began_ms = began_ms
        self.ends_ms = began_ms
        self.turns = 0
        self._path: list[int] = []

    def add(self, request: TraceRequest, path: list[int]) -> int:
        """Return how many leading blocks equal those of the session's last request. Mutates."""
        own = shared_prefix(self._path, path)
        self._path = path
        self.turns += 1
        self.ends_ms = max(self.ends_ms, request.timestamp_ms + ANSWER_MS + ANSWER_TOKEN_MS * request.output_length)
        return own


class _Cache:
    """An LRU cache of blocks. A prompt's last block is evicted before its other blocks, as in vLLM."""

    def __init__(self, tokens: int | None) -> None:
        self._limit = tokens
        self._held: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0
        self._input_tokens = 0
        self.hit_tokens = 0
        self._classes: Counter[str] = Counter()

    def add(self, path: Sequence[int], length: int, block_size: int) -> None:
        """Look up a request's blocks and add them to the cache. Mutates."""
        hits = next((depth for depth, block in enumerate(path) if block not in self._held), len(path))
        cached = hits * block_size
        self.hit_tokens += cached
        self._input_tokens += length
        self._classes[route_class(length - cached, length)] += 1
        for block in reversed(path):
            if block not in self._held:
                self._tokens += block_size
            self._held[block] = block_size
            self._held.move_to_end(block)
        while self._limit is not None and self._tokens > self._limit:
            self._tokens -= self._held.popitem(last=False)[1]

    def figures(self) -> dict[str, Any]:
        total = self._classes.total()
        return {
            "tokens": self._limit,
            "hit_ratio": round(self.hit_tokens / self._input_tokens, 4),
            "classes": {name: round(self._classes[name] / total, 4) for name in ("LIGHT", "MEDIUM", "HEAVY")},
        }


def _figures(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    points = np.percentile(values, PERCENTILES)
    found = {f"p{name}": round(float(value), 4) for name, value in zip(PERCENTILES, points, strict=True)}
    return found | {"max": round(float(max(values)), 4), "mean": round(float(np.mean(values)), 4)}


def _weighted(counts: Counter[float]) -> dict[str, float] | None:
    """Return percentiles of values with their numbers of occurrences: the least value that this share of them does not exceed."""
    if not counts:
        return None
    values = np.array(sorted(counts))
    weights = np.cumsum([counts[value] for value in values.tolist()])
    points = values[np.searchsorted(weights, np.array(PERCENTILES) / 100 * weights[-1])]
    found = {f"p{name}": round(float(value), 4) for name, value in zip(PERCENTILES, points, strict=True)}
    mean = sum(value * count for value, count in counts.items()) / counts.total()
    return found | {"max": float(values[-1]), "mean": round(mean, 4)}


def _in_flight(starts_ms: np.ndarray[Any, Any], ends_ms: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the sessions between their first request and their last answer: maximum, mean, and the curve as [s, sessions]."""
    starts, ends = np.sort(starts_ms), np.sort(ends_ms)
    events = np.sort(np.concatenate([starts, ends]))
    # At each event: sessions that have started, less sessions that ended before it.
    open_then = np.searchsorted(starts, events, "right") - np.searchsorted(ends, events, "left")
    times = np.linspace(starts[0], ends[-1], POINTS)
    curve = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "left")
    span = ends[-1] - starts[0]
    return {
        "max": int(open_then.max()),
        "mean": round(float((ends_ms - starts_ms).sum() / span), 4) if span else float(len(starts)),
        "curve": [[round((time - starts[0]) / 1e3, 3), int(count)] for time, count in zip(times, curve, strict=True)],
    }
