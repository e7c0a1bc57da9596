"""The engine that waits for a prompt's KV: lets its core rest meanwhile, and notices when the sender dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeXferResponse,
    PullReqMeta,
)
from vllm.logger import init_logger

from pointsman_connector.layerwise.sender import LayerwiseSender
from pointsman_connector.layerwise.sleeping_writes import WRITE_S

logger = init_logger(__name__)

# An engine that only waits for KV steps without pause, at a whole core's cost. It looks up this often instead, and at once when
# KV is there; a new request waits for it at most as long.
IDLE_SLEEP_S = 0.002
# How often a sender is asked whether it lives, and how long what a dead one had sent may still be on its way.
PROBE_S, GRACE_S = 1.0, 1.0


class LayerwiseWorker(LayerwiseSender):
    """Both sides of layer-wise push in an engine's worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._awaited: set[str] = set()
        self._arrived = threading.Event()
        self._answered_requests: dict[asyncio.Task[None], set[str]] = {}
        super().__init__(*args, **kwargs)

    def start_load_kv(self, metadata: MooncakeConnectorMetadata) -> None:
        """Ask for the KV of the requests that begin to wait for it."""
        for pulls in metadata.reqs_to_recv.values():
            self._awaited.update(request for request, pull in pulls.items() if any(pull.local_block_ids))
        super().start_load_kv(metadata)

    def transfer_results(self, *, idle: bool) -> KVConnectorTransferResults:
        """What arrived and what was sent. An `idle` step, one that computed nothing, rests first."""
        if idle and self._awaited:
            self._arrived.wait(IDLE_SLEEP_S)
        self._arrived.clear()
        results = self.get_transfer_results()
        self._awaited -= results.finished_recving | results.failed_recving
        return results

    def process_pulling_result(self, response: MooncakeXferResponse, pull_metas: dict[str, PullReqMeta]) -> None:
        """The sender says whose KV is written."""
        super().process_pulling_result(response, pull_metas)
        if (conversation := asyncio.current_task()) is not None:
            self._answered_requests[conversation].update(response.ok_reqs or (), response.err_reqs or ())
        self._arrived.set()

    def _handle_failed_recv(self, pull_metas: dict[str, PullReqMeta], req_ids: Collection[str], reason: str) -> None:
        super()._handle_failed_recv(pull_metas, req_ids, reason)
        self._arrived.set()

    async def receive_kv_from_single_worker(self, worker_addr: str, pull_metas: dict[str, PullReqMeta]) -> None:
        """Wait for the sender's answer, or for its end: a process that is gone answers nobody, and upstream would wait on. One
        that is stopped may go on: until its own time is over, nothing else may use the blocks."""
        answer = asyncio.create_task(super().receive_kv_from_single_worker(worker_addr, pull_metas))
        told = self._answered_requests[answer] = set()
        death = asyncio.create_task(_wait_until_gone(worker_addr))
        try:
            over: set[asyncio.Task[None]] = set()
            heard = -1
            while not over and heard < len(told):
                heard = len(told)
                over, _ = await asyncio.wait(
                    {answer, death}, timeout=sender_timeout_s(), return_when=asyncio.FIRST_COMPLETED
                )
            reason = "the sender said nothing of it"
            if death in over:
                reason = f"the sender at {worker_addr} is gone"
            # A sender that gave a prompt up at the wrong moment ends the conversation without a word about it.
            self._handle_failed_recv(pull_metas, [one for one in pull_metas if one not in told], reason)
        finally:
            answer.cancel()
            death.cancel()
            del self._answered_requests[answer]


def sender_timeout_s() -> float:
    """How long to wait for a word of the sender: it may begin a last write one write after its own time is over."""
    return envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + 2 * WRITE_S


async def _wait_until_gone(worker_addr: str) -> None:
    """Returns when nothing listens at `worker_addr` any more. A sender that is merely stopped or slow still listens: its writes
    could come later, so its receivers keep their blocks for it until upstream's timeout."""
    address = urlsplit(worker_addr)
    while True:
        await asyncio.sleep(PROBE_S)
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
        except ConnectionRefusedError:
            await asyncio.sleep(GRACE_S)
            return
        except OSError as error:
            logger.warning("Cannot reach the sender of KV at %s: %s", worker_addr, error)
            continue
        writer.close()
