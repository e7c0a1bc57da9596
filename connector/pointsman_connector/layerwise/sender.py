"""The side of the engine that computes a prompt: tracks what is computed for which receivers; `pusher` writes.

All state belongs to the thread of the sender's event loop. The engine's thread only posts to this loop: a step's chunks, then
each layer's name. Blocks that were not pushed, or whose push failed, are written by vLLM's own transfer, unchanged, when the
prompt is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
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

from pointsman_connector.layerwise.block_sums import BlockSums, Region
from pointsman_connector.layerwise.checked_response import AnswerEncoder
from pointsman_connector.layerwise.chunks import Chunk
from pointsman_connector.layerwise.event_waiter import Event, EventWaiter
from pointsman_connector.layerwise.kv_checks import Sums
from pointsman_connector.layerwise.progress import ComputedBlocks, Delivery
from pointsman_connector.layerwise.pusher import LEAST_WRITE_BYTES, LayerwisePusher
from pointsman_connector.layerwise.sleeping_writes import Sources, last_start_s
from pointsman_connector.layerwise.stream_events import StreamEvents
from pointsman_connector.layerwise.support import layers_without_region, unsupported_receiver
from pointsman_connector.layerwise.transfer import Receiver, Transfer, session_of

logger = init_logger(__name__)

# How long an answer waits for checksums: they come with the step that completes the prompt.
SUMS_S = 5.0

Params = tuple[list[int], list[int], list[int], list[str], str | None]


@dataclass
class _Conversation:
    """A receiver's message that is being served. `deadline`: the time after which the receiver may have timed out, s of the event
    loop's clock, which continues while the process is stopped. `wanted`: the transfers whose KV the message asks for; it may also
    name others, only to release their blocks. `sums`: by request, the checksums to send with the answer."""

    deadline: float
    session: str = ""
    wanted: frozenset[str] = frozenset()
    sums: dict[str, Sums] = field(default_factory=dict)


class LayerwiseSender(LayerwisePusher):
    """MooncakeConnectorWorker that starts to send before the prompt is computed."""

    _encoder: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._transfers: dict[str, Transfer] = {}
        self._transfer_of: dict[str, str] = {}
        self._step: list[tuple[Transfer, Chunk]] = []
        self._steps_layers = False
        self._done_sending: set[str] = set()
        self._may_free: set[str] = set()
        self._conversations: dict[asyncio.Task[Any] | None, _Conversation] = {}
        self._to_check: list[Chunk] = []
        self._block_sums: BlockSums | None = None
        # Why layers are not pushed during the prefill; empty if they are.
        self._push_off = ""
        self._events = EventWaiter(
            self._new_event(), self._event_failed, begin_thread=lambda: self._bind_sender_thread_device()
        )
        super().__init__(*args, **kwargs)
        self._encoder = AnswerEncoder(self._encoder, self._sums_of_conversation)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's KV cache with the transfer engine, and decide whether layers can be pushed."""
        super().register_kv_caches(kv_caches)
        if last_start_s(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT) <= 0:
            logger.warning("No KV is sent: MC_TRANSFER_TIMEOUT is too long for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")
        self._push_off = layers_without_region(
            (layer for layer in kv_caches if layer in self._layer_specs), self.registered_layer_names
        )
        if self._push_off:
            logger.warning("KV goes after the prefill, not layer by layer: %s", self._push_off)
        regions = zip(self.kv_caches_base_addr, self.block_len_per_layer, self.kv_block_len_per_layer, strict=True)
        self._block_sums = BlockSums(
            kv_caches.values(), [Region(*region) for region in regions], self._physical_blocks_per_logical_kv_block
        )
        # The first use of the kernels loads them, which would stop the engine's thread for half a second at the first prompt.
        try:
            self._block_sums.now([0])
        except Exception as error:
            logger.warning("Checksums of KV cannot be computed: %s", error)

    def _new_event(self) -> Callable[[], Event] | None:
        """Return a factory of events of the current stream; None if work is complete when it is launched (CPU). `support`
        excludes other devices."""
        return StreamEvents() if torch.cuda.is_available() else None

    def shutdown(self) -> None:
        """Stop the threads."""
        self._events.close()
        super().shutdown()

    # ---- called by the engine's thread ----

    def begin_step(self, chunks: Sequence[Chunk], *, aborted: Collection[str], preempted: Collection[str]) -> None:
        """Start a step that computes `chunks`. The step may overwrite the blocks of the transfers `aborted` and `preempted`.

        Data that is read from these blocks from now on is invalid. A write that ends later must see this at once, so the
        transfers are marked here and not in the event loop.
        """
        self._overwritten.mark(aborted)
        self._overwritten.mark(preempted)
        if preempted:
            self._in_loop(self._restart, preempted)
        self._to_check = [chunk for chunk in chunks if chunk.check]
        if chunks or self._steps_layers:
            self._steps_layers = bool(chunks) and not self._push_off
            self._in_loop(self._begin, chunks)

    def save_layer(self, layer: str) -> None:
        """Handle that the step has written `layer`'s KV, or has queued the write on its stream."""
        if self._steps_layers:
            self._events.after_launched(partial(self._post, self._saved, layer))

    def end_step(self) -> None:
        """Handle that the step has written all layers' KV, or has queued the writes. Checksums are computed here, on the same
        stream: at this point no later step can have overwritten a block."""
        for chunk in self._to_check:
            sums = None
            try:
                if self._block_sums is not None:
                    sums = self._block_sums.enqueue([block for _, block in chunk.check])
            except Exception as error:
                logger.warning_once("KV is sent unchecked: its checksums cannot be computed: %s", error)
            self._events.after_launched(partial(self._post, self._summed, chunk, sums))
        self._to_check = []

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call in the event loop, after the layers that were launched before are handled."""
        self._events.in_order(partial(self._post, call, *arguments))

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        self.sender_loop.call_soon_threadsafe(call, *arguments)

    def _event_failed(self, error: BaseException) -> None:
        # The layer never counts as computed, so vLLM's own transfer sends the prompt after the prefill.
        logger.error("An event of a layer could not be waited for: %s", error)

    # ---- the prompt's side ----

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        self._step = []
        for chunk in chunks:
            transfer = self._transfers.setdefault(chunk.transfer_id, Transfer(chunk.transfer_id))
            if transfer.computed is None:
                transfer.request_id = chunk.request_id
                self._transfer_of[chunk.request_id] = chunk.transfer_id
                transfer.computed = ComputedBlocks(chunk.total, set(self.registered_layer_names))
            if chunk.restarted:
                self._take_back(transfer)
            transfer.computed.begin_chunk(chunk.new_blocks, restarted=chunk.restarted)
            transfer.summing = bool(chunk.check)
            self._step.append((transfer, chunk))

    def _restart(self, preempted: Collection[str]) -> None:
        """Handle that these transfers' prompts were preempted and have lost their blocks."""
        for transfer_id in preempted:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.computed is not None:
                self._take_back(transfer)
                transfer.computed.restart()
            self._overwritten.clear(transfer_id)

    def _take_back(self, transfer: Transfer) -> None:
        """Handle that the prompt is not complete any more: its receivers wait again."""
        transfer.sums = []
        transfer.summed.clear()
        if (waiting := self.reqs_need_send.get(transfer.transfer_id)) is not None:
            transfer.announced = False
            waiting.ready.clear()

    def _summed(self, chunk: Chunk, sums: torch.Tensor | None) -> None:
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is None:
            return
        if sums is not None:
            transfer.sums = list(zip(chunk.check, sums.tolist(), strict=True))
        transfer.summed.set()

    def _sums_of_conversation(self) -> Mapping[str, Sums]:
        """Return the checksums to send with the answer of the current task, by request."""
        conversation = self._conversations.get(asyncio.current_task())
        return conversation.sums if conversation is not None else {}

    def _saved(self, layer: str) -> None:
        for transfer, chunk in self._step:
            computed = transfer.computed
            assert computed is not None
            computed.layer_saved(layer, chunk.up_to)
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
        task = asyncio.current_task()
        conversation = self._conversations[task] = _Conversation(self._last_write_deadline())
        send = sock.send_multipart
        try:
            meta = self._xfer_meta_decoder.decode(message)
            conversation.session = session_of(meta)
            conversation.wanted = frozenset(
                transfer_id for transfer_id, blocks in meta.req_blocks.values() if any(blocks)
            )
            send = partial(self._send_answer, sock, meta)
            self._start_pushing(meta, conversation.deadline)
            await self.send_kv_to_decode(identity, SimpleNamespace(send_multipart=send), meta)
            self._drop_answered_receivers(meta)
        except Exception as error:
            logger.exception("Could not serve a receiver of KV")
            refusal = MooncakeXferResponse(status=MooncakeXferResponseStatus.ERROR, err_msg=str(error))
            await send((identity, self._encoder.encode(refusal)))
        finally:
            del self._conversations[task]

    async def _send_answer(
        self, sock: zmq.asyncio.Socket, meta: MooncakeXferMetadata, frames: tuple[bytes, bytes]
    ) -> None:
        """Send an answer to the message `meta`, when no write to a receiver that the answer refuses is in progress: the receiver
        may reuse its blocks. Upstream refuses at any time, as after the abort timeout."""
        answer = self._xfer_resp_decoder.decode(frames[1])
        refused = meta.req_blocks if answer.status == MooncakeXferResponseStatus.ERROR else answer.err_reqs or ()
        for request_id in refused:
            transfer = self._transfers.get(meta.req_blocks[request_id][0])
            if (
                transfer is not None
                and (receiver := transfer.receivers.get((session_of(meta), request_id))) is not None
            ):
                receiver.delivery.give_up()
                await receiver.idle.wait()
        await sock.send_multipart(frames)

    def _last_write_deadline(self) -> float:
        """Return the time after which no part of a write may start to receivers that sent a message now."""
        return self.sender_loop.time() + last_start_s(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)

    def _start_pushing(self, meta: MooncakeXferMetadata, deadline: float) -> None:
        """Start to push to receivers whose prompt is still computed, until `deadline`. Upstream rejects the receivers that do not
        fit."""
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
                self.sender_loop.call_at(deadline, delivery.give_up),
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
        conversation = self._conversations[asyncio.current_task()]
        comparable = self._same_memory(agent_meta)
        rest, never, late, needless = [], [], [], []
        for request_id, send_meta in ready_reqs:
            transfer = self._transfers.get(send_meta.transfer_id)
            receiver = transfer.receivers.get((session, request_id)) if transfer is not None else None
            wanted = any(agent_meta.req_blocks[request_id][1])
            if not wanted and self._is_wanted(send_meta.transfer_id, session):
                needless.append(request_id)
                continue
            pushed = transfer is not None and await self._pushed(transfer, receiver)
            if transfer is not None and not pushed and wanted:
                # Only the scheduler can confirm that the blocks are not reused until they are sent.
                await transfer.scheduler_confirmed.wait()
                if transfer.aborted_at is not None:
                    never.append(request_id)
                    continue
                pushed = await self._pushed(transfer, receiver)
            if receiver is not None and not pushed:
                # After the answer the receiver may reuse these blocks, so no write may be in progress.
                receiver.delivery.give_up()
                await receiver.idle.wait()
            if not pushed and self.sender_loop.time() > conversation.deadline:
                late.append(request_id)
                continue
            if transfer is not None and comparable and wanted:
                conversation.sums[request_id] = _sums_of(transfer, send_meta)
            if pushed:
                continue
            rest.append((request_id, send_meta))
            if receiver is not None:
                self.xfer_stats.record_fallback()
        src, dst, lengths, errors, message = await super()._build_transfer_params(
            rest, agent_meta, local_regions, remote_regions
        )
        src, conversation.deadline = Sources(src, conversation.deadline), self._last_write_deadline()
        if never:
            message = message or "the prefill was aborted"
        elif late:
            message = message or "the receiver may have timed out"
        elif needless:
            message = message or "nothing to release: the same receiver waits for this KV"
        return src, dst, lengths, [*errors, *never, *late, *needless], message

    def _is_wanted(self, transfer_id: str, session: str) -> bool:
        """Return whether the receiver `session` waits for this KV. A receiver whose request is cancelled can also send a message
        that releases the blocks: they must not be free before the writes to it have ended and it is answered."""
        return any(
            conversation.session == session and transfer_id in conversation.wanted
            for conversation in self._conversations.values()
        )

    async def _pushed(self, transfer: Transfer, receiver: Receiver | None) -> bool:
        """Wait until no write to the receiver is in progress and the prompt's checksums are computed; return whether the
        receiver has all its blocks."""
        if receiver is not None:
            await receiver.idle.wait()
        if transfer.summing:
            try:
                async with asyncio.timeout(SUMS_S):
                    await transfer.summed.wait()
            except TimeoutError:
                logger.warning_once("KV is sent unchecked: its checksums are not there in time")
        return receiver is not None and transfer.computed is not None and receiver.delivery.done(transfer.computed)

    def _same_memory(self, meta: MooncakeXferMetadata) -> bool:
        """Return whether the receiver's blocks have the same bytes in the same order, so that checksums can be compared."""
        return (
            (meta.remote_tp_size, meta.remote_pp_size) == (self.tp_size, self.pp_size)
            and meta.registered_layer_names == self.registered_layer_names
            and meta.kv_block_lens == self.kv_block_len_per_layer
        )

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
                self._forget(transfer_id)

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
            self._overwritten.clear(transfer_id)
            if transfer_id not in self._transfers:
                self._overwritten.forget(transfer_id)

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
            transfer.transfer_id
            for transfer in self._transfers.values()
            if transfer.aborted_at is not None and transfer.aborted_at < oldest
        ]
        for transfer_id in late:
            self.reqs_need_send.pop(transfer_id, None)
            self._forget(transfer_id)

    def _forget(self, transfer_id: str) -> None:
        if (transfer := self._transfers.pop(transfer_id, None)) is not None:
            self._transfer_of.pop(transfer.request_id, None)
        self._overwritten.forget(transfer_id)


def _sums_of(transfer: Transfer, sent: SendBlockMeta) -> Sums:
    """Return the checksums of the blocks that are sent. Others were summed if two requests came with one transfer id."""
    if transfer.computed is None or len(sent.local_block_ids) != 1:
        return []
    computed, blocks = transfer.computed, sent.local_block_ids[0]
    return [
        (place, value)
        for (place, block), value in transfer.sums
        if place <= len(blocks) and blocks[-place] == block == computed.blocks[computed.total - place]
    ]
