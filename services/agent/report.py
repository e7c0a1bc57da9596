"""The report protocol of one instance towards one router, without I/O. Pure.

    Hello -> Welcome -> (SnapshotBegin SnapshotChunk* SnapshotEnd)? -> Delta*      with Load and Bookmark in between

The stream holds no queue of its own: it has a cursor into the shadow's ring of deltas, and copies the keys once when it has
to send them all. Deltas that happen meanwhile wait in the ring behind the snapshot; a stream so slow that the ring has moved
past its cursor sends a snapshot instead. Nothing that a router does can make the agent's memory grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pointsman.agent.v1 import agent_pb2 as pb
from services.agent.shadow import Shadow, Tier
from services.common.keys import KEY_SCHEME

CHUNK_KEYS = 32_768


class ProtocolError(Exception):
    """The router sent something that the order of the protocol does not allow."""


class ReportStream:
    """One stream, from Hello on. Feed it with `received` and `load`; take messages with `next_message` until it has none.

    `bookmark_interval_s` is the time between bookmarks.
    """

    def __init__(self, shadow: Shadow, instance: pb.Instance, agent_id: str, bookmark_interval_s: float) -> None:
        self._shadow = shadow
        self._interval = bookmark_interval_s
        self._hello: pb.ReportRequest | None = pb.ReportRequest(
            hello=pb.Hello(
                instance=instance,
                key_scheme=KEY_SCHEME,
                oldest_seq=shadow.oldest_seq,
                latest_seq=shadow.latest_seq,
                agent_id=agent_id,
            )
        )
        self.welcomed = False
        self.snapshots = 0
        """Snapshots begun on this stream."""
        self._cursor = 0
        self._snapshot: Iterator[pb.ReportRequest] | None = None
        self._load: tuple[pb.Load, float] | None = None
        self._bookmark_due = 0.0

    def received(self, response: pb.ReportResponse, now: float) -> None:
        """A message of the router. Raises ProtocolError."""
        kind = response.WhichOneof("kind")
        if kind == "welcome":
            if self.welcomed or self._hello is not None:
                raise ProtocolError("welcome without hello")
            self.welcomed = True
            self._bookmark_due = now + self._interval
            self._cursor = response.welcome.resume_from_seq
            if response.welcome.snapshot or not self._can_resume():
                self._begin_snapshot()
        elif kind == "resync":
            if not self.welcomed:
                raise ProtocolError("resync before welcome")
            self._begin_snapshot()
        else:
            raise ProtocolError(f"unknown message {kind}")

    def load(self, load: pb.Load, taken_at: float) -> None:
        """The newest sample, as of `taken_at`; it replaces one that was not sent yet."""
        self._load = (load, taken_at)

    def next_message(self, now: float) -> pb.ReportRequest | None:
        """The next message to write, or None when there is nothing to say before `wake_at` or the next change. Mutates."""
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        if not self.welcomed:
            return None
        if self._load is not None:
            (load, taken_at), self._load = self._load, None
            message = pb.ReportRequest(load=load)
            message.load.sample_age_ms = max(0, round((now - taken_at) * 1000))
            return message
        if self._snapshot is None and not self._can_resume():
            self._begin_snapshot()
        if self._snapshot is not None:
            if (part := next(self._snapshot, None)) is not None:
                return part
            self._snapshot = None
            return self.next_message(now)
        if self._cursor <= self._shadow.latest_seq:
            delta = self._shadow.delta(self._cursor)
            self._cursor += 1
            return pb.ReportRequest(
                delta=pb.Delta(
                    seq=delta.seq,
                    tier=_TIERS[delta.tier],
                    added=delta.added,
                    removed=delta.removed,
                    cleared=delta.cleared,
                )
            )
        if now >= self._bookmark_due:
            self._bookmark_due = now + self._interval
            # Only here has the router seen every delta, so that the shadow's present figures are the ones it can compare.
            return pb.ReportRequest(
                bookmark=pb.Bookmark(
                    seq=self._shadow.latest_seq, key_count=self._shadow.key_count, digest=self._shadow.digest
                )
            )
        return None

    def wake_at(self) -> float | None:
        """When `next_message` has something to say even if nothing changes; None before Welcome."""
        return self._bookmark_due if self.welcomed else None

    def _can_resume(self) -> bool:
        return self._shadow.oldest_seq <= self._cursor <= self._shadow.latest_seq + 1

    def _begin_snapshot(self) -> None:
        self.snapshots += 1
        shadow = self._shadow
        self._cursor = shadow.latest_seq + 1
        copies = [(tier, list(shadow.keys(tier))) for tier in Tier]
        self._snapshot = _snapshot(shadow.latest_seq, copies, shadow.key_count, shadow.digest)


_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST, Tier.STORAGE: pb.TIER_STORAGE}


def _snapshot(
    seq: int, copies: list[tuple[Tier, list[int]]], key_count: int, digest: int
) -> Iterator[pb.ReportRequest]:
    yield pb.ReportRequest(snapshot_begin=pb.SnapshotBegin(seq=seq))
    for tier, keys in copies:
        rest = iter(keys)
        while chunk := list(islice(rest, CHUNK_KEYS)):
            yield pb.ReportRequest(snapshot_chunk=pb.SnapshotChunk(tier=_TIERS[tier], keys=chunk))
    yield pb.ReportRequest(snapshot_end=pb.SnapshotEnd(seq=seq, key_count=key_count, digest=digest))
