"""The layer-wise connector with faults that a test switches on and off, and with a report of all that it keeps for transfers.

An engine loads it by `kv_connector_module_path`. POINTSMAN_FAULTS is a path to which ".json" (the faults; nothing is wrong while
it is missing), ".workerN.json", N being its rank, and ".scheduler.json" (the reports) are added.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from pointsman_connector.layerwise.connector import LayerwiseMooncakeConnector
from pointsman_connector.layerwise.kv_checks import RefusedSenders
from pointsman_connector.layerwise.progress import Batch
from pointsman_connector.layerwise.receiver import LayerwiseWorker
from pointsman_connector.layerwise.stats import LayerwiseStats

REPORT_EVERY_S = 0.05


def file(kind: str) -> Path:
    return Path(os.environ["POINTSMAN_FAULTS"] + kind)


def faults() -> dict[str, Any]:
    """What is wrong now. `withhold`: regions that are not written, and said to be; `silent`: a layer that is never said to be
    computed; `fail`: pushes fail; `slow_s`: each takes so much longer; `layer_s`: each layer takes so much longer to compute;
    `expires_s`: in place of the abort timeout; `unchecked`: checksums are ignored; `forgiving`: no sender stays refused."""
    try:
        found: dict[str, Any] = json.loads(file(".json").read_text())
    except FileNotFoundError:
        return {}
    return found


def report(kind: str, state: dict[str, int], **more: int) -> None:
    """Tell how many entries each container holds, and when that was (s on the machine's monotonic clock)."""
    beside = file(f".{kind}.new")
    beside.write_text(json.dumps({"at": time.monotonic(), "state": state, **more}))
    beside.replace(file(f".{kind}.json"))


class CountingStats(LayerwiseStats):
    """Upstream's intervals come and go; these counts stay."""

    pushes = 0
    fallbacks = 0

    def record_push(self, regions: int) -> None:
        super().record_push(regions)
        self.pushes += 1

    def record_fallback(self) -> None:
        super().record_fallback()
        self.fallbacks += 1


class FaultyWorker(LayerwiseWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.xfer_stats = CountingStats()
        asyncio.run_coroutine_threadsafe(self._report(), self.sender_loop)

    def save_layer(self, layer: str) -> None:
        time.sleep(faults().get("layer_s", 0.0))
        if self.registered_layer_names.index(layer) != faults().get("silent"):
            super().save_layer(layer)

    async def _pointers(self, transfer: Any, computed: Any, receiver: Any, batch: Batch) -> Any:
        spans = tuple(span for span in batch.spans if span.region not in faults().get("withhold", ()))
        return await super()._pointers(transfer, computed, receiver, Batch(spans, batch.epoch))

    def _differs(self, pull: Any, sums: Any) -> bool:
        return not faults().get("unchecked") and super()._differs(pull, sums)

    def _write(self, *args: Any) -> int:
        wrong = faults()
        time.sleep(wrong.get("slow_s", 0.0))
        return -1 if wrong.get("fail") else super()._write(*args)

    async def _report(self) -> None:
        timeout = envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        while True:
            if faults().get("forgiving"):
                self._refused = RefusedSenders()
            envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = faults().get("expires_s", timeout)
            state = {
                "transfers": len(self._transfers),
                "receivers": sum(len(transfer.receivers) for transfer in self._transfers.values()),
                "transfer_of": len(self._transfer_of),
                "done_sending": len(self._done_sending),
                "may_free": len(self._may_free),
                "overwritten": len(self._overwritten),
                "tasks": len(self._tasks),
                "reqs_need_send": len(self.reqs_need_send),
                "finished_sending": len(self.finished_sending_reqs),
                "awaited": len(self._awaited),
                "checks": len(self._checks),
                "told": len(self._answered_requests),
                "conversations": len(self._conversations),
                "finished_recving": len(self.finished_recving_reqs),
                "failed_recving": self._failed_recv_reqs.qsize() + self._invalid_block_ids.qsize(),
                "bootstrap_queries": len(self._pending_bootstrap_queries),
            }
            report(f"worker{self.tp_rank}", state, pushes=self.xfer_stats.pushes, fallbacks=self.xfer_stats.fallbacks)
            await asyncio.sleep(REPORT_EVERY_S)


class FaultyConnector(LayerwiseMooncakeConnector):
    worker_class = FaultyWorker

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler = self.connector_scheduler
        assert scheduler is not None
        state = {
            "followed": len(scheduler._tracker),
            "need_recv": len(scheduler._reqs_need_recv),
            "need_send": len(scheduler._reqs_need_send),
            "not_processed": len(scheduler._reqs_not_processed),
        }
        report("scheduler", state)
        return metadata
