"""What a receiver is told to be complete is what the sender computed, whatever happened on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman_connector.layerwise.chunks import BlockTable, ChunkTracker
from pointsman_connector.layerwise.kv_checks import CheckSettings
from pointsman_connector.layerwise.overwrites import OverwriteMarks
from pointsman_connector.layerwise.progress import Batch, ComputedBlocks, Delivery, Span, blocks_of

LAYERS = ("a", "b", "c")


def delivery_of(regions: Sequence[Collection[str]], wanted: int, least_bytes: int = 0) -> Delivery:
    """A receiver of regions in which each layer's part of a block is a byte."""
    return Delivery(regions, wanted, [len(layers) for layers in regions], least_bytes)


def test_layers_of_a_chunk_go_one_after_the_other() -> None:
    computed, delivery = ComputedBlocks(4, LAYERS), delivery_of([["a"], ["b"], ["c"]], wanted=4)
    computed.begin_chunk([7, 8], restarted=False)
    assert delivery.next_batch(computed) is None
    computed.layer_saved("a", 2)
    batch = delivery.next_batch(computed)
    assert batch == Batch((Span(0, 0, 2),), 0)
    computed.layer_saved("b", 2)
    assert delivery.next_batch(computed) is None, "one write at a time"
    delivery.write_finished(batch)
    computed.layer_saved("c", 2)
    both = delivery.next_batch(computed)
    assert both == Batch((Span(1, 0, 2), Span(2, 0, 2)), 0), "what was ready meanwhile goes in one write"
    delivery.write_finished(both)
    assert not delivery.done(computed)


def test_a_receiver_that_has_the_beginning_gets_the_rest() -> None:
    computed, delivery = ComputedBlocks(4, LAYERS), delivery_of([LAYERS], wanted=1)
    computed.begin_chunk([1, 2, 3, 4], restarted=False)
    for layer in LAYERS:
        computed.layer_saved(layer, 3)
    assert delivery.next_batch(computed) is None
    for layer in LAYERS:
        computed.layer_saved(layer, 4)
    batch = delivery.next_batch(computed)
    assert batch == Batch((Span(0, 3, 4),), 0)
    delivery.write_finished(batch)
    assert delivery.done(computed)


def test_a_region_of_several_layers_waits_for_all_of_them() -> None:
    computed, delivery = ComputedBlocks(1, LAYERS), delivery_of([["a", "b"], ["c"]], wanted=1)
    computed.begin_chunk([5], restarted=False)
    computed.layer_saved("a", 1)
    assert delivery.next_batch(computed) is None
    computed.layer_saved("b", 1)
    assert delivery.next_batch(computed) == Batch((Span(0, 0, 1),), 0)


def test_a_little_waits_for_more_or_for_the_end() -> None:
    computed, delivery = ComputedBlocks(4, LAYERS), delivery_of([["a", "b"], ["c"]], wanted=4, least_bytes=5)
    computed.begin_chunk([1, 2], restarted=False)
    for layer in ("a", "b"):
        computed.layer_saved(layer, 2)
    assert delivery.next_batch(computed) is None, "4 bytes"
    computed.layer_saved("c", 2)
    batch = delivery.next_batch(computed)
    assert batch == Batch((Span(0, 0, 2), Span(1, 0, 2)), 0), "6 bytes"
    delivery.write_finished(batch)
    computed.begin_chunk([3, 4], restarted=False)
    for layer in LAYERS:
        assert delivery.next_batch(computed) is None
        computed.layer_saved(layer, 3)
    assert delivery.next_batch(computed) is None, "3 bytes of 6 that are to come"
    computed.layer_saved("a", 4)
    computed.layer_saved("b", 4)
    assert delivery.next_batch(computed) == Batch((Span(0, 2, 4), Span(1, 2, 3)), 0)


def test_the_end_goes_however_little_it_is() -> None:
    computed, delivery = ComputedBlocks(1, LAYERS), delivery_of([["a", "b"], ["c"]], wanted=1, least_bytes=100)
    computed.begin_chunk([5], restarted=False)
    for layer in LAYERS:
        assert delivery.next_batch(computed) is None
        computed.layer_saved(layer, 1)
    assert delivery.next_batch(computed) == Batch((Span(0, 0, 1), Span(1, 0, 1)), 0)


def test_what_was_read_before_a_restart_does_not_count() -> None:
    computed, delivery = ComputedBlocks(1, ["a"]), delivery_of([["a"]], wanted=1)
    computed.begin_chunk([5], restarted=False)
    computed.layer_saved("a", 1)
    stale = delivery.next_batch(computed)
    assert stale is not None
    computed.begin_chunk([9], restarted=True)
    computed.layer_saved("a", 1)
    assert not delivery.done(computed)
    delivery.write_finished(stale)
    assert not delivery.done(computed)
    assert delivery.next_batch(computed) == Batch((Span(0, 0, 1),), 1)


def test_a_failed_write_ends_the_pushing() -> None:
    computed, delivery = ComputedBlocks(1, ["a"]), delivery_of([["a"]], wanted=1)
    computed.begin_chunk([5], restarted=False)
    computed.layer_saved("a", 1)
    assert delivery.next_batch(computed) is not None
    delivery.write_failed()
    assert delivery.next_batch(computed) is None
    assert not delivery.done(computed)


def test_a_layer_that_never_reports_leaves_it_incomplete() -> None:
    computed, delivery = ComputedBlocks(1, LAYERS), delivery_of([["a"], ["b"], ["c"]], wanted=1)
    computed.begin_chunk([5], restarted=False)
    computed.layer_saved("a", 1)
    computed.layer_saved("c", 1)
    batch = delivery.next_batch(computed)
    assert batch is not None
    delivery.write_finished(batch)
    assert not computed.complete
    assert not delivery.done(computed)


@given(st.integers(1, 500), st.integers(1, 64), st.data())
def test_only_full_blocks_are_sent_before_the_end(prompt: int, size: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, prompt + 1))
    blocks = blocks_of(tokens, prompt, size)
    assert blocks * size <= tokens or (tokens >= prompt and (blocks - 1) * size < prompt <= blocks * size)


class Pushing(RuleBasedStateMachine):
    """Two engines' memories. The sender computes chunk by chunk and layer by layer, is preempted at any time, even when all is
    computed, and loses its blocks to others; writes read its memory at any moment between their start and their end. Its loop
    processes what the engine's thread posts later, in order. KV is (layer, position); None is garbage."""

    @initialize(
        total=st.integers(1, 6),
        wanted=st.integers(1, 6),
        joined=st.booleans(),
        least_bytes=st.sampled_from([0, 2, 100]),
    )
    def begin(self, total: int, wanted: int, joined: bool, least_bytes: int) -> None:
        self.total, self.wanted = total, min(wanted, total)
        self.computed = ComputedBlocks(total, LAYERS)
        self.marks = OverwriteMarks()
        self.least_bytes = least_bytes
        self.delivery: Delivery | None = self.joining() if joined else None
        self.memory: dict[tuple[str, int], int | None] = {}
        self.theirs: dict[tuple[str, int], int | None] = {}
        self.next_block = 0
        # What the engine's thread knows: its blocks, how far it is, which layers of the chunk are still to be computed.
        self.blocks: list[int] = []
        self.up_to = 0
        self.unsaved: list[str] = []
        self.restart = False
        self.posted: list[Callable[[], None]] = []
        self.reported = False
        self.write: tuple[Batch, list[int], dict[tuple[str, int], int | None] | None] | None = None

    def joining(self) -> Delivery:
        return delivery_of([["a", "b"], ["c"]], self.wanted, self.least_bytes)

    @precondition(lambda self: not self.unsaved and self.up_to < self.total)
    @rule(size=st.integers(1, 3))
    def chunk(self, size: int) -> None:
        before = self.up_to
        self.up_to = min(before + size, self.total)
        new = list(range(self.next_block, self.next_block + self.up_to - before))
        self.next_block += len(new)
        self.blocks += new
        self.posted.append(partial(self.computed.begin_chunk, new, restarted=self.restart))
        self.restart = False
        self.unsaved = list(LAYERS)

    @precondition(lambda self: self.unsaved)
    @rule()
    def layer(self) -> None:
        layer = self.unsaved.pop(0)
        for position, block in enumerate(self.blocks):
            self.memory[layer, block] = position
        self.posted.append(partial(self.computed.layer_saved, layer, self.up_to))

    @precondition(lambda self: not self.unsaved and self.up_to > 0)
    @rule()
    def preempted(self) -> None:
        self.marks.mark(["t"])
        self.posted.append(self.processed)
        for key in self.memory:
            self.memory[key] = None
        self.blocks, self.restart, self.up_to = [], True, 0

    def processed(self) -> None:
        self.computed.restart()
        self.marks.clear("t")

    @precondition(lambda self: self.posted)
    @rule()
    def loop(self) -> None:
        self.posted.pop(0)()

    @precondition(lambda self: self.delivery is None)
    @rule()
    def joins(self) -> None:
        self.delivery = self.joining()

    @precondition(lambda self: self.delivery is not None and self.write is None)
    @rule(early=st.booleans())
    def start(self, early: bool) -> None:
        assert self.delivery is not None
        if (batch := self.delivery.next_batch(self.computed)) is not None:
            blocks = list(self.computed.blocks)
            self.write = (batch, blocks, dict(self.memory) if early else None)

    @precondition(lambda self: self.write is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def end(self, fails: bool) -> None:
        assert self.delivery is not None
        assert self.write is not None
        (batch, blocks, read), self.write = self.write, None
        if fails:
            self.delivery.write_failed()
            return
        memory = read if read is not None else self.memory
        for span in batch.spans:
            for layer in self.delivery.regions[span.region]:
                for position in range(span.first, span.end):
                    self.theirs[layer, position] = memory.get((layer, blocks[position]))
        if "t" in self.marks:
            self.delivery.write_discarded()
        else:
            self.delivery.write_finished(batch)

    @invariant()
    def complete_is_right(self) -> None:
        """Whenever the loop finds that the receiver has all, it tells it."""
        delivery: Delivery | None = getattr(self, "delivery", None)
        if self.reported or delivery is None or not delivery.done(self.computed):
            return
        assert not delivery.writing
        self.reported = True
        # It is not written to any more.
        delivery.give_up()
        for layer in LAYERS:
            for position in range(self.total - self.wanted, self.total):
                assert self.theirs[layer, position] == position

    def teardown(self) -> None:
        """Whatever happened, what is left gets there unless a write failed."""
        delivery: Delivery | None = getattr(self, "delivery", None)
        if delivery is None or delivery.failed:
            return
        while self.unsaved:
            self.layer()
        while self.up_to < self.total:
            self.chunk(2)
            while self.unsaved:
                self.layer()
        while self.posted:
            self.loop()
        if self.write is not None:
            self.end(False)
        while not delivery.done(self.computed):
            self.start(False)
            self.end(False)
        self.complete_is_right()


TestPushing = Pushing.TestCase
TestPushing.settings = settings(max_examples=300, stateful_step_count=40)


class _Request:
    def __init__(self, prompt: int, max_tokens: int = 1) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = "r", prompt, max_tokens
        self.num_computed_tokens = self.num_preemptions = 0


class _Output:
    def __init__(self, tokens: int, blocks: list[int], preempted: Collection[str] = ()) -> None:
        self.preempted_req_ids: Collection[str] | None = preempted
        self.num_scheduled_tokens = {"r": tokens} if tokens else {}
        self.kv_connector_block_state: BlockTable | None = self
        self._blocks = blocks

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        return (self._blocks, [-block for block in self._blocks])


def test_a_prompt_in_three_chunks_with_a_hit_and_a_preemption() -> None:
    tracker, request = ChunkTracker(16, 0, CheckSettings(blocks=1), random.Random(1)), _Request(100)
    request.num_computed_tokens = 32
    tracker.follow(request, "t")
    (first,) = tracker.step(_Output(20, [1, 2, 3, 4]))
    assert (first.new_blocks, first.up_to, first.total, first.restarted) == ((1, 2, 3, 4), 3, 7, False)
    request.num_computed_tokens = 52
    assert not list(tracker.step(_Output(0, [])))
    assert tracker.preempted(_Output(0, [], ["r", "another"])) == {"t"}
    request.num_preemptions, request.num_computed_tokens = 1, 16
    tracker.follow(request, "t")
    (again,) = tracker.step(_Output(64, [1, 9, 8, 7, 6]))
    assert (again.new_blocks, again.up_to, again.restarted) == ((1, 9, 8, 7, 6), 5, True)
    request.num_computed_tokens = 80
    (last,) = tracker.step(_Output(20, [1, 9, 8, 7, 6, 5, 4]))
    assert (last.new_blocks, last.up_to, last.restarted) == ((5, 4), 7, False)
    assert (again.check, last.check) == ((), ((1, 4),)), (
        "the last chunk names blocks to check, the prompt's last one at least"
    )
    request.num_computed_tokens = 100
    assert not list(tracker.step(_Output(1, [1, 9, 8, 7, 6, 5, 4, 3]))), "decoding is not sent"
    tracker.forget("r")
    assert len(tracker) == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "check"),
    [
        (100, 1, ((1, 7),)),
        (100, 2, ((2, 6),)),
        (112, 2, ((1, 7),)),
        (10, 1, ((1, 1),)),
        (10, 2, ()),
        (16, 2, ((1, 1),)),
    ],
)
def test_a_block_that_later_tokens_change_is_not_checked(
    prompt: int, max_tokens: int, check: tuple[tuple[int, int], ...]
) -> None:
    """The sender's own request may generate: the KV of its tokens gets into the prompt's last block where that is not full."""
    tracker = ChunkTracker(16, 0, CheckSettings(blocks=1), random.Random(1))
    tracker.follow(_Request(prompt, max_tokens), "t")
    (chunk,) = tracker.step(_Output(prompt, [1, 2, 3, 4, 5, 6, 7]))
    assert chunk.check == check


def test_blocks_are_those_of_the_group_that_is_transferred() -> None:
    """A model may have a further group of blocks that stay on their engine, before or after this one."""
    tracker = ChunkTracker(16, 1, CheckSettings(blocks=1), random.Random(1))
    tracker.follow(_Request(48), "t")
    (chunk,) = tracker.step(_Output(48, [1, 2, 3]))
    assert (chunk.new_blocks, chunk.check) == ((-1, -2, -3), ((1, -3),))
