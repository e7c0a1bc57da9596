"""Checksums of KV cache blocks over all layers, computed on the device that holds the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

_SEED = 0x9E3779B9


class Region(NamedTuple):
    """Memory of one layer's KV, or a part of it: block i is the `length` bytes at `address + i * stride`."""

    address: int
    stride: int
    length: int


class BlockSums:
    """Sums blocks of a KV cache that was registered as `regions`; both ends of a transfer must have the same lengths.

    The checksum of a block is the sum of its 32-bit words over all regions, each multiplied by an odd weight that depends on its
    place, modulo 2**64. A word that differs, or words that have changed places, change the sum except by coincidence (about
    2**-32). Integer sums do not depend on the order of addition, so that two devices agree.
    """

    def __init__(self, caches: Iterable[torch.Tensor], regions: Sequence[Region], rows_per_block: int = 1) -> None:
        """`caches`: tensors whose storages contain the regions. `rows_per_block`: rows of a region that make one of the
        scheduler's blocks. Raises ValueError if a region is in no storage."""
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
        self._rows_per_block = rows_per_block
        # Views of equal width are summed together: one kernel for all layers instead of one for each.
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._device = torch.device("cpu")
        for region in regions:
            view = _rows(region, storages)
            self._views.setdefault((view.shape[1], view.dtype), []).append(view)
            self._device = view.device
        self._stream: torch.cuda.Stream | None = None
        self._weights = {key: self._weights_of(key[0] * rows_per_block) for key in self._views}

    def of(self, blocks: Sequence[int]) -> torch.Tensor:
        """Checksums of `blocks`, int64 [len(blocks)], on the cache's device; enqueued on the current stream."""
        rows = [block * self._rows_per_block + row for block in blocks for row in range(self._rows_per_block)]
        # A copy from pageable memory would wait for all work of the stream. torch keeps freed pinned memory until the stream has
        # passed the copies from it.
        pinned = self._device.type != "cpu"
        index = torch.tensor(rows, dtype=torch.int64, pin_memory=pinned).to(self._device, non_blocking=True)
        total = torch.zeros(len(blocks), dtype=torch.int64, device=self._device)
        for key, views in self._views.items():
            picked = torch.stack([view.index_select(0, index) for view in views]).to(torch.int32)
            sums = (picked.view(len(views), len(blocks), -1) * self._weights[key]).sum(-1, dtype=torch.int64)
            # Two regions whose contents were exchanged must not cancel out.
            place = 2 * torch.arange(len(views), dtype=torch.int64, device=self._device) + 1
            total = total * 31 + (sums * place[:, None]).sum(0)
        return total

    def enqueue(self, blocks: Sequence[int]) -> torch.Tensor:
        """As `of`, but in the host's memory: filled in when the current stream has reached this point."""
        sums = self.of(blocks)
        if sums.device.type == "cpu":
            return sums
        return torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)

    def now(self, blocks: Sequence[int]) -> list[int]:
        """As `of`, as numbers. On an accelerator in a stream of its own, so that it does not wait for what the engine has queued;
        the calling thread sleeps meanwhile."""
        if self._device.type == "cpu":
            return self.of(blocks).tolist()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            sums = self.enqueue(blocks)
            there = torch.cuda.Event(blocking=True)
            there.record()
        there.synchronize()
        return sums.tolist()

    def _weights_of(self, words: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.randint(-(2**31), 2**31, (words,), generator=generator, dtype=torch.int64)
        return (drawn | 1).to(torch.int32).to(self._device)


def _rows(region: Region, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A [blocks, words] view of a region."""
    for start, storage in storages.items():
        offset = region.address - start
        if offset >= 0 and offset + region.length <= storage.nbytes():
            break
    else:
        raise ValueError(f"no KV cache tensor contains the region at {region.address:#x}")
    aligned = all(value % 4 == 0 for value in (offset, region.stride, region.length, storage.nbytes()))
    dtype, size = (torch.int32, 4) if aligned else (torch.uint8, 1)
    whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
    rows = (storage.nbytes() - offset - region.length) // region.stride + 1
    return torch.as_strided(
        whole, (rows, region.length // size), (region.stride // size, 1), storage_offset=offset // size
    )
