"""What is due to one router of one instance's keys: a snapshot, the deltas after it, checks in between. Pure.

The stream holds no queue of its own: it has a cursor into the ring of deltas, and copies the keys once when it has to send them
all. Deltas that happen meanwhile wait in the ring behind the snapshot; a stream so slow that the ring has moved past its cursor
sends a snapshot instead. Nothing that a router does can make the agent's memory grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from pointsman.agent.core.cached_blocks import Delta, Tier

# Of a snapshot, in one message: it holds a router's event loop for 2 ms where the router knows 4 million keys. 32,768 held it
# for 20 to 40.
CHUNK_KEYS = 2_048


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """All keys as of `seq` follow."""

    seq: int


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Some of them."""

    tier: Tier
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """That was all of them."""

    seq: int
    key_count: int
    digest: int


@dataclass(frozen=True, slots=True)
class ConsistencyCheck:
    """What the router must have after delta `seq`."""

    seq: int
    key_count: int
    digest: int


KeyMessage = SnapshotBegin | SnapshotChunk | SnapshotEnd | Delta | ConsistencyCheck


class ReportedKeys(Protocol):
    """What is told: a set of keys by tier, and its newest changes. CachedBlocks, or a simulation's stand-in for them."""

    @property
    def oldest_seq(self) -> int:
        """The first change that is still known; latest_seq + 1 when there is none."""

    @property
    def latest_seq(self) -> int:
        """The last change."""

    @property
    def key_count(self) -> int:
        """Number of (tier, key) pairs."""

    @property
    def digest(self) -> int:
        """Of the (tier, key) pairs, see digest_of."""

    def keys(self, tier: Tier) -> Collection[int]:
        """The keys in `tier`."""

    def delta(self, seq: int) -> Delta:
        """The change `seq`, one of oldest_seq to latest_seq."""


class KeyStream:
    """One stream, from its welcome on. Take messages with `next_message` until it has none.

    `consistency_check_interval_s` is the time between two checks. `snapshots` counts those that were begun.
    """

    def __init__(self, keys: ReportedKeys, consistency_check_interval_s: float) -> None:
        self.welcomed = False
        self.snapshots = 0
        self._keys = keys
        self._interval_s = consistency_check_interval_s
        self._cursor = 0
        self._snapshot: Iterator[KeyMessage] | None = None
        self._check_due = 0.0

    def welcome(self, resume_from_seq: int, now: float, *, snapshot: bool) -> None:
        """The router welcomes the stream, and wants all keys (`snapshot`), or the deltas from `resume_from_seq` on. Mutates."""
        self.welcomed = True
        self._check_due = now + self._interval_s
        self._cursor = resume_from_seq
        if snapshot or not self._can_resume():
            self.begin_snapshot()

    def next_message(self, now: float) -> KeyMessage | None:
        """The next message, or None when there is nothing to say before `wake_at` or the next change. Mutates."""
        if not self.welcomed:
            return None
        keys = self._keys
        if self._snapshot is None and not self._can_resume():
            self.begin_snapshot()
        if self._snapshot is not None:
            if (part := next(self._snapshot, None)) is not None:
                return part
            self._snapshot = None
            return self.next_message(now)
        if self._cursor <= keys.latest_seq:
            self._cursor += 1
            return keys.delta(self._cursor - 1)
        if now >= self._check_due:
            self._check_due = now + self._interval_s
            # Only here has the router been told every delta, so that the present figures are the ones it can compare.
            return ConsistencyCheck(keys.latest_seq, keys.key_count, keys.digest)
        return None

    def wake_at(self) -> float | None:
        """When `next_message` has something to say even if nothing changes; None before the welcome."""
        return self._check_due if self.welcomed else None

    def begin_snapshot(self) -> None:
        """All keys are to be sent, as when the router asks for it. Mutates."""
        self.snapshots += 1
        keys = self._keys
        self._cursor = keys.latest_seq + 1
        copies = [(tier, list(keys.keys(tier))) for tier in Tier]
        self._snapshot = _snapshot(copies, SnapshotEnd(keys.latest_seq, keys.key_count, keys.digest))

    def _can_resume(self) -> bool:
        return self._keys.oldest_seq <= self._cursor <= self._keys.latest_seq + 1


def _snapshot(copies: list[tuple[Tier, list[int]]], end: SnapshotEnd) -> Iterator[KeyMessage]:
    yield SnapshotBegin(end.seq)
    for tier, keys in copies:
        rest = iter(keys)
        while chunk := list(islice(rest, CHUNK_KEYS)):
            yield SnapshotChunk(tier, chunk)
    yield end
