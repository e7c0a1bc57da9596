"""Changes of keys that an agent merges at the router's pace: the router's copy is the agent's set, and never needs a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import BlockRemoved
from pointsman_agent.core.report_protocol import ReportProtocol
from pointsman_common.core.key_report_types import Delta, Tier
from pointsman_common.core.key_report_wire import delta_fault, key_message, pieces
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.key_report_receiver import ReportSync
from pointsman_router.core.placement_types import Load
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers
from tests.support.kv_events import hash_of, store, tokens_of
from tests.support.router_values import hello, join, place, request, state
from tests.unit.router.test_prefix_knowledge import KEYS, PROMPT

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


@pytest.mark.parametrize(("first_seq", "tiers"), [(0, 1), (9, 1), (8, 2), (1, 8), (12, 1)])
def test_a_delta_of_more_tiers_than_changes_is_refused(first_seq: int, tiers: int) -> None:
    delta = pb.Delta(first_seq=first_seq, seq=9, other_tiers=[pb.TierKeys()] * tiers)
    assert delta_fault(delta)
    assert not delta_fault(pb.Delta(first_seq=2, seq=9, other_tiers=[pb.TierKeys()] * 7))
    assert not delta_fault(pb.Delta(seq=9))


def test_a_stream_that_breaks_between_two_tiers_is_not_resumed() -> None:
    """The router has the device's keys of all changes by then, and the others of none."""
    copy = Copy()
    copy.take(pb.ReportRequest(snapshot_begin=pb.SnapshotBegin(seq=4)))
    copy.take(pb.ReportRequest(snapshot_end=pb.SnapshotEnd(seq=4)))
    delta = pb.Delta(first_seq=5, seq=9, tier=pb.TIER_DEVICE, added=[1])
    delta.other_tiers.add(tier=pb.TIER_HOST, added=[2])
    parts = [key_message(pb.ReportRequest(delta=delta), piece) for piece in range(2)]
    resumable = []
    for part in parts:
        assert part is not None
        assert copy.sync.handle(part) == ""
        resumable.append(copy.sync.can_resume(5, 9))
    assert resumable == [False, True]


def test_what_was_evicted_and_computed_again_within_an_interval_is_no_evidence() -> None:
    """As test_what_the_engine_evicted_meanwhile_is_no_evidence, with an agent that merges both changes."""
    router, path, now = state(), tuple(range(1, 7)), 0.0
    blocks = CachedBlocks("m")
    stream = ReportProtocol(
        blocks, pb.Instance(instance_id="a"), "x", consistency_check_interval_s=5.0, report_interval_s=0.25
    )
    stream.next_message(now)
    stream.received(pb.ReportResponse(welcome=pb.Welcome(snapshot=True)), now)
    stream.received(pb.ReportResponse(pace=pb.Pace(key_interval_ms=25)), now)
    hello(router, "a", 1, now, block_size=32)

    def report() -> None:
        while (message := stream.next_message(now)) is not None:
            for piece in range(pieces(message)):
                if (keys := key_message(message, piece)) is not None:
                    router.handle(ev.KeysReported(1, "a", keys), now)

    blocks.apply([store(path)])
    report()
    for number in range(10):
        now += 0.1
        place(router, request(f"r{number}", prompt=[*tokens_of(path), 1, 2, 3]), now)
        blocks.apply([BlockRemoved(block_hashes=[hash_of(path[:end]) for end in range(1, 7)], medium="GPU")])
        blocks.apply([store(path)])
        report()
        router.handle(ev.FirstToken(f"r{number}"), now)
        router.handle(ev.Finished(f"r{number}", "OK", cached_tokens=0), now)
        router.handle(ev.LoadReported(1, "a", Load(sampled_at=now)), now)
    assert router.instances.get("a").prediction_audit.failures == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("delay_s", [0.02, 0.4])
def test_an_eviction_that_is_reported_after_the_first_token_counts_too(delay_s: float) -> None:
    """Each prompt's prefix is evicted right after the placement; the prompt is computed in 0.2 s and answered in 1 s."""
    router = state()
    join(router, "a", 1, KEYS)
    now, seq = 0.5, 0
    for number in range(5):
        name = f"r{number}"
        place(router, request(name, prompt=PROMPT), now)
        reports: list[tuple[float, ev.Event]] = [
            (now + 0.2, ev.FirstToken(name)),
            (now + 1.0, ev.Finished(name, "OK", cached_tokens=0)),
        ]
        if delay_s < 0.2:
            changes = [(now + delay_s, Delta(seq + 1, 1, removed=KEYS)), (now + 0.3, Delta(seq + 2, 1, added=KEYS))]
        else:
            changes = [(now + delay_s, Delta(seq + 2, 1, KEYS, KEYS, first_seq=seq + 1))]
        seq += 2
        events: list[tuple[float, ev.Event]] = [
            *reports,
            *((at, ev.KeysReported(1, "a", change)) for at, change in changes),
        ]
        for at, event in sorted(events, key=lambda one: one[0]):
            router.handle(ev.LoadReported(1, "a", Load(sampled_at=at)), at)
            router.handle(event, at)
        now += 2.0
    router.handle(ev.LoadReported(1, "a", Load(sampled_at=now)), now)
    assert router.instances.get("a").prediction_audit.failures == 0  # type: ignore[union-attr]


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
        Delta(5, 1, [1], [], cleared=True, first_seq=5, more=True),
        Delta(6, 2, [2], [], first_seq=6, more=True),
        Delta(9, 3, [], [3], first_seq=7),
    ]
