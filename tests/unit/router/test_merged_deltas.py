"""Changes of keys that an agent merges at the router's pace: the router's copy is the agent's set, and never needs a snapshot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman.agent.core.cached_blocks import CachedBlocks, Tier
from pointsman.agent.core.kv_events import BlockRemoved
from pointsman.agent.core.report_protocol import ReportProtocol
from pointsman.agent.v1 import agent_pb2 as pb
from pointsman.router.core.instances.report_sync import Delta, ReportSync
from pointsman.router.core.prefix.exact_index import PrefixIndex
from pointsman.router.core.prefix.lower_tiers import LowerTiers
from pointsman.router.io.convert.agent_messages import key_message, pieces
from tests.support.kv_events import hash_of, store

PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
MEDIA = st.sampled_from(["GPU", "CPU", "DISK"])
CHANGES = st.one_of(
    st.tuples(st.just("store"), PATHS, MEDIA),
    st.tuples(st.just("remove"), PATHS, MEDIA),
    st.just(("clear", (), "")),
    st.just(("pass", (), "")),
)


class Copy:
    """A router's copy of the keys of one agent."""

    def __init__(self) -> None:
        self.index, self.lower = PrefixIndex(), LowerTiers()
        self.sync = ReportSync("a", self.index, self.lower)

    def take(self, wire: pb.ReportRequest) -> None:
        for piece in range(pieces(wire)):
            if (message := key_message(wire, piece)) is not None:
                assert self.sync.handle(message) == ""

    def pairs(self) -> set[tuple[int, int]]:
        tiers = ((tier.value, self.lower.keys_of("a", tier.value)) for tier in (Tier.HOST, Tier.STORAGE))
        return {(Tier.DEVICE.value, key) for key in self.index.keys_of("a")} | {
            (tier, key) for tier, keys in tiers for key in keys
        }


@given(st.lists(CHANGES, max_size=40), st.sampled_from([0, 1, 30, 1_000]))
def test_the_copy_is_the_agents_set_at_any_pace(
    changes: list[tuple[str, tuple[int, ...], str]], interval_ms: int
) -> None:
    blocks, copy = CachedBlocks("tiny"), Copy()
    stream = ReportProtocol(
        blocks, pb.Instance(instance_id="a"), "agent", consistency_check_interval_s=0.05, report_interval_s=0.1
    )
    stream.next_message(0.0)
    stream.received(pb.ReportResponse(welcome=pb.Welcome(snapshot=True)), 0.0)
    stream.received(pb.ReportResponse(pace=pb.Pace(key_interval_ms=interval_ms)), 0.0)
    now = 0.0
    for kind, path, medium in changes:
        if kind == "store":
            blocks.apply([store(path, medium=medium)])
        elif kind == "remove":
            blocks.apply([BlockRemoved(block_hashes=[hash_of(path)], medium=medium)])
        elif kind == "clear":
            blocks.clear()
        now += 0.01
        while (message := stream.next_message(now)) is not None:
            copy.take(pb.ReportRequest.FromString(message.SerializeToString()))
    while (message := stream.next_message(now + 2.0)) is not None:
        copy.take(message)
    assert copy.sync.live
    assert copy.sync.seq == blocks.latest_seq
    assert copy.pairs() == {(tier.value, key) for tier in Tier for key in blocks.keys(tier)}
    copy.index.check_invariants()


def test_a_merged_delta_after_a_gap_is_refused() -> None:
    copy = Copy()
    copy.take(pb.ReportRequest(snapshot_begin=pb.SnapshotBegin(seq=4)))
    copy.take(pb.ReportRequest(snapshot_end=pb.SnapshotEnd(seq=4)))
    assert copy.sync.handle(Delta(9, 1, (1,), first_seq=5)) == ""
    assert copy.sync.handle(Delta(12, 1, (2,), first_seq=11)) == "a gap: delta 11 after 9"


def test_each_tier_of_a_merged_delta_is_a_part_with_numbers_of_its_own() -> None:
    delta = pb.Delta(first_seq=5, seq=9, tier=pb.TIER_DEVICE, added=[1], cleared=True)
    delta.other_tiers.add(tier=pb.TIER_HOST, added=[2])
    delta.other_tiers.add(tier=pb.TIER_STORAGE, removed=[3])
    wire = pb.ReportRequest(delta=delta)
    assert [key_message(wire, piece) for piece in range(pieces(wire))] == [
        Delta(5, 1, [1], [], cleared=True, first_seq=5),
        Delta(6, 2, [2], [], first_seq=6),
        Delta(9, 3, [], [3], first_seq=7),
    ]
