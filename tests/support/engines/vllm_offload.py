"""vLLM's scheduler with one of its offloading connectors, without an engine: runs prompts and tells the KV events of every step,
as they go over the wire, beside what its caches have.

A module for inside_vllm.py. The worker is a fake: it completes each transfer in the step after the one that started it.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID, SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32


class OffloadRunner:
    """A scheduler with OffloadingConnector or SimpleCPUOffloadConnector, its blocks and its chunks."""

    def __init__(self, model: str, asked: dict[str, Any]) -> None:
        self.length, self.simple = asked["blocks_per_chunk"], asked["connector"] == "SimpleCPUOffloadConnector"
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        page = spec.page_size_bytes
        settings = {"cpu_bytes_to_use": asked["cpu_chunks"] * page}
        if not self.simple:
            settings = {
                "cpu_bytes_to_use": asked["cpu_chunks"] * CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT,
                "blocks_per_chunk": self.length,
                "self_describing_kv_events": asked["self_describing"],
            } | asked.get("settings", {})
        config = VllmConfig(
            model_config=_model(model),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=4096, is_encoder_decoder=False, async_scheduling=False, enable_chunked_prefill=True
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector=asked["connector"], kv_role="kv_both", kv_connector_extra_config=settings
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            device_config=DeviceConfig("cpu"),
        )
        init_none_hash(sha256)
        blocks = asked["kv_blocks"] + 1
        config.cache_config.num_gpu_blocks = blocks
        tensors = [KVCacheTensor(blocks * page, ["layer"], layer_stride=0, block_stride=page)] if self.simple else []
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: list[Request] = []
        self.batches: list[str] = []
        self.jobs: set[int] = set()
        self.loading: set[str] = set()
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        self.batches.append(msgspec.msgpack.encode(batch).hex())

    def run(self, action: dict[str, Any]) -> dict[str, Any]:
        """Do one action until nothing is left to do; tell the batches, and by prompt which of its blocks are where."""
        self.batches = []
        scheduler = self.scheduler
        if action["kind"] == "reset":
            assert scheduler.reset_prefix_cache(reset_connector=action["connector"])
        else:
            sent = {"kv_transfer_params": action["params"]} if "params" in action else None
            params = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=sent)
            request = Request(
                f"r{len(self.requests)}",
                action["prompt"],
                params,
                None,
                cache_salt=action.get("salt"),
                block_hasher=self.hasher,
            )
            self.requests.append(request)
            scheduler.add_request(request)
            idle = 0
            for _ in range(50):
                self.step()
                idle = 0 if scheduler.has_unfinished_requests() or self.jobs else idle + 1
                if idle == 3:
                    break
            else:
                raise AssertionError("the request does not end")
        return {"batches": self.batches, "blocks": self.blocks()}

    def step(self) -> None:
        scheduler = self.scheduler
        output = scheduler.schedule()
        done, received, meta = self.jobs, self.loading, output.kv_connector_metadata
        worker: Any
        if self.simple:
            self.jobs = {meta.store_event} - {INVALID_JOB_ID}
            self.loading = set(meta.load_event_to_reqs.get(meta.load_event, ()))
            worker = SimpleCPUOffloadWorkerMetadata(completed_store_events=dict.fromkeys(done, 1))
        else:
            self.jobs = {*meta.load_jobs, *meta.store_jobs}
            self.loading = {job.req_id for job in meta.load_jobs.values()}
            worker = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1))
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [7] if scheduler.requests[name].num_computed_tokens == scheduler.requests[name].num_tokens else []
            for name in ids
        ]
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                ids,
                {name: at for at, name in enumerate(ids)},
                sampled,
                kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=worker),
            ),
        )

    def blocks(self) -> list[list[list[bool]]]:
        """For each request: whether each full block of its prompt is in the engine's own cache, and in an offloaded chunk. Chunks
        of several prompts can have a block in common."""
        pool, connector = self.scheduler.kv_cache_manager.block_pool, self.scheduler.connector
        prompts = [list(request.block_hashes)[: request.num_prompt_tokens // BLOCK] for request in self.requests]
        chunked = set()
        if self.simple:
            offloaded = connector.scheduler_manager.cpu_block_pool
            chunked = {
                block_hash
                for hashes in prompts
                for block_hash in hashes
                if offloaded.get_cached_block(block_hash, [0]) is not None
            }
        for hashes in prompts:
            for end in range(self.length, 0 if self.simple else len(hashes) + 1, self.length):
                chunk = connector.connector_scheduler.manager._policy.get(make_offload_key(hashes[end - 1], 0))
                if chunk is not None and chunk.is_ready:
                    chunked.update(hashes[end - self.length : end])
        return [
            [[pool.get_cached_block(block_hash, [0]) is not None, block_hash in chunked] for block_hash in hashes]
            for hashes in prompts
        ]


@functools.cache
def _model(model: str) -> ModelConfig:
    return ModelConfig(model=model, dtype="float32", max_model_len=4096)


def play(model: str, asked: dict[str, Any], actions: list[dict[str, Any]]) -> list[Any]:
    """Run the actions in a new scheduler."""
    runner = OffloadRunner(model, asked)
    return [runner.run(action) for action in actions]
