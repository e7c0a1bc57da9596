"""Progress of a prompt's KV: what is computed, layer by layer, and what each receiver has. Pure: no torch, no vLLM, no clock.

Positions are counts of leading blocks of the prompt: "5" means blocks 0..4. A prefill computes a prompt in chunks. Within a chunk
the layers finish one after the other, so early layers can be one chunk ahead of late ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Blocks `first`..`end - 1` of one region, which can be written."""

    region: int
    first: int
    end: int


@dataclass(frozen=True)
class Batch:
    """Spans of one write. `epoch` is the epoch of the computation that they are read from."""

    spans: tuple[Span, ...]
    epoch: int


class ComputedBlocks:
    """The sender's side of one prompt: the engine's blocks of it, and how many of them each layer has computed.

    `total` is the number of blocks of the whole prompt. `layers` are the names of all layers that will be saved. `epoch` counts
    the restarts of the computation.
    """

    def __init__(self, total: int, layers: Collection[str]) -> None:
        self.total = total
        self.epoch = 0
        self.blocks: list[int] = []
        self._computed = dict.fromkeys(layers, 0)

    def begin_chunk(self, new_blocks: Sequence[int], *, restarted: bool) -> None:
        """Add the blocks of a chunk that starts. After a preemption (`restarted`) the prompt starts over in new blocks.
        Mutates."""
        if restarted:
            self.restart()
        self.blocks.extend(new_blocks)

    def restart(self) -> None:
        """The prompt has lost its blocks: nothing is computed, and what was read from them belongs to an old epoch."""
        self.epoch += 1
        self.blocks.clear()
        self._computed = dict.fromkeys(self._computed, 0)

    def layer_saved(self, layer: str, up_to: int) -> None:
        """Record that `layer` has the KV of the first `up_to` blocks. Unknown layers are ignored. Mutates."""
        if layer in self._computed:
            self._computed[layer] = max(self._computed[layer], min(up_to, self.total))

    def of(self, layers: Collection[str]) -> int:
        """Return the number of leading blocks that all of `layers` have."""
        return min(self._computed[layer] for layer in layers)

    @property
    def complete(self) -> bool:
        """Whether every layer has the whole prompt."""
        return all(up_to == self.total for up_to in self._computed.values())


@dataclass
class Delivery:
    """One receiver of a prompt: which blocks of each region it has."""

    regions: Sequence[Collection[str]]  # the layers of each region
    wanted: int  # number of the prompt's last blocks that the receiver needs; it has the others in its own cache
    block_bytes: Sequence[int]  # size of a block in each region
    least_bytes: int  # a write of fewer waits for more blocks, until all is computed
    writing: bool = False  # There is one write at a time, so that an earlier write never overwrites a later one.
    failed: bool = False  # a write failed, or it was given up: nothing more is written
    _sent: list[int] = field(default_factory=list)
    _epoch: int = 0

    def next_batch(self, computed: ComputedBlocks) -> Batch | None:
        """Return all spans that can be written now, as one batch, and mark a write as in progress. None if there is nothing to
        write yet, a write is in progress, or a write failed. Mutates."""
        if self.writing or self.failed:
            return None
        spans = self._missing(computed)
        if not spans or (not computed.complete and self._bytes(spans) < self.least_bytes):
            return None
        self.writing = True
        return Batch(tuple(spans), computed.epoch)

    def write_finished(self, batch: Batch) -> None:
        """Record that `batch` is written. A batch that was read before a restart does not count. Mutates."""
        self.writing = False
        if batch.epoch == self._epoch:
            for span in batch.spans:
                self._sent[span.region] = span.end

    def write_discarded(self) -> None:
        """The write under way landed, but what it read may have been overwritten: it does not count."""
        self.writing = False

    def write_failed(self) -> None:
        """Record that the write in progress failed. The whole delivery then counts as failed. Mutates."""
        self.writing = False
        self.failed = True

    def give_up(self) -> None:
        """Mark the delivery as failed, so that there are no further writes. Mutates."""
        self.failed = True

    def done(self, computed: ComputedBlocks) -> bool:
        """Return whether the receiver has all blocks that it needs."""
        return not self.failed and computed.complete and not self._missing(computed)

    def _bytes(self, spans: Sequence[Span]) -> int:
        return sum((span.end - span.first) * self.block_bytes[span.region] for span in spans)

    def _missing(self, computed: ComputedBlocks) -> list[Span]:
        if self._epoch != computed.epoch or not self._sent:
            self._epoch = computed.epoch
            self._sent = [computed.total - self.wanted] * len(self.regions)
        found = []
        for index, layers in enumerate(self.regions):
            end = computed.of(layers)
            if end > self._sent[index]:
                found.append(Span(index, self._sent[index], end))
        return found


def blocks_of(tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Return the number of leading blocks that may be sent when `tokens` of a prompt are computed: the full blocks, and at the
    prompt's end also the last, partial one."""
    if tokens >= prompt_tokens:
        return -(-prompt_tokens // block_size)
    return tokens // block_size
