"""The router's side of the agent-report protocol, for one instance. Pure.

An agent sends its instance's set of keys as a snapshot and then contiguous deltas, with consistency checks in between. Any
inconsistent message (a gap, a wrong digest, a delta inside a snapshot) empties the copy and makes the router request a new
snapshot, because a phantom block is worse than a missing one. A copy for which the bounded index has no room is dropped until
there is room. Keys of the tiers below the device are copied to LowerTiers. If these have no room, the copy goes on without them:
they are still checked, and count as missing until the next snapshot.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from pointsman_common.core.block_keys import digest_of
from pointsman_common.core.key_report_types import (
    ConsistencyCheck,
    Delta,
    KeyMessage,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Tier,
)
from pointsman_router.core.prefix.exact_index import IndexFull, PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers

_LOWER = (Tier.HOST, Tier.STORAGE)


class SyncPhase(StrEnum):
    """WAITING: no snapshot has begun. SNAPSHOT: one is being received. LIVE: the copy equals the agent's set as of the last
    delta. FULL: the index has no room for the copy."""

    WAITING = "WAITING"
    SNAPSHOT = "SNAPSHOT"
    LIVE = "LIVE"
    FULL = "FULL"


class ReportSync:
    """The copy of one incarnation's keys in `index` and `lower_tiers`, and its phase. `seq`: the last delta applied. `resyncs`:
    number of requested new snapshots."""

    def __init__(self, instance_id: str, index: PrefixIndex, lower_tiers: LowerTiers) -> None:
        self.phase = SyncPhase.WAITING
        self.seq = 0
        self.resyncs = 0
        # Number of device keys for which the index had no room, the last time that it had none.
        self._wanted = 0
        self._instance_id = instance_id
        self._index = index
        self._lower_tiers = lower_tiers
        # Whether the lower tiers had no room for this copy's keys.
        self._without_lower = False
        self._count = 0
        self._digest = 0
        # Whether only some tiers' keys of a sum of changes have been applied.
        self._in_part = False

    @property
    def live(self) -> bool:
        """Whether the copy equals the agent's set as of `seq`."""
        return self.phase is SyncPhase.LIVE

    @property
    def is_incomplete(self) -> bool:
        """Whether the copy waits for keys of a snapshot."""
        return self.phase is not SyncPhase.LIVE and self.phase is not SyncPhase.FULL

    @property
    def full(self) -> bool:
        """Whether the index had no room for the copy."""
        return self.phase is SyncPhase.FULL

    @property
    def missing(self) -> int:
        """For how many device keys more the index needs room before it can have a copy for which it had none: a quarter more
        than it had no room for, less those that have come since. 0 if the copy is live."""
        return 0 if self.live else max(self._wanted * 5 // 4 - self._index.count(self._instance_id), 0)

    def can_resume(self, oldest_seq: int, latest_seq: int) -> bool:
        """Return whether an agent that keeps the deltas oldest..latest can continue from this copy without a snapshot."""
        return self.live and not self._in_part and oldest_seq <= self.seq + 1 <= latest_seq + 1

    def reset(self) -> None:
        """Drop the copy and wait for a snapshot. Mutates the index."""
        self.phase = SyncPhase.WAITING
        self._count = self._digest = self.seq = 0
        self._without_lower = self._in_part = False
        self._index.drop(self._instance_id)
        self._lower_tiers.drop(self._instance_id)

    def invalidate(self) -> None:
        """Drop the copy because it is wrong. The caller must request a new snapshot. Mutates the index."""
        self.reset()
        self.resyncs += 1

    def handle(self, message: KeyMessage) -> str:
        """Apply one message; return why a new snapshot is needed, or "". Mutates the index."""
        if self.phase is SyncPhase.FULL and not isinstance(message, SnapshotBegin):
            if isinstance(message, SnapshotChunk) and message.tier == Tier.DEVICE:
                self._wanted += len(message.keys)
            return ""
        try:
            return self._apply(message)
        except IndexFull:
            self.reset()
            self.phase = SyncPhase.FULL
            return ""

    def _apply(self, message: KeyMessage) -> str:
        match message:
            case Delta():
                return self._delta(message)
            case SnapshotBegin():
                self.reset()
                self.phase, self.seq = SyncPhase.SNAPSHOT, message.seq
                return ""
            case SnapshotChunk():
                return self._chunk(message)
            case SnapshotEnd():
                return self._end(message)
            case ConsistencyCheck():
                return self._check(message)

    def _chunk(self, chunk: SnapshotChunk) -> str:
        if self.phase is not SyncPhase.SNAPSHOT:
            return self._fail("a snapshot chunk outside a snapshot")
        keys = chunk.keys
        if chunk.tier == Tier.DEVICE:
            self._add(keys)
        else:
            self._change_lower(chunk.tier, keys, ())
        self._count += len(keys)
        self._digest ^= digest_of(chunk.tier, keys)
        return ""

    def _end(self, end: SnapshotEnd) -> str:
        if self.phase is not SyncPhase.SNAPSHOT or end.seq != self.seq:
            return self._fail("a snapshot's end without its beginning")
        if (end.key_count, end.digest) != (self._count, self._digest):
            return self._fail("the snapshot's count or digest differs")
        self.phase = SyncPhase.LIVE
        return ""

    def _delta(self, delta: Delta) -> str:
        if self.phase is SyncPhase.WAITING:
            return ""  # The requested snapshot is on its way, and includes this delta.
        if self.phase is SyncPhase.SNAPSHOT:
            return self._fail("a delta inside a snapshot")
        if delta.seq <= self.seq:
            return ""  # Applied already: an agent may send a delta again if it is unsure whether it arrived.
        first_seq = delta.first_seq or delta.seq
        if first_seq != self.seq + 1:
            return self._fail(f"a gap: delta {first_seq} after {self.seq}")
        if delta.cleared:
            self._index.drop(self._instance_id)
            self._lower_tiers.drop(self._instance_id)
            self._without_lower = False
            self._count = self._digest = 0
        added, removed = delta.added, delta.removed
        if delta.tier == Tier.DEVICE:
            fits = self._index.remove(self._instance_id, removed) == len(removed)
            fits = fits and self._add(added) == len(added)
        else:
            fits = self._change_lower(delta.tier, added, removed)
        if not fits:
            return self._fail("a delta that does not fit the copy")
        self._count += len(added) - len(removed)
        self._digest ^= digest_of(delta.tier, added) ^ digest_of(delta.tier, removed)
        self.seq, self._in_part = delta.seq, delta.more
        return ""

    def _add(self, keys: Collection[int]) -> int:
        """Add device keys to the copy; return how many were new. Raises IndexFull."""
        try:
            return self._index.add(self._instance_id, keys)
        except IndexFull:
            self._wanted = self._index.count(self._instance_id) + len(keys)
            raise

    def _change_lower(self, tier: int, added: Collection[int], removed: Collection[int]) -> bool:
        """Apply a change of a lower tier's keys; return whether it fits the copy. A tier of a newer version is not copied."""
        if self._without_lower or tier not in _LOWER:
            return True
        if self._lower_tiers.remove(tier, self._instance_id, removed) != len(removed):
            return False
        try:
            return self._lower_tiers.add(tier, self._instance_id, added) == len(added)
        except IndexFull:
            self._without_lower = True
            self._lower_tiers.drop(self._instance_id)
            return True

    def _check(self, consistency_check: ConsistencyCheck) -> str:
        if not self.live:
            return ""
        if consistency_check.seq != self.seq:
            return self._fail(f"a gap: check {consistency_check.seq} after delta {self.seq}")
        if (consistency_check.key_count, consistency_check.digest) != (self._count, self._digest):
            return self._fail("the consistency check's count or digest differs")
        return ""

    def _fail(self, reason: str) -> str:
        self.reset()
        self.resyncs += 1
        return reason
