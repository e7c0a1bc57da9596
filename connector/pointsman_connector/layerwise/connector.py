"""LayerwiseMooncakeConnector: vLLM's MooncakeConnector with transfers that run during the prefill."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from pointsman_connector.layerwise import vllm_compatibility
from pointsman_connector.layerwise.chunks import Chunk, ChunkTracker
from pointsman_connector.layerwise.kv_checks import CheckSettings
from pointsman_connector.layerwise.support import enabled, unsupported_cache, unsupported_engine

with vllm_compatibility.imports():
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
        MooncakeConnectorMetadata,
        MooncakeConnectorScheduler,
    )
    from vllm.logger import init_logger
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

    from pointsman_connector.layerwise.receiver import LayerwiseWorker
    from pointsman_connector.layerwise.stats import LayerwiseStats
    from pointsman_connector.mooncake import AnyDeviceMooncakeConnector, register, some_device
    from pointsman_connector.vllm_version import warn_if_untested

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)


class LayerwiseMooncakeConnector(AnyDeviceMooncakeConnector):
    """MooncakeConnector that pushes each layer's KV while the prompt is computed, if the receiver already waits.

    It behaves as vLLM's connector, unchanged, with `"layerwise": false` in kv_connector_extra_config, and for a model or engine
    that `support` excludes.
    """

    worker_class: ClassVar[type[LayerwiseWorker]] = LayerwiseWorker

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._layerwise = enabled(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if self._layerwise and (reason := unsupported_cache(kv_cache_config) or unsupported_engine(vllm_config)):
            logger.warning("Layer-wise push is off, KV is sent after the prefill: %s", reason)
            self._layerwise = False
        if not self._layerwise:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        if role == KVConnectorRole.SCHEDULER:
            warn_if_untested()
        vllm_compatibility.check()
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler: LayerwiseScheduler | None = None
        self.connector_worker: LayerwiseWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LayerwiseScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            with some_device():
                self.connector_worker = self.worker_class(vllm_config, self.engine_id, kv_cache_config)
            if not self.connector_worker.is_kv_consumer:
                vllm_compatibility.check_worker(self.connector_worker)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: the replay of a whole graph does not call `save_kv_layer`, but the default mode (FULL_AND_PIECEWISE)
        replays whole graphs for decode steps only, which push nothing. A prompt whose last chunk has one token may run in such a
        step; its KV is sent after the prefill."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics from their serialised form."""
        return LayerwiseStats(data=data or {})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start a step. vLLM calls `start_load_kv` only after the forward pass, which is too late for the chunks."""
        super().bind_connector_metadata(connector_metadata)
        if self._layerwise:
            assert self.connector_worker is not None
            assert isinstance(connector_metadata, LayerwiseMetadata)
            self.connector_worker.begin_step(
                connector_metadata.chunks,
                aborted=connector_metadata.reqs_not_processed,
                preempted=connector_metadata.preempted,
            )

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Record that `layer_name` of this step is computed."""
        if self._layerwise:
            assert self.connector_worker is not None
            self.connector_worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Handle that all layers of this step are computed, or launched on their stream."""
        if self._layerwise:
            assert self.connector_worker is not None
            self.connector_worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that were sent, received or failed since the last step."""
        if not self._layerwise:
            return super().get_transfer_results(finished_req_ids)
        metadata = self._get_connector_metadata()
        assert self.connector_worker is not None
        assert isinstance(metadata, LayerwiseMetadata)
        return self.connector_worker.transfer_results(idle=metadata.idle)


register(LayerwiseMooncakeConnector)


class LayerwiseMetadata(MooncakeConnectorMetadata):
    """Upstream's message from scheduler to worker, with the step's chunks and the ids of the transfers whose prompts were
    `preempted` before the step. An `idle` step computes nothing."""

    def __init__(self, chunks: list[Chunk], preempted: frozenset[str], *, idle: bool) -> None:
        super().__init__()
        self.chunks = chunks
        self.preempted = preempted
        self.idle = idle


class LayerwiseScheduler(MooncakeConnectorScheduler):
    """Upstream's scheduler side, which also sends the worker what each step computes for other engines."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        (group,) = kv_cache_config.transfer_group_ids
        self._tracker = ChunkTracker(self.block_size, group, CheckSettings.of(extra_config), random.Random())

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Handle that `request` got blocks. Track the request if its KV is for another engine."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and (transfer_id := params.get("transfer_id")):
            self._tracker.follow(request, transfer_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the message of one step."""
        upstream = super().build_connector_meta(scheduler_output)
        metadata = LayerwiseMetadata(
            list(self._tracker.step(scheduler_output)),
            self._tracker.preempted(scheduler_output),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )
        metadata.reqs_to_recv = upstream.reqs_to_recv
        metadata.reqs_to_send = upstream.reqs_to_send
        metadata.reqs_not_processed = upstream.reqs_not_processed
        return metadata

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of `request`. Return whether its blocks are still needed, and upstream's parameters."""
        self._tracker.forget(request.request_id)
        return super().request_finished(request, block_ids)
