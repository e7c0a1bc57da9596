"""The engine that computes a prompt: follows what is computed, for whom, and what has become of it; `pusher` writes.

All state belongs to the sender loop's thread. The engine's thread only posts to it: a step's chunks, then each layer's name.
Whatever was not pushed, or failed, is written by vLLM's own transfer when the prompt is done: that path is used unchanged.
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

# The receiver is told that it waited in vain after the abort timeout; no write may still be under way then.
LAST_WRITE_SHARE = 0.9

Params = tuple[list[int], list[int], list[int], list[str], str | None]


class LayerwiseSender(LayerwisePusher):
    """MooncakeConnectorWorker that begins to send before the prompt is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._transfers: dict[str, Transfer] = {}
        self._transfer_of: dict[str, str] = {}
        self._step: list[tuple[Transfer, Chunk]] = []
        self._steps_layers = False
        self._done_sending: set[str] = set()
        self._may_free: set[str] = set()
        # When a conversation's receivers may have given up: seconds of the loop's clock, which runs on in a stopped process.
        self._deadline_of: dict[asyncio.Task[Any] | None, float] = {}
        # A blocking event lets the thread that waits for it sleep.
        self._mark = marker(partial(torch.cuda.Event, blocking=True) if torch.cuda.is_available() else None)
        super().__init__(*args, **kwargs)

    # ---- called by the engine's thread ----

    def begin_step(self, chunks: Sequence[Chunk], overwritten: Collection[str]) -> None:
        """A step is about to compute `chunks`. The blocks of the transfers `overwritten` may be overwritten by it: what is read
        of them from here on counts for nothing, and a write that ends later must see that at once, not when the loop hears of
        it."""
        self._overwritten.update(overwritten)
        if chunks or self._steps_layers:
            self._steps_layers = bool(chunks)
            self.sender_loop.call_soon_threadsafe(self._begin, chunks)

    def save_layer(self, layer: str) -> None:
        """The step has written `layer`'s KV, or has told its stream to."""
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
        """The whole prompt is computed: receivers are served from now on, one step before the scheduler knows its end."""
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
        # Upstream serves at most 20 messages at a time. Here most of them wait for a prompt that is still computed: a task each.
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
        """When receivers of whom was heard now must not be written to any more. They wait for one write longer."""
        return self.sender_loop.time() + envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + WRITE_S

    def _start_pushing(self, meta: MooncakeXferMetadata) -> None:
        """Start to push to the receivers that come while their prompt is computed. Upstream refuses those that do not fit."""
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
        """Whether upstream will serve this receiver, too: nothing may be written to one that it refuses."""
        if reason := unsupported_receiver(meta, tp_size=self.tp_size, pp_size=self.pp_size):
            logger.warning_once("KV for %s goes after the prefill: %s", meta.remote_hostname, reason)
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
        """What is still to be written for receivers whose prompt is done: nothing for those who have it."""
        session = session_of(agent_meta)
        rest, never, late = [], [], []
        for request_id, send_meta in ready_reqs:
            transfer = self._transfers.get(send_meta.transfer_id)
            receiver = transfer.receivers.get((session, request_id)) if transfer is not None else None
            computed = transfer.computed if transfer is not None else None
            if receiver is not None:
                # The answer lets the receiver use these blocks for something else: no write may come after it.
                await receiver.idle.wait()
            if receiver is not None and computed is not None and receiver.delivery.done(computed):
                continue
            if transfer is not None and any(agent_meta.req_blocks[request_id][1]):
                # Only the scheduler can say that the blocks stay what they are until they are sent.
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
            reason = "the prefill was given up" if never else "the receiver has given up"
            return src, dst, lengths, [*errors, *never, *late], message or reason
        return src, dst, lengths, errors, message

    def _drop_answered_receivers(self, meta: MooncakeXferMetadata) -> None:
        """The receivers of `meta` have been answered: forget what was only kept for them."""
        session = session_of(meta)
        for request_id, (transfer_id, _) in meta.req_blocks.items():
            transfer, waiting = self._transfers.get(transfer_id), self.reqs_need_send.get(transfer_id)
            if transfer is not None and (receiver := transfer.receivers.pop((session, request_id), None)) is not None:
                receiver.last_write.cancel()
            if waiting is None:
                self._delivered(transfer)
            elif waiting.ready.is_set() and not waiting.sending and waiting.need_send <= 1:
                # Its only receiver could not be served and will not ask again: nothing is gained by keeping the blocks.
                del self.reqs_need_send[transfer_id]
                if transfer is None or transfer.aborted_at is None:
                    self.finished_sending_reqs.add(waiting.p_req_id)
                self._delivered(transfer)
            elif not waiting.p_req_id and (transfer is None or transfer.computed is None):
                # The prompt never came here.
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
        """The scheduler says which requests began, ended, or will never be sent."""
        known = MooncakeConnectorMetadata()
        for request_id, (transfer_id, blocks) in metadata.reqs_to_send.items():
            transfer = self._transfers.get(transfer_id)
            if blocks:
                self._may_free.add(request_id)
                if transfer is not None:
                    transfer.scheduler_confirmed.set()
            if transfer is not None and transfer.announced:
                if transfer_id not in self.reqs_need_send:
                    # Its receivers were served before the scheduler's word came here.
                    self._delivered(transfer)
                    continue
                if not blocks:
                    continue
            elif blocks and transfer is not None:
                # Some layer was never seen: upstream serves the receivers now.
                transfer.announced = True
            known.reqs_to_send[request_id] = (transfer_id, blocks)
        await super().record_send_reqs(known)
        for transfer_id in metadata.reqs_not_processed:
            self._abort(transfer_id)
            self._overwritten.discard(transfer_id)

    def _abort(self, transfer_id: str) -> None:
        """The prompt will never be complete: tell who waits for it, now or when it comes."""
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
        """Requests whose blocks the scheduler may free: sent or given up, and finished there, too."""
        self._done_sending |= await super().fetch_finished_sending_reqs()
        freed = self._done_sending & self._may_free
        # What was given up here after it was sent, the scheduler has freed by itself.
        self._done_sending &= self._transfer_of.keys() - freed
        self._may_free -= freed
        for request_id in freed:
            self._forget(self._transfer_of.get(request_id, ""))
        self._reap()
        return freed

    def _reap(self) -> None:
        """Prompts given up whose receiver never came."""
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
