"""The side of the engine that waits for a prompt's KV: sleeps while it waits, and detects that a sender has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgspec
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
)
from vllm.logger import init_logger

from pointsman_connector.layerwise.checked_response import CheckedXferResponse
from pointsman_connector.layerwise.kv_checks import RefusedSenders, Sums, differing
from pointsman_connector.layerwise.sender import LayerwiseSender
from pointsman_connector.layerwise.sleeping_writes import patience_s

logger = init_logger(__name__)

# Maximum sleep of a step that computes nothing while requests wait for KV, s. Without the sleep such an engine steps without a
# pause and uses a whole core. KV that arrives ends the sleep at once; a new request waits for its end.
IDLE_SLEEP_S = 0.002
# PROBE_S: interval between two checks that a sender is alive, s. GRACE_S: time for which writes of an ended sender may still
# arrive, s.
PROBE_S, GRACE_S = 1.0, 1.0
# Pauses before each further comparison of KV whose checksums differ, s. Some transports report a write as complete when its last
# bytes have left the sender, so that the answer can arrive before them (Mooncake over TCP where one side lacks its acknowledged
# framing, which 0.3.13 has).
CHECK_PAUSES_S = (0.01, 0.03, 0.1, 0.3, 1.0)


class LayerwiseWorker(LayerwiseSender):
    """Worker of an engine with both sides of layer-wise push."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._awaited: set[str] = set()
        self._arrived = threading.Event()
        self._answered_requests: dict[asyncio.Task[Any] | None, set[str]] = {}
        self._refused = RefusedSenders()
        self._checks: set[asyncio.Task[None]] = set()
        super().__init__(*args, **kwargs)
        self._xfer_resp_decoder = msgspec.msgpack.Decoder(CheckedXferResponse)
        # With data parallelism all ranks step together, so that a rank that sleeps in an idle step delays the others.
        self._may_sleep = self.vllm_config.parallel_config.data_parallel_size == 1

    def start_load_kv(self, metadata: MooncakeConnectorMetadata) -> None:
        """Request the KV of the requests that start to wait for it. From a refused sender nothing is loaded."""
        for sender, pulls in metadata.reqs_to_recv.items():
            self._awaited.update(request for request, pull in pulls.items() if any(pull.local_block_ids))
            if sender in self._refused:
                self.receiver_loop.call_soon_threadsafe(
                    self._handle_failed_recv, dict(pulls), list(pulls), f"engine {sender} sent KV that differed"
                )
                # The sender still gets a message without blocks, so that it frees its own.
                metadata.reqs_to_recv[sender] = {
                    request: replace(pull, local_block_ids=[]) for request, pull in pulls.items()
                }
        super().start_load_kv(metadata)

    def transfer_results(self, *, idle: bool) -> KVConnectorTransferResults:
        """Return the requests that were received, sent or failed. An `idle` step, which computed nothing, first sleeps for up to
        IDLE_SLEEP_S if requests wait for KV."""
        if idle and self._awaited and self._may_sleep:
            self._arrived.wait(IDLE_SLEEP_S)
        self._arrived.clear()
        results = self.get_transfer_results()
        self._awaited -= results.finished_recving | results.failed_recving
        return results

    def process_pulling_result(self, response: MooncakeXferResponse, pull_metas: dict[str, PullReqMeta]) -> None:
        """Handle the sender's message that names the requests whose KV is written or has failed. A request whose checksums differ
        is checked again some time later, and has failed if they still differ."""
        if isinstance(response, CheckedXferResponse) and response.ok_reqs:
            sums = {
                request: self._comparable(pull_metas[request], response.sums.get(request, []))
                for request in response.ok_reqs
            }
            differ = [request for request in response.ok_reqs if self._differs(pull_metas[request], sums[request])]
            for request in differ:
                check = self.receiver_loop.create_task(self._check_again(request, sums[request], pull_metas))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
            response = msgspec.structs.replace(
                response, ok_reqs=[request for request in response.ok_reqs if request not in differ]
            )
            if (conversation := asyncio.current_task()) is not None:
                self._answered_requests[conversation].update(differ)
        super().process_pulling_result(response, pull_metas)
        if (conversation := asyncio.current_task()) is not None:
            self._answered_requests[conversation].update(response.ok_reqs or (), response.err_reqs or ())
        self._arrived.set()

    async def _check_again(self, request: str, sums: Sums, pull_metas: dict[str, PullReqMeta]) -> None:
        """Accept a request's KV when its checksums do not differ any more. Report it as failed if they never do, or if an error
        prevents the comparison: the sender's answer is already handled, so nothing else reports the request."""
        reason = "its KV differs from the sender's"
        try:
            if await self._agrees_later(pull_metas[request], sums):
                written = MooncakeXferResponse(status=MooncakeXferResponseStatus.CONTINUE, ok_reqs=[request])
                super().process_pulling_result(written, pull_metas)
                self._arrived.set()
                return
        except Exception as error:
            reason = f"its KV could not be checked: {error}"
        self._handle_failed_recv(pull_metas, [request], reason)

    async def _agrees_later(self, pull: PullReqMeta, sums: Sums) -> bool:
        """Compare a request's checksums again after each of CHECK_PAUSES_S, until they do not differ. If they still differ at the
        end, refuse the sender and return False."""
        for pause_s in CHECK_PAUSES_S:
            await asyncio.sleep(pause_s)
            if pull.remote_engine_id in self._refused:
                break
            if not self._places(pull, sums):
                self._count_check(late=True)
                return True
        if places := self._places(pull, sums):
            self._count_check()
            self.xfer_stats.record_wrong(pull.remote_bootstrap_addr, pull.remote_engine_id)
            if self._refused.refuse(pull.remote_engine_id):
                logger.error(
                    "WRONG KV from the engine at %s: %d of %d checked blocks of request %s differ. This engine computes the "
                    "prompt itself, and loads no more KV from that engine until one of the two is restarted",
                    pull.remote_bootstrap_addr,
                    len(places),
                    len(sums),
                    pull.d_req_id,
                )
        return False

    def _differs(self, pull: PullReqMeta, sums: Sums) -> bool:
        """Return whether the KV of this request must not be used yet: a checked block differs from what the sender computed, or
        the sender is refused."""
        if pull.remote_engine_id in self._refused and any(pull.local_block_ids):
            return True
        if pull.failed or not sums:
            return False
        if self._places(pull, sums):
            return True
        self._count_check()
        return False

    def _count_check(self, *, late: bool = False) -> None:
        # Each tensor parallel worker checks its part of each request.
        if self.tp_rank == 0:
            self.xfer_stats.record_check(late=late)

    def _comparable(self, pull: PullReqMeta, sums: Sums) -> Sums:
        """Return the checksums of the blocks that this engine received. It had the others in its own cache."""
        if len(pull.local_block_ids) != 1 or self._block_sums is None:
            return []
        return [(place, value) for place, value in sums if place <= len(pull.local_block_ids[0])]

    def _places(self, pull: PullReqMeta, sums: Sums) -> list[int]:
        """Return the places of the checked blocks that differ."""
        if not sums:
            return []
        assert self._block_sums is not None
        blocks = pull.local_block_ids[0]
        return differing(sums, self._block_sums.now([blocks[-place] for place, _ in sums]))

    def _handle_failed_recv(self, pull_metas: dict[str, PullReqMeta], req_ids: Collection[str], reason: str) -> None:
        # Upstream also names the requests that the sender has answered before the conversation fails.
        answered = self._answered_requests.get(asyncio.current_task(), ())
        super()._handle_failed_recv(pull_metas, [request for request in req_ids if request not in answered], reason)
        self._arrived.set()

    async def receive_kv_from_single_worker(self, worker_addr: str, pull_metas: dict[str, PullReqMeta]) -> None:
        """Wait for the sender's answer, for the end of its process, or for a timeout.

        An ended process does not answer, and upstream would continue to wait. A stopped process may resume and write: the blocks
        must not be reused until the sender's own deadline has passed.
        """
        answer = asyncio.create_task(super().receive_kv_from_single_worker(worker_addr, pull_metas))
        answered = self._answered_requests[answer] = set()
        death = asyncio.create_task(_wait_until_gone(worker_addr))
        try:
            over: set[asyncio.Task[None]] = set()
            heard = -1
            while not over and heard < len(answered):
                heard = len(answered)
                over, _ = await asyncio.wait(
                    {answer, death},
                    timeout=patience_s(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            reason = "the sender did not answer for it"
            if death in over:
                reason = f"the sender at {worker_addr} has ended"
            # A sender that aborts a prompt at certain moments ends the conversation without an answer for the prompt.
            self._handle_failed_recv(pull_metas, [request for request in pull_metas if request not in answered], reason)
        finally:
            answer.cancel()
            death.cancel()
            del self._answered_requests[answer]


async def _wait_until_gone(worker_addr: str) -> None:
    """Return when no process listens at `worker_addr` any more.

    A sender that is only stopped or slow still listens, and one that cannot be reached may be there. Its writes may arrive later,
    so its receivers keep their blocks until the timeout.
    """
    address = urlsplit(worker_addr)
    while True:
        await asyncio.sleep(PROBE_S)
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
        except ConnectionRefusedError:
            await asyncio.sleep(GRACE_S)
            return
        except OSError as error:
            logger.warning_once("Cannot reach the sender of KV at %s: %s", worker_addr, str(error))
            continue
        writer.close()
