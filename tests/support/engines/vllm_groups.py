"""vLLM's own scheduler and KV cache manager for a model with several KV cache groups, without an engine.

A module for inside_vllm.py; tests/engine/test_hybrid_scheduler.py has the shape of scripts. Each step of a script returns the KV
events of the step, as an engine publishes them, and how many tokens of each prompt vLLM would find cached now.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import torch
from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LENGTH = 4096


class Collector:
    """An event publisher that keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[KVEventBatch] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)


class Runner:
    """Plays scripts; the configuration is made once, and changed for each."""

    def __init__(self, model_folder: str) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(model=model_folder, dtype="float32", max_model_len=LENGTH),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=LENGTH, is_encoder_decoder=False, async_scheduling=False, enable_chunked_prefill=True
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            device_config=DeviceConfig("cpu"),
        )
        self.structured = StructuredOutputManager(self.config)
        init_none_hash(sha256)

    def play(self, script: dict[str, Any]) -> list[dict[str, Any]]:
        groups, config = script["groups"], self.config
        sizes = [group["block_size"] for group in groups]
        common, hashed = math.lcm(*sizes), math.gcd(*sizes)
        config.model_config.max_model_len = script["max_model_len"]
        config.scheduler_config.max_num_batched_tokens = script["max_num_batched_tokens"]
        config.scheduler_config.max_num_seqs = script["max_num_seqs"]
        config.cache_config.block_size = common
        config.cache_config.num_gpu_blocks = script["kv_blocks"] + 1
        config.cache_config.mamba_cache_mode = "align"
        layers = [KVCacheGroupSpec([f"layer{number}"], spec_of(group)) for number, group in enumerate(groups)]
        kv_cache = KVCacheConfig(script["kv_blocks"] + 1, [], layers)
        kv_cache.prefix_cache_retention_interval = script["retention_interval"] and common
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=self.structured,
            block_size=common,
            hash_block_size=hashed,
            log_stats=True,
        )
        self.published = self.scheduler.kv_event_publisher = Collector()
        self.hasher = get_request_block_hasher(hashed, sha256)
        steps = []
        for action, name in script["actions"]:
            if action == "submit":
                asked = script["requests"][name]
                self.scheduler.add_request(self.request(name, asked["prompt"], asked["max_tokens"]))
            elif action == "abort":
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            elif action == "reset":
                self.scheduler.kv_cache_manager.reset_prefix_cache()
            else:
                steps.append(self.step(script["requests"], script["prompts"]))
        return steps

    def request(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, params, None, arrival_time=0.0, block_hasher=self.hasher)

    def step(self, requests: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for name in ids:
            request = scheduler.requests[name]
            whole = request.num_computed_tokens == request.num_tokens
            sampled.append([requests[name]["answer"][request.num_output_tokens]] if whole else [])
        scheduler.update_from_output(output, ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled))
        batches, self.published.batches = self.published.batches, []
        return {
            "payloads": [msgspec.msgpack.encode(batch).hex() for batch in batches],
            "hits": [manager.get_computed_blocks(self.request("probe", prompt, 1))[1] for prompt in prompts],
        }


def spec_of(group: dict[str, Any]) -> KVCacheSpec:
    size = group["block_size"]
    if group["kind"] == "mamba":
        return MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    common = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group["kind"] == "sliding_window":
        return SlidingWindowSpec(**common, sliding_window=group["window"])
    return FullAttentionSpec(**common)


@functools.cache
def _runner(model: str) -> Runner:
    return Runner(model)


def play(model: str, script: dict[str, Any]) -> list[Any]:
    """What every step of the script published, and found cached."""
    return _runner(model).play(script)
