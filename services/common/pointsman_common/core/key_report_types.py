"""Messages about the keys of one instance's cached blocks: what an agent sends and a router applies. Pure.

An agent sends all keys as a snapshot, then contiguous deltas, with consistency checks in between. `key_report_wire.py` converts
to and from protobuf.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """Where blocks are stored. The numbers equal those of pointsman.agent.v1.Tier; a newer agent may send others."""

    DEVICE = 1
    HOST = 2
    STORAGE = 3


class SnapshotBegin(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a snapshot: all keys as of `seq` follow."""

    seq: int


class SnapshotChunk(msgspec.Struct, frozen=True, gc=False):
    """A part of a snapshot's keys, all of one tier."""

    tier: int
    keys: Collection[int]


class SnapshotEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a snapshot, with the number and the digest of its keys."""

    seq: int
    key_count: int
    digest: int


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One change of the set of (tier, key) pairs, or with a `first_seq` the sum of the changes from that one to `seq`."""

    seq: int
    tier: int  # of all `added` and `removed` keys; a newer agent's may be no Tier
    added: Collection[int] = ()  # keys that the tier did not have
    removed: Collection[int] = ()  # keys that the tier had
    cleared: bool = False  # all keys of all tiers were removed before this change
    first_seq: int = 0
    more: bool = False  # the sum goes on with another tier's keys in the next message


class MergedDelta(msgspec.Struct, frozen=True, gc=False):
    """The sum of the changes `first_seq` to `seq`, as an agent sends it; a router applies it as a Delta for each tier."""

    first_seq: int
    seq: int
    # (tier, keys added, keys removed) for each tier that changed, the device's first.
    changes: Sequence[tuple[int, Collection[int], Collection[int]]]
    cleared: bool  # all keys of all tiers are removed first


class ConsistencyCheck(msgspec.Struct, frozen=True, gc=False):
    """The number and the digest that the keys must have after delta `seq`."""

    seq: int
    key_count: int
    digest: int


KeyMessage = SnapshotBegin | SnapshotChunk | SnapshotEnd | Delta | ConsistencyCheck
