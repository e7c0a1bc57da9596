"""How far a prompt's KV is computed, layer by layer, and how far each receiver has it. Pure: no torch, no vLLM, no clock.

Positions are counts of leading blocks of the prompt: "5" means that blocks 0..4 are there. A prefill computes a prompt in chunks;
within a chunk the layers finish one after the other, so for a while the early layers are one chunk ahead of the late ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Blocks `first`..`end - 1` of one region, to be written now."""

    region: int
    first: int
    end: int


@dataclass(frozen=True)
class Batch:
    """Spans that go in one write. `epoch` is that of the computation that they were read from."""

    spans: tuple[Span, ...]
    epoch: int


class ComputedBlocks:
    """The sender's side of one prompt: which blocks the engine has, and how many of them each layer has computed.

    `total` is the number of blocks of the whole prompt. `layers` are the names of all layers that will be saved.
    """

    def __init__(self, total: int, layers: Collection[str]) -> None:
        self.total = total
        self.epoch = 0
        self.blocks: list[int] = []
        self._computed = dict.fromkeys(layers, 0)

    def begin_chunk(self, new_blocks: Sequence[int], *, restarted: bool) -> None:
        """A chunk starts. After a preemption (`restarted`) the prompt begins anew in other blocks."""
        if restarted:
            self.epoch += 1
            self.blocks.clear()
            self._computed = dict.fromkeys(self._computed, 0)
        self.blocks.extend(new_blocks)

    def layer_saved(self, layer: str, up_to: int) -> None:
        """`layer` now holds the KV of the first `up_to` blocks. Layers that are not ours are ignored."""
        if layer in self._computed:
            self._computed[layer] = max(self._computed[layer], min(up_to, self.total))

    def of(self, layers: Collection[str]) -> int:
        """How many leading blocks all of `layers` have."""
        return min(self._computed[layer] for layer in layers)

    @property
    def complete(self) -> bool:
        """Every layer has the whole prompt."""
        return all(up_to == self.total for up_to in self._computed.values())


@dataclass
class Delivery:
    """One receiver of a prompt: what it has of each region, and whether a write to it is under way.

    `regions[i]` names the layers that region i holds, of which a block takes `block_bytes[i]`. `wanted` is how many of the
    prompt's last blocks the receiver lacks; it has the others in its own cache. One write at a time: a later one may overwrite
    what an earlier one wrote, never the reverse. Writes of fewer than `least_bytes` wait for more, until all is computed.
    """

    regions: Sequence[Collection[str]]
    wanted: int
    block_bytes: Sequence[int]
    least_bytes: int
    writing: bool = False
    failed: bool = False
    _sent: list[int] = field(default_factory=list)
    _epoch: int = 0

    def next_batch(self, computed: ComputedBlocks) -> Batch | None:
        """Everything that can be written now, as one batch; None when there is nothing, or a write is under way, or failed."""
        if self.writing or self.failed:
            return None
        spans = self._missing(computed)
        if not spans or (not computed.complete and self._bytes(spans) < self.least_bytes):
            return None
        self.writing = True
        return Batch(tuple(spans), computed.epoch)

    def write_finished(self, batch: Batch) -> None:
        """`batch` is written. What was read before a restart does not count."""
        self.writing = False
        if batch.epoch == self._epoch:
            for span in batch.spans:
                self._sent[span.region] = span.end

    def write_failed(self) -> None:
        """The write under way failed: nothing that was pushed counts any more."""
        self.writing = False
        self.failed = True

    def give_up(self) -> None:
        """No further writes."""
        self.failed = True

    def done(self, computed: ComputedBlocks) -> bool:
        """The receiver has all that it wanted."""
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
    """How many leading blocks may be sent when `tokens` of a prompt are computed: full ones, and at its end the last one, too."""
    if tokens >= prompt_tokens:
        return -(-prompt_tokens // block_size)
    return tokens // block_size
