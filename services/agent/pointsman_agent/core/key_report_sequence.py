"""Sequence of messages that reports one instance's keys to one router: a snapshot, deltas, consistency checks. Pure.

The stream has no queue. It has a cursor into the ring of deltas, and copies the keys once when it must send all of them. Deltas
that are created during a snapshot wait in the ring. A stream whose cursor the ring has passed sends another snapshot. So no
router can make the agent's memory grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Protocol

from pointsman_common.core.key_report_types import (
    ConsistencyCheck,
    Delta,
    KeyMessage,
    MergedDelta,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Tier,
)

# Maximum number of keys in one message of a snapshot. 2,048 keys block the event loop of a router that has 4 million keys for
# 2 ms; 32,768 keys blocked it for 20 to 40 ms.
CHUNK_KEYS = 2_048


class ReportedKeys(Protocol):
    """Keys to report: a set by tier, and its newest changes. `CachedBlocks` has this interface, and so has a simulation's
    replacement for it."""

    @property
    def oldest_seq(self) -> int:
        """Sequence number of the first change that is still available; latest_seq + 1 if none is."""

    @property
    def latest_seq(self) -> int:
        """Sequence number of the last change."""

    @property
    def key_count(self) -> int:
        """Number of (tier, key) pairs."""

    @property
    def digest(self) -> int:
        """Digest of the (tier, key) pairs, see digest_of."""

    def keys(self, tier: Tier) -> Collection[int]:
        """Return the keys in `tier`."""

    def delta(self, seq: int) -> Delta:
        """Return the change `seq`, from oldest_seq to latest_seq."""


class KeyStream:
    """The key messages of one stream after its welcome. Call `next_message` until it returns None.

    `consistency_check_interval_s` is the time between two checks. `snapshots` counts the snapshots begun. `key_interval_s`: the
    router's minimum interval between two deltas, s; with one, the changes in between are merged.
    """

    def __init__(self, keys: ReportedKeys, consistency_check_interval_s: float) -> None:
        self.welcomed = False
        self.snapshots = 0
        self.key_interval_s = 0.0
        self._keys = keys
        self._interval_s = consistency_check_interval_s
        self._cursor = 0
        self._snapshot: Iterator[KeyMessage] | None = None
        self._check_due = 0.0
        self._delta_sent = float("-inf")

    def welcome(self, resume_from_seq: int, now: float, *, snapshot: bool) -> None:
        """Start the stream after the router's welcome: with all keys if `snapshot`, else with the deltas from `resume_from_seq`
        on, if the ring has them. Mutates."""
        self.welcomed = True
        self._check_due = now + self._interval_s
        self._cursor = resume_from_seq
        if snapshot or not self._can_resume():
            self.begin_snapshot()

    def next_message(self, now: float) -> KeyMessage | MergedDelta | None:
        """Return the next message, or None if there is no message before `wake_at` or the next change. Mutates."""
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
            return self._next_delta(now)
        if now >= self._check_due:
            self._check_due = now + self._interval_s
            # Every delta is sent at this point, so the router can compare the current figures with its copy.
            return ConsistencyCheck(keys.latest_seq, keys.key_count, keys.digest)
        return None

    def wake_at(self) -> float | None:
        """Return when `next_message` has a message even if nothing changes; None before the welcome."""
        if not self.welcomed:
            return None
        # While changes wait, a check does, too: it follows them.
        waiting = self._cursor <= self._keys.latest_seq
        return self._delta_sent + self.key_interval_s if waiting else self._check_due

    def end_pause(self) -> None:
        """Let the changes that wait for the router's interval go at once, because the stream is to end. Mutates."""
        self._delta_sent = float("-inf")

    def begin_snapshot(self) -> None:
        """Send all keys next, for example because the router requests a snapshot. Mutates; copies all keys."""
        self.snapshots += 1
        keys = self._keys
        self._cursor = keys.latest_seq + 1
        copies = [(tier, list(keys.keys(tier))) for tier in Tier]
        self._snapshot = _snapshot(copies, SnapshotEnd(keys.latest_seq, keys.key_count, keys.digest))

    def _next_delta(self, now: float) -> Delta | MergedDelta | None:
        """Return the next change, or with an interval all that have come since the last delta; None before that has passed."""
        if not self.key_interval_s:
            self._cursor += 1
            return self._keys.delta(self._cursor - 1)
        if now < self._delta_sent + self.key_interval_s:
            return None
        merged = _merged(self._keys, self._cursor)
        self._cursor = merged.seq + 1
        # What did not fit into one message follows at once.
        self._delta_sent = now if self._cursor > self._keys.latest_seq else float("-inf")
        return merged

    def _can_resume(self) -> bool:
        return self._keys.oldest_seq <= self._cursor <= self._keys.latest_seq + 1


def _merged(keys: ReportedKeys, first_seq: int) -> MergedDelta:
    """Return the sum of the changes from `first_seq` to the latest, or to the one with which CHUNK_KEYS keys are reached."""
    # Tier -> key -> whether it was there before (or since all keys were removed), and whether it is there now.
    net: dict[int, dict[int, tuple[bool, bool]]] = {}
    cleared, size, seq = False, 0, first_seq - 1
    while seq < keys.latest_seq and size < CHUNK_KEYS:
        seq += 1
        delta = keys.delta(seq)
        if delta.cleared:
            cleared = True
            net.clear()
        of_tier = net.setdefault(delta.tier, {})
        for there, changed in ((False, delta.removed), (True, delta.added)):
            for key in changed:
                of_tier[key] = of_tier[key][0] if key in of_tier else not there, there
        size += len(delta.added) + len(delta.removed)
    changes = []
    for tier in Tier:
        of_tier = net.get(tier, {})
        # A key that was removed and added again is in both lists: a prompt that lost its prefix meanwhile is no evidence.
        added = [key for key, (_, now) in of_tier.items() if now]
        removed = [key for key, (before, _) in of_tier.items() if before]
        if added or removed:
            changes.append((tier, added, removed))
    return MergedDelta(first_seq, seq, changes, cleared)


def _snapshot(copies: list[tuple[Tier, list[int]]], end: SnapshotEnd) -> Iterator[KeyMessage]:
    yield SnapshotBegin(end.seq)
    for tier, keys in copies:
        rest = iter(keys)
        while chunk := list(islice(rest, CHUNK_KEYS)):
            yield SnapshotChunk(tier, chunk)
    yield end
