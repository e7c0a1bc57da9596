"""The report protocol against a toy router that insists on every rule of the proto's comments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import Block, CachedBlocks
from pointsman_agent.core.key_report_sequence import CHUNK_KEYS
from pointsman_agent.core.kv_events import BlockRemoved
from pointsman_agent.core.report_protocol import ProtocolError, ReportProtocol
from pointsman_common.core.block_keys import KEY_SCHEME, digest_of
from pointsman_common.core.key_report_types import Tier
from tests.support.kv_events import PER_BLOCK, hash_of, pairs_of, store

INTERVALS = {"consistency_check_interval_s": 5.0, "report_interval_s": 0.25}
MEDIA = st.sampled_from(["GPU", "CPU"])
INSTANCE = pb.Instance(instance_id="h:1", incarnation="a", model="tiny", block_size=32)


class ToyRouter:
    """One stream's receiver. `pairs` is None until a snapshot is complete or a resume was granted."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] | None = None
        self.seq = 0
        self.loads = 0
        self.deltas = 0
        self.consistency_checks = 0
        self.begun: int | None = None
        self._partial: set[tuple[int, int]] = set()

    def take(self, message: pb.ReportRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "snapshot_begin":
            self.begun, self._partial, self.pairs = message.snapshot_begin.seq, set(), None
        elif kind == "snapshot_chunk":
            assert self.begun is not None
            assert 0 < len(message.snapshot_chunk.keys) <= CHUNK_KEYS
            self._partial |= {(message.snapshot_chunk.tier, key) for key in message.snapshot_chunk.keys}
        elif kind == "snapshot_end":
            assert message.snapshot_end.seq == self.begun
            assert message.snapshot_end.key_count == len(self._partial)
            assert message.snapshot_end.digest == digest(self._partial)
            self.pairs, self.seq, self.begun = self._partial, message.snapshot_end.seq, None
        elif kind == "delta":
            delta = message.delta
            assert self.pairs is not None, "a delta before there is anything to change"
            assert (delta.first_seq or delta.seq) == self.seq + 1
            assert len(delta.other_tiers) <= delta.seq - (delta.first_seq or delta.seq)
            self.seq = delta.seq
            self.deltas += 1
            if delta.cleared:
                self.pairs.clear()
            changes: list[Any] = [delta, *delta.other_tiers]
            for change in changes:
                added = {(change.tier, key) for key in change.added}
                removed = {(change.tier, key) for key in change.removed}
                assert removed <= self.pairs
                assert not added & (self.pairs - removed)
                self.pairs = (self.pairs - removed) | added
        elif kind == "consistency_check":
            assert self.pairs is not None
            assert message.consistency_check.seq == self.seq
            assert message.consistency_check.key_count == len(self.pairs)
            assert message.consistency_check.digest == digest(self.pairs)
            self.consistency_checks += 1
        elif kind == "load":
            self.loads += 1
        else:
            raise AssertionError(kind)


def digest(pairs: set[tuple[int, int]]) -> int:
    result = 0
    for tier, key in pairs:
        result ^= digest_of(tier, [key])
    return result


def welcome(resume: int | None = None) -> pb.ReportResponse:
    return pb.ReportResponse(welcome=pb.Welcome(snapshot=resume is None, resume_from_seq=resume or 0, router_id="toy"))


class ReportMachine(RuleBasedStateMachine):
    """Cached blocks that change, a stream that is read a few messages at a time, resyncs, and streams that break."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.cached_blocks = CachedBlocks("tiny", ring=4)
        self.stream: ReportProtocol | None = None
        self.router = ToyRouter()
        self.loads = 0

    @rule()
    def connect(self) -> None:
        if self.stream is not None:
            return
        self.stream = ReportProtocol(self.cached_blocks, INSTANCE, "agent", **INTERVALS)
        assert self.stream.wake_at() is None
        hello = self.stream.next_message(self.now)
        assert hello is not None
        assert (hello.hello.key_scheme, hello.hello.report_interval_ms) == (KEY_SCHEME, 250)
        assert self.stream.next_message(self.now) is None
        held = self.router.pairs if self.router.begun is None else None
        known = held is not None and hello.hello.oldest_seq <= self.router.seq + 1 <= hello.hello.latest_seq + 1
        if not known:
            self.router = ToyRouter()
        self.stream.received(welcome(self.router.seq + 1 if known else None), self.now)

    @rule()
    def disconnect(self) -> None:
        self.stream = None
        self.router.begun = None if self.router.begun is None else self.router.begun

    @rule(path=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), medium=MEDIA)
    def store(self, path: tuple[int, ...], medium: str) -> None:
        self.cached_blocks.apply([store(path, medium=medium)])

    @rule(path=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), medium=MEDIA)
    def remove(self, path: tuple[int, ...], medium: str) -> None:
        self.cached_blocks.apply([BlockRemoved(block_hashes=[hash_of(path)], medium=medium)])

    @rule(interval_ms=st.sampled_from([0, 25, 3_000]))
    def pace(self, interval_ms: int) -> None:
        if self.stream is not None:
            self.stream.received(pb.ReportResponse(pace=pb.Pace(key_interval_ms=interval_ms)), self.now)

    @rule()
    def clear(self) -> None:
        self.cached_blocks.clear()

    @rule()
    def resync(self) -> None:
        if self.stream is not None:
            self.stream.received(pb.ReportResponse(resync=pb.Resync(reason="test")), self.now)

    @rule()
    def load(self) -> None:
        if self.stream is not None:
            self.stream.load(pb.Load(running=1), self.now)

    @rule(count=st.integers(1, 6), seconds=st.floats(0, 6))
    def read(self, count: int, seconds: float) -> None:
        self.now += seconds
        for _ in range(count):
            if self.stream is None or (message := self.stream.next_message(self.now)) is None:
                return
            self.router.take(message)

    @rule()
    def read_all(self) -> None:
        if self.stream is None:
            return
        while True:
            while (message := self.stream.next_message(self.now)) is not None:
                self.router.take(message)
            wake_at = self.stream.wake_at()
            assert wake_at is not None
            assert wake_at > self.now
            if self.router.seq == self.cached_blocks.latest_seq:
                break
            self.now = wake_at
        assert self.router.seq == self.cached_blocks.latest_seq
        assert self.router.pairs == pairs_of(self.cached_blocks)

    @invariant()
    def shadow_is_sound(self) -> None:
        self.cached_blocks.check()


ReportMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestReportMachine = ReportMachine.TestCase


def many_cached_blocks(keys: int) -> CachedBlocks:
    cached_blocks = CachedBlocks("tiny", ring=8)
    cached_blocks.restore((at, Block((at + 1,), {("GPU", "", ""): 1})) for at in range(keys))
    return cached_blocks


def test_a_load_may_be_older_than_its_message_can_say() -> None:
    stream = ReportProtocol(many_cached_blocks(3), INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.load(pb.Load(), 0.0)
    stream.received(welcome(), 1e8)
    load = stream.next_message(1e8)
    assert load is not None
    assert load.load.sample_age_ms == 2**32 - 1


def test_load_comes_right_after_welcome_and_only_the_latest() -> None:
    stream = ReportProtocol(many_cached_blocks(3), INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.load(pb.Load(running=1), 0.0)
    stream.load(pb.Load(running=2), 9.5)
    assert stream.next_message(9.75) is None
    stream.received(welcome(), 10.0)
    first = stream.next_message(10.0)
    assert first is not None
    assert (first.load.running, first.load.sample_age_ms) == (2, 500)
    second = stream.next_message(10.0)
    assert second is not None
    assert second.HasField("snapshot_begin")


def test_a_chunk_of_a_snapshot_holds_a_routers_loop_for_some_milliseconds_at_most() -> None:
    cached_blocks = many_cached_blocks(10_000)
    stream = ReportProtocol(cached_blocks, INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.received(welcome(), 0.0)
    sizes = []
    while (message := stream.next_message(0.0)) is not None and not message.HasField("snapshot_end"):
        sizes.append(len(message.snapshot_chunk.keys))
    assert sum(sizes) == 10_000
    # The router needs about a microsecond for each key of a message, and other work waits meanwhile.
    assert max(sizes) <= 4_096


def test_a_snapshot_comes_in_chunks_and_loads_pass_between_them() -> None:
    cached_blocks = many_cached_blocks(2 * CHUNK_KEYS + 1)
    stream = ReportProtocol(cached_blocks, INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.received(welcome(), 0.0)
    router = ToyRouter()
    kinds = []
    for at in range(6):
        if at == 2:
            stream.load(pb.Load(), 0.0)
            cached_blocks.apply([store((1,))])
        message = stream.next_message(0.0)
        assert message is not None
        kinds.append(message.WhichOneof("kind"))
        router.take(message)
    assert kinds == ["snapshot_begin", "snapshot_chunk", "load", "snapshot_chunk", "snapshot_chunk", "snapshot_end"]
    delta = stream.next_message(0.0)
    assert delta is not None
    router.take(delta)
    assert router.pairs == pairs_of(cached_blocks)
    assert len(cached_blocks.keys(Tier.DEVICE)) == 2 * CHUNK_KEYS + 3


@pytest.mark.parametrize("resume", [0, 1, 7, 99])
def test_what_cannot_be_resumed_is_sent_whole(resume: int) -> None:
    cached_blocks = CachedBlocks("tiny", ring=2)
    for letter in range(1, 6):
        cached_blocks.apply([store((letter,))])
    stream = ReportProtocol(cached_blocks, INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.received(pb.ReportResponse(welcome=pb.Welcome(resume_from_seq=resume)), 0.0)
    message = stream.next_message(0.0)
    assert message is not None
    assert message.snapshot_begin.seq == 5


@pytest.mark.parametrize(
    "responses",
    [
        [pb.ReportResponse(resync=pb.Resync(reason="early"))],
        [welcome(), welcome()],
    ],
)
def test_a_router_that_breaks_the_order_is_an_error(responses: list[pb.ReportResponse]) -> None:
    stream = ReportProtocol(CachedBlocks("tiny"), INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    for response in responses[:-1]:
        stream.received(response, 0.0)
    with pytest.raises(ProtocolError):
        stream.received(responses[-1], 0.0)


def test_a_kind_of_a_newer_router_is_ignored() -> None:
    stream = ReportProtocol(CachedBlocks("tiny"), INSTANCE, "agent", **INTERVALS)
    hello = stream.next_message(0.0)
    assert hello is not None
    assert hello.hello.accepts_pace
    stream.received(pb.ReportResponse(), 0.0)
    stream.received(welcome(), 0.0)
    assert stream.welcomed


def test_a_welcome_before_hello_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ReportProtocol(CachedBlocks("tiny"), INSTANCE, "agent", **INTERVALS).received(welcome(), 0.0)


def test_loads_are_sent_at_the_router_s_pace_the_newest_first() -> None:
    stream = ReportProtocol(CachedBlocks("tiny"), INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.received(welcome(1), 0.0)

    def sent(now: float) -> int | None:
        message = stream.next_message(now)
        return message.load.running if message is not None and message.HasField("load") else None

    for running in (1, 2):
        stream.load(pb.Load(running=running), 1.0)
        assert sent(1.0) == running, "without a limit each load is sent"
    stream.received(pb.ReportResponse(pace=pb.Pace(load_interval_ms=400)), 1.0)
    stream.load(pb.Load(running=3), 1.0)
    assert sent(1.0) == 3
    for running in (4, 5):
        stream.load(pb.Load(running=running), 1.1)
        assert sent(1.1) is None
    assert stream.wake_at() == 1.4
    message = stream.next_message(1.4)
    assert message is not None
    assert (message.load.running, message.load.sample_age_ms) == (5, 300)
    assert stream.wake_at() == 5.0
    stream.received(pb.ReportResponse(pace=pb.Pace()), 1.5)
    stream.load(pb.Load(running=6), 2.0)
    assert sent(2.0) == 6
    # What the instance can serve is sent at once, and a pace that is shortened holds for the next load.
    stream.received(pb.ReportResponse(pace=pb.Pace(load_interval_ms=60_000)), 2.0)
    stream.load(pb.Load(running=7), 2.0)
    assert sent(2.0) == 7
    stream.load(pb.Load(running=8), 2.1)
    assert sent(2.1) is None
    stream.load(pb.Load(running=9, suspended="asleep"), 2.2)
    assert stream.wake_at() == float("-inf")
    assert sent(2.2) == 9
    stream.load(pb.Load(running=10, suspended="asleep"), 2.3)
    assert sent(2.3) is None
    stream.received(pb.ReportResponse(pace=pb.Pace(load_interval_ms=100)), 2.4)
    assert sent(2.4) is None
    assert sent(2.5) == 10


def paced(cached_blocks: CachedBlocks, key_interval_ms: int) -> ReportProtocol:
    """Return a welcomed stream whose router has set a pace for changes of keys."""
    stream = ReportProtocol(cached_blocks, INSTANCE, "agent", **INTERVALS)
    stream.next_message(0.0)
    stream.received(welcome(1), 0.0)
    stream.received(pb.ReportResponse(pace=pb.Pace(key_interval_ms=key_interval_ms)), 0.0)
    return stream


def test_changes_are_merged_at_the_router_s_pace() -> None:
    """A busy engine publishes changes at each step; a router of a thousand engines could not read a message for each."""
    cached_blocks = CachedBlocks("tiny")
    stream = paced(cached_blocks, 400)
    router = ToyRouter()
    router.pairs = set()

    def sent(now: float) -> int:
        before = router.deltas
        while (message := stream.next_message(now)) is not None:
            router.take(message)
        return router.deltas - before

    cached_blocks.apply([store((1,))])
    assert sent(1.0) == 1, "the first change waits for nothing"
    for step in range(20):
        cached_blocks.apply([store((2, step))])
        cached_blocks.apply([store((3, step), medium="CPU")])
        if step % 2:
            cached_blocks.apply([BlockRemoved(block_hashes=[hash_of((2, step))], medium="GPU")])
        assert sent(1.0 + step / 100) == 0
    assert stream.wake_at() == pytest.approx(1.4)
    assert sent(1.41) == 1
    assert router.pairs == pairs_of(cached_blocks)
    assert router.seq == cached_blocks.latest_seq
    cached_blocks.clear()
    cached_blocks.apply([store((7,))])
    assert sent(1.5) == 0
    assert sent(1.9) == 1
    assert router.pairs == pairs_of(cached_blocks)
    # Without a limit each change is a message again.
    stream.received(pb.ReportResponse(pace=pb.Pace()), 2.0)
    for step in range(3):
        cached_blocks.apply([store((8, step))])
    assert sent(2.0) == 3


def test_a_merged_delta_is_no_larger_than_a_part_of_a_snapshot() -> None:
    cached_blocks = CachedBlocks("tiny")
    stream = paced(cached_blocks, 400)
    for step in range(CHUNK_KEYS):
        cached_blocks.apply([store((step,))])
    sizes = []
    while (message := stream.next_message(1.0)) is not None:
        sizes.append(len(message.delta.added))
    assert sum(sizes) == cached_blocks.key_count
    assert max(sizes) < CHUNK_KEYS + PER_BLOCK


def test_a_check_that_falls_due_while_changes_wait_is_no_reason_to_wake() -> None:
    """It follows the changes. The agent would ask again and again until they may go."""
    cached_blocks = CachedBlocks("tiny")
    stream = paced(cached_blocks, 800)
    cached_blocks.apply([store((1,))])
    assert stream.next_message(4.5) is not None
    cached_blocks.apply([store((2,))])
    for now in (4.6, 5.0, 5.2):
        assert stream.next_message(now) is None
        assert stream.wake_at() == pytest.approx(5.3)
    kinds = []
    while (message := stream.next_message(5.3)) is not None:
        kinds.append(message.WhichOneof("kind"))
    assert kinds == ["delta", "consistency_check"]
