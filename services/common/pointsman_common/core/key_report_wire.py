"""Conversion of the messages about block keys to protobuf, as agents do, and from it, as routers do. Pure."""

from __future__ import annotations

import math

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core.key_report_types import (
    ConsistencyCheck,
    Delta,
    KeyMessage,
    MergedDelta,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
)

# Maximum number of a snapshot's keys that are applied at once, which takes 0.2 ms.
PIECE_KEYS = 512
# Maximum number of tiers of one delta besides the first. There are three tiers, and newer versions may have more.
MAX_OTHER_TIERS = 7
_Tier = agent_pb2.Tier.ValueType


def to_wire(message: KeyMessage | MergedDelta) -> agent_pb2.ReportRequest:
    """Return the protobuf message."""
    match message:
        case Delta():
            delta = agent_pb2.Delta(
                seq=message.seq,
                tier=_Tier(message.tier),
                added=message.added,
                removed=message.removed,
                cleared=message.cleared,
            )
            return agent_pb2.ReportRequest(delta=delta)
        case MergedDelta():
            delta = agent_pb2.Delta(first_seq=message.first_seq, seq=message.seq, cleared=message.cleared)
            for at, (tier, added, removed) in enumerate(message.changes):
                into = delta.other_tiers.add() if at else delta
                into.tier = _Tier(tier)
                into.added.extend(added)
                into.removed.extend(removed)
            return agent_pb2.ReportRequest(delta=delta)
        case SnapshotBegin():
            return agent_pb2.ReportRequest(snapshot_begin=agent_pb2.SnapshotBegin(seq=message.seq))
        case SnapshotChunk():
            return agent_pb2.ReportRequest(
                snapshot_chunk=agent_pb2.SnapshotChunk(tier=_Tier(message.tier), keys=message.keys)
            )
        case SnapshotEnd():
            end = agent_pb2.SnapshotEnd(seq=message.seq, key_count=message.key_count, digest=message.digest)
            return agent_pb2.ReportRequest(snapshot_end=end)
        case ConsistencyCheck():
            check = agent_pb2.ConsistencyCheck(seq=message.seq, key_count=message.key_count, digest=message.digest)
            return agent_pb2.ReportRequest(consistency_check=check)


def pieces(wire: agent_pb2.ReportRequest) -> int:
    """Return the number of pieces that `key_message` splits a message into: of at most PIECE_KEYS keys for a snapshot chunk, of
    one tier for a delta, else one."""
    return max(1, math.ceil(len(wire.snapshot_chunk.keys) / PIECE_KEYS)) + len(wire.delta.other_tiers)


def key_message(wire: agent_pb2.ReportRequest, piece: int = 0) -> KeyMessage | None:
    """Convert one piece of a message about block keys; None if the message is of another kind. Call this only when the piece is
    applied: each collection of young garbage scans all numbers of a list that waits."""
    match wire.WhichOneof("kind"):
        case "snapshot_begin":
            return SnapshotBegin(wire.snapshot_begin.seq)
        case "snapshot_chunk":
            chunk = wire.snapshot_chunk
            return SnapshotChunk(chunk.tier, chunk.keys[piece * PIECE_KEYS : (piece + 1) * PIECE_KEYS])
        case "snapshot_end":
            end = wire.snapshot_end
            return SnapshotEnd(end.seq, end.key_count, end.digest)
        case "delta":
            return _delta(wire.delta, piece)
        case "consistency_check":
            mark = wire.consistency_check
            return ConsistencyCheck(mark.seq, mark.key_count, mark.digest)
        case _:
            return None


def _delta(wire: agent_pb2.Delta, piece: int) -> Delta:
    """Convert the part of a delta that is about one tier. A delta has no more tiers than changes: each part has the number of one
    change, and the last part those of all that are left."""
    of_tier = wire.other_tiers[piece - 1] if piece else wire
    first = (wire.first_seq or wire.seq) + piece
    more = piece < len(wire.other_tiers)
    seq = first if more else wire.seq
    cleared = wire.cleared and not piece
    return Delta(seq, of_tier.tier, list(of_tier.added), list(of_tier.removed), cleared, first, more)


def delta_fault(wire: agent_pb2.Delta) -> str:
    """Return what is wrong with a delta's tiers; empty if nothing is. Each tier of merged changes has a change of its own."""
    tiers = len(wire.other_tiers)
    changes = wire.seq - wire.first_seq if wire.first_seq else 0
    return "a delta of more tiers than changes" if tiers > max(min(changes, MAX_OTHER_TIERS), 0) else ""
