"""Writes computed layers to a receiver's memory, one write at a time for each receiver.

All state belongs to the thread of the sender's event loop. A thread of the executor waits for a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    SendBlockMeta,
    TransferRegion,
)
from vllm.logger import init_logger

from pointsman_connector.layerwise.overwrites import OverwriteMarks
from pointsman_connector.layerwise.progress import Batch, ComputedBlocks
from pointsman_connector.layerwise.sleeping_writes import SleepingTransferEngine, Sources
from pointsman_connector.layerwise.stats import LayerwiseStats
from pointsman_connector.layerwise.transfer import Receiver, Transfer

logger = init_logger(__name__)

# Minimum size of a write before the whole prompt is computed, bytes. Many small writes cost more than their bytes.
LEAST_WRITE_BYTES = 1 << 20


class LayerwisePusher(MooncakeConnectorWorker):
    """MooncakeConnectorWorker that can write a part of a prompt's layers and blocks. Threads sleep while they wait for a write,
    also for upstream's own writes after the prefill."""

    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._overwritten = OverwriteMarks()
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(*args, **kwargs)
        self.engine = SleepingTransferEngine(self.engine)
        self.xfer_stats = LayerwiseStats()

    def _layers_in(self, region: TransferRegion) -> Collection[str]:
        """Return the layers whose memory is in `region`. Upstream joins adjacent layers into one region."""
        start, end = region.base_addr, region.base_addr + region.kv_block_len
        views = zip(self.registered_layer_names, self.kv_caches_base_addr, self.kv_block_len_per_layer, strict=True)
        inside = {name for name, base, length in views if start <= base and base + length <= end}
        return inside | {region.layer_name}

    def _push_on(self, transfer: Transfer, receiver: Receiver) -> None:
        if transfer.computed is not None and (batch := receiver.delivery.next_batch(transfer.computed)) is not None:
            receiver.idle.clear()
            self._spawn(self._push(transfer, transfer.computed, receiver, batch))

    async def _push(self, transfer: Transfer, computed: ComputedBlocks, receiver: Receiver, first: Batch) -> None:
        """Write `first`, then everything that became ready meanwhile, each time in one batch."""
        batch: Batch | None = first
        try:
            while batch is not None:
                src, dst, lengths = await self._pointers(transfer, computed, receiver, batch)
                status = 0
                if src:
                    status = await self.sender_loop.run_in_executor(
                        self._sender_executor,
                        partial(self._write, receiver.last_write.when()),
                        receiver.session,
                        src,
                        dst,
                        lengths,
                    )
                if status != 0:
                    receiver.delivery.write_failed()
                    return
                if transfer.transfer_id in self._overwritten:
                    # What was read may be another prompt's. The loop will hear of it, and restart or give up this transfer.
                    receiver.delivery.write_discarded()
                    return
                receiver.delivery.write_finished(batch)
                self.xfer_stats.record_push(len(batch.spans))
                batch = receiver.delivery.next_batch(computed)
        except BaseException:
            receiver.delivery.write_failed()
            raise
        finally:
            receiver.idle.set()

    def _write(self, latest: float, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        return self._send_blocks(session, Sources(src, latest), dst, lengths)

    async def _pointers(
        self, transfer: Transfer, computed: ComputedBlocks, receiver: Receiver, batch: Batch
    ) -> tuple[list[int], list[int], list[int]]:
        """Return source addresses, target addresses and lengths of a batch. Upstream's own method computes them, called with only
        the batch's regions and blocks."""
        src: list[int] = []
        dst: list[int] = []
        lengths: list[int] = []
        skipped = computed.total - receiver.delivery.wanted
        for first, end in {(span.first, span.end) for span in batch.spans}:
            regions = [span.region for span in batch.spans if (span.first, span.end) == (first, end)]
            part = SendBlockMeta(
                transfer.request_id, transfer.transfer_id, [computed.blocks[first:end]], asyncio.Event()
            )
            theirs = [receiver.blocks[first - skipped : end - skipped]]
            params = await super()._build_transfer_params(
                [(receiver.request_id, part)],
                msgspec.structs.replace(
                    receiver.meta, req_blocks={receiver.request_id: (transfer.transfer_id, theirs)}
                ),
                [receiver.local_regions[index] for index in regions],
                [receiver.remote_regions[index] for index in regions],
            )
            if params[3]:
                raise RuntimeError(f"cannot push to {receiver.session}: {params[4]}")
            src += params[0]
            dst += params[1]
            lengths += params[2]
        return src, dst, lengths

    def _spawn(self, work: Any) -> None:
        task = self.sender_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Layer-wise push: %s", error, exc_info=error)
