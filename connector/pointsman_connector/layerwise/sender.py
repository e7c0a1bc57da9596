"""The side of the engine that computes a prompt: tracks what is computed for which receivers; `pusher` writes.

All state belongs to the thread of the sender's event loop. The engine's thread only posts to this loop: a step's chunks, then
each layer's name. Blocks that were not pushed, or whose push failed, are written by vLLM's own transfer, unchanged, when the
prompt is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import zmq.asyncio
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SendBlockMeta,
    TransferRegion,
    _validate_asymmetric_region_lengths,
)
from vllm.logger import init_logger

from pointsman_connector.layerwise.chunks import Chunk
from pointsman_connector.layerwise.fence import Fence, marker
from pointsman_connector.layerwise.progress import ComputedBlocks, Delivery
from pointsman_connector.layerwise.pusher import LEAST_WRITE_BYTES, LayerwisePusher
from pointsman_connector.layerwise.sleeping_writes import WRITE_S
from pointsman_connector.layerwise.support import unsupported_receiver
from pointsman_connector.layerwise.transfer import Receiver, Transfer, session_of

logger = init_logger(__name__)

# Share of the abort timeout after which no push is started. The receiver gets an error after the abort timeout, and no write may
# be in progress then.
LAST_WRITE_SHARE = 0.9

Params = tuple[list[int], list[int], list[int], list[str], str | None]


class LayerwiseSender(LayerwisePusher):
    """MooncakeConnectorWorker that starts to send before the prompt is computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._transfers: dict[str, Transfer] = {}
        self._transfer_of: dict[str, str] = {}
        self._step: list[tuple[Transfer, Chunk]] = []
        self._steps_layers = False
        self._done_sending: set[str] = set()
        self._may_free: set[str] = set()
        # By conversation, the time after which its receivers may have timed out: s of the event loop's clock, which continues
        # while the process is stopped.
        self._deadline_of: dict[asyncio.Task[Any] | None, float] = {}
        # A blocking event lets the thread that waits for it sleep.
        self._mark = marker(partial(torch.cuda.Event, blocking=True) if torch.cuda.is_available() else None)
        super().__init__(*args, **kwargs)

    # ---- called by the engine's thread ----

    def begin_step(self, chunks: Sequence[Chunk], overwritten: Collection[str]) -> None:
        """Start a step that computes `chunks`. The step may overwrite the blocks of the transfers `overwritten`.

        Data that is read from these blocks from now on is invalid. A write that ends later must see this at once, so the ids are
        added here and not in the event loop.
        """
        self._overwritten.update(overwritten)
        if chunks or self._steps_layers:
            self._steps_layers = bool(chunks)
            self.sender_loop.call_soon_threadsafe(self._begin, chunks)

    def save_layer(self, layer: str) -> None:
        """Handle that the step has written `layer`'s KV, or has queued the write on its stream."""
        if self._steps_layers:
            self.sender_loop.call_soon_threadsafe(self._saved, layer, self._mark())

    # ---- the prompt's side ----

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        self._step = []
        for chunk in chunks:
            transfer = self._transfers.setdefault(chunk.transfer_id, Transfer(chunk.transfer_id))
            if transfer.computed is None:
                transfer.request_id = chunk.request_id
                self._transfer_of[chunk.request_id] = chunk.transfer_id
                transfer.computed = ComputedBlocks(chunk.total, set(self.registered_layer_names))
            if chunk.restarted and (waiting := self.reqs_need_send.get(chunk.transfer_id)) is not None:
                transfer.announced = False
                waiting.ready.clear()
            transfer.computed.begin_chunk(chunk.new_blocks, restarted=chunk.restarted)
            self._step.append((transfer, chunk))

    def _saved(self, layer: str, fence: Fence | None) -> None:
        for transfer, chunk in self._step:
            computed = transfer.computed
            assert computed is not None
            computed.layer_saved(layer, chunk.up_to)
            transfer.fence = fence
            for receiver in transfer.receivers.values():
                self._push_on(transfer, receiver)
            if computed.complete and not transfer.announced and transfer.aborted_at is None:
                self._announce(transfer, computed)

    def _announce(self, transfer: Transfer, computed: ComputedBlocks) -> None:
        """Serve the receivers from now on: the whole prompt is computed. The scheduler knows this one step later."""
        transfer.announced = True
        waiting = self.reqs_need_send.get(transfer.transfer_id)
        if waiting is None:
            waiting = SendBlockMeta(transfer.request_id, transfer.transfer_id, [], asyncio.Event())
            self.reqs_need_send[transfer.transfer_id] = waiting
        waiting.p_req_id = transfer.request_id
        waiting.local_block_ids = [list(computed.blocks)]
        waiting.ready.set()

    # ---- the receivers' side ----

    async def _sender_worker(self, sock: zmq.asyncio.Socket) -> None:
        # Upstream serves at most 20 messages at a time. Here most messages wait for a prompt that is still computed, so each one
        # has its own task.
        while True:
            identity, message = await self.sender_worker_queue.get()
            self.sender_worker_queue.task_done()
            self._spawn(self._serve(identity, sock, message))

    async def _serve(self, identity: bytes, sock: zmq.asyncio.Socket, message: bytes) -> None:
        conversation = asyncio.current_task()
        self._deadline_of[conversation] = self._last_write_deadline()
        try:
            meta = self._xfer_meta_decoder.decode(message)
            self._start_pushing(meta)
            await self.send_kv_to_decode(identity, sock, meta)
            self._drop_answered_receivers(meta)
        except Exception as error:
            logger.exception("Could not serve a receiver of KV")
            refusal = MooncakeXferResponse(status=MooncakeXferResponseStatus.ERROR, err_msg=str(error))
            await sock.send_multipart((identity, self._encoder.encode(refusal)))
        finally:
            del self._deadline_of[conversation]

    def _last_write_deadline(self) -> float:
        """Return the time after which no write may start to receivers that sent a message now. They wait one write timeout
        longer."""
        return self.sender_loop.time() + envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + WRITE_S

    def _start_pushing(self, meta: MooncakeXferMetadata) -> None:
        """Start to push to receivers whose prompt is still computed. Upstream rejects the receivers that do not fit."""
        local, remote, error = self._prepare_transfer_regions(meta)
        if error is not None or not self._fits(meta, local, remote):
            return
        for request_id, (transfer_id, groups) in meta.req_blocks.items():
            transfer = self._transfers.setdefault(transfer_id, Transfer(transfer_id))
            if transfer.announced or transfer.aborted_at is not None or len(groups) != 1 or not groups[0]:
                continue
            delivery = Delivery(
                [self._layers_in(region) for region in local],
                len(groups[0]),
                [region.kv_block_len for region in local],
                LEAST_WRITE_BYTES,
            )
            receiver = Receiver(
                delivery,
                request_id,
                meta,
                list(groups[0]),
                local,
                remote,
                self.sender_loop.call_later(
                    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT * LAST_WRITE_SHARE, delivery.give_up
                ),
            )
            receiver.idle.set()
            transfer.receivers[(receiver.session, request_id)] = receiver
            self._push_on(transfer, receiver)

    def _fits(self, meta: MooncakeXferMetadata, local: list[TransferRegion], remote: list[TransferRegion]) -> bool:
        """Return whether to push to this receiver: only if upstream will serve it, too. Nothing may be written to a receiver that
        upstream rejects."""
        if reason := unsupported_receiver(meta, tp_size=self.tp_size, pp_size=self.pp_size):
            logger.warning_once("KV for %s is sent after the prefill: %s", meta.remote_hostname, reason)
            return False
        heads = None if self.use_mla or self.kv_cache_config.has_mamba_layers else self.transfer_topo.total_num_kv_heads
        return (
            meta.remote_tp_rank in self.transfer_topo.handshake_target_ranks(meta.remote_tp_size)
            and _validate_asymmetric_region_lengths(
                local_regions=local,
                remote_regions=remote,
                local_tp_size=self.tp_size,
                remote_tp_size=meta.remote_tp_size,
                producer_cache_replicated=self._producer_cache_is_replicated(),
                total_num_kv_heads=heads,
            )
            is None
        )

    async def _build_transfer_params(
        self,
        ready_reqs: list[tuple[str, SendBlockMeta]],
        agent_meta: MooncakeXferMetadata,
        local_regions: list[TransferRegion],
        remote_regions: list[TransferRegion],
    ) -> Params:
        """Return the writes that remain for receivers whose prompt is computed: none for receivers that have all of it."""
        session = session_of(agent_meta)
        rest, never, late = [], [], []
        for request_id, send_meta in ready_reqs:
            transfer = self._transfers.get(send_meta.transfer_id)
            receiver = transfer.receivers.get((session, request_id)) if transfer is not None else None
            computed = transfer.computed if transfer is not None else None
            if receiver is not None:
                # After the answer the receiver may reuse these blocks, so no write may be in progress.
                await receiver.idle.wait()
            if receiver is not None and computed is not None and receiver.delivery.done(computed):
                continue
            if transfer is not None and any(agent_meta.req_blocks[request_id][1]):
                # Only the scheduler can confirm that the blocks are not reused until they are sent.
                await transfer.scheduler_confirmed.wait()
                if transfer.aborted_at is not None:
                    never.append(request_id)
                    continue
            if self.sender_loop.time() > self._deadline_of[asyncio.current_task()]:
                late.append(request_id)
                continue
            rest.append((request_id, send_meta))
            if receiver is not None:
                self.xfer_stats.record_fallback()
        src, dst, lengths, errors, message = await super()._build_transfer_params(
            rest, agent_meta, local_regions, remote_regions
        )
        self._deadline_of[asyncio.current_task()] = self._last_write_deadline()
        if never or late:
            reason = "the prefill was aborted" if never else "the receiver may have timed out"
            return src, dst, lengths, [*errors, *never, *late], message or reason
        return src, dst, lengths, errors, message

    def _drop_answered_receivers(self, meta: MooncakeXferMetadata) -> None:
        """Drop the state of the receivers of `meta`, which have been answered."""
        session = session_of(meta)
        for request_id, (transfer_id, _) in meta.req_blocks.items():
            transfer, waiting = self._transfers.get(transfer_id), self.reqs_need_send.get(transfer_id)
            if transfer is not None and (receiver := transfer.receivers.pop((session, request_id), None)) is not None:
                receiver.last_write.cancel()
            if waiting is None:
                self._delivered(transfer)
            elif waiting.ready.is_set() and not waiting.sending and waiting.need_send <= 1:
                # The only receiver could not be served and will not retry, so the blocks need not be kept.
                del self.reqs_need_send[transfer_id]
                if transfer is None or transfer.aborted_at is None:
                    self.finished_sending_reqs.add(waiting.p_req_id)
                self._delivered(transfer)
            elif not waiting.p_req_id and (transfer is None or transfer.computed is None):
                # The prompt's request never arrived at this engine.
                del self.reqs_need_send[transfer_id]
                self._transfers.pop(transfer_id, None)

    def _delivered(self, transfer: Transfer | None) -> None:
        if transfer is None:
            return
        transfer.delivered = True
        if transfer.aborted_at is not None or transfer.request_id in self._may_free:
            self._forget(transfer.transfer_id)

    # ---- the scheduler's side ----

    async def record_send_reqs(self, metadata: MooncakeConnectorMetadata) -> None:
        """Handle the scheduler's message about requests that started, ended, or will never be sent."""
        known = MooncakeConnectorMetadata()
        for request_id, (transfer_id, blocks) in metadata.reqs_to_send.items():
            transfer = self._transfers.get(transfer_id)
            if blocks:
                self._may_free.add(request_id)
                if transfer is not None:
                    transfer.scheduler_confirmed.set()
            if transfer is not None and transfer.announced:
                if transfer_id not in self.reqs_need_send:
                    # The receivers were served before the scheduler's message arrived.
                    self._delivered(transfer)
                    continue
                if not blocks:
                    continue
            elif blocks and transfer is not None:
                # The computation of a layer was not reported, so upstream serves the receivers now.
                transfer.announced = True
            known.reqs_to_send[request_id] = (transfer_id, blocks)
        await super().record_send_reqs(known)
        for transfer_id in metadata.reqs_not_processed:
            self._abort(transfer_id)
            self._overwritten.discard(transfer_id)

    def _abort(self, transfer_id: str) -> None:
        """Abort a prompt that will never be complete: its receivers get an error, now or when they arrive."""
        transfer = self._transfers.setdefault(transfer_id, Transfer(transfer_id))
        transfer.scheduler_confirmed.set()
        if transfer.delivered or (transfer.announced and transfer_id not in self.reqs_need_send):
            self._forget(transfer_id)
            return
        transfer.aborted_at = time.monotonic()
        for receiver in transfer.receivers.values():
            receiver.delivery.give_up()
        waiting = self.reqs_need_send.get(transfer_id)
        if waiting is None:
            waiting = SendBlockMeta("", transfer_id, [], asyncio.Event())
            self.reqs_need_send[transfer_id] = waiting
        waiting.p_req_id = ""
        waiting.ready.set()

    async def fetch_finished_sending_reqs(self) -> set[str]:
        """Return the requests whose blocks the scheduler may free: sent or aborted here, and finished in the scheduler, too."""
        self._done_sending |= await super().fetch_finished_sending_reqs()
        freed = self._done_sending & self._may_free
        # The scheduler itself has freed requests that were aborted after they were sent.
        self._done_sending &= self._transfer_of.keys() - freed
        self._may_free -= freed
        for request_id in freed:
            self._forget(self._transfer_of.get(request_id, ""))
        self._reap()
        return freed

    def _reap(self) -> None:
        """Drop aborted prompts whose receiver did not arrive within the abort timeout."""
        oldest = time.monotonic() - envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        late = [
            one.transfer_id
            for one in self._transfers.values()
            if one.aborted_at is not None and one.aborted_at < oldest
        ]
        for transfer_id in late:
            self.reqs_need_send.pop(transfer_id, None)
            self._forget(transfer_id)

    def _forget(self, transfer_id: str) -> None:
        if (transfer := self._transfers.pop(transfer_id, None)) is not None:
            self._transfer_of.pop(transfer.request_id, None)
