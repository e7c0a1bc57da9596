"""The connector's plug-in on vLLM's own schedulers without an engine: what it pushes of their steps.

A module for inside_vllm.py. The executor is a fake: each request's next token is 1.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import msgspec
import torch
import zmq
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from pointsman_connector import engine_plugin

BLOCK = 16


def play(model_folder: str, folder: str, *, asynchronous: bool, kv_blocks: int, prompts: list[int]) -> dict[str, Any]:
    """Compute prompts of these lengths, each with 20 tokens of answer, in steps of 64 tokens.

    Returns the class of the scheduler, the pushed totals, what the steps really had, and the number of steps after which the
    tokens left differed from those of the scheduler's requests."""
    os.environ[engine_plugin.ADDRESS] = f"ipc://{folder}/loads"
    with zmq.Context() as context, context.socket(zmq.PULL) as agent:
        agent.bind(os.environ[engine_plugin.ADDRESS])
        engine_plugin.register()
        scheduler = _scheduler(model_folder, asynchronous, kv_blocks)
        observer = scheduler.schedule.__self__._observer
        hasher = get_request_block_hasher(BLOCK, sha256)
        for number, length in enumerate(prompts):
            tokens = [7] * min(length, 40) + [number + 10] * max(length - 40, 0)
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            scheduler.add_request(Request(f"r{number}", tokens, params, None, block_hasher=hasher))
        real = {"prefill_tokens": 0, "prefill_pairs": 0, "decode_tokens": 0, "steps": 0}
        wrong_left = preemptions = 0
        ahead: deque[Any] = deque()
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            preemptions += len(output.preempted_req_ids or ())
            _count(real, scheduler, output)
            left = sum(max(request.num_tokens - request.num_computed_tokens, 0) for request in scheduler.running)
            wrong_left += observer.prefill_tokens_left != left
            ahead.append((output, _answer(scheduler, output)))
            if len(ahead) > asynchronous:
                scheduler.update_from_output(*ahead.popleft())
        pushed = None
        while agent.poll(1_000):
            pushed = msgspec.msgpack.decode(agent.recv())
            if pushed["running"] == 0:
                break
    return {
        "scheduler": type(scheduler).__name__,
        "pushed": pushed,
        "real": real,
        "wrong_left": wrong_left,
        "preemptions": preemptions,
    }


def _count(real: dict[str, int], scheduler: Any, output: Any) -> None:
    """Add what a step computes, from its requests one by one."""
    real["steps"] += output.total_num_scheduled_tokens > 0
    for name, amount in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        before = request.num_computed_tokens - amount
        # In these scenes no prefill ends with a single token of an answer, as it could after a preemption.
        if amount == 1 and before >= request.num_prompt_tokens:
            real["decode_tokens"] += amount
        else:
            real["prefill_tokens"] += amount
            real["prefill_pairs"] += amount * (2 * before + amount)


def _answer(scheduler: Any, output: Any) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)


def _scheduler(model_folder: str, asynchronous: bool, kv_blocks: int) -> Any:
    """A scheduler as an engine core makes one."""
    config = VllmConfig(
        model_config=ModelConfig(model=model_folder, dtype="float32", max_model_len=4096),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=4096,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            enable_chunked_prefill=True,
            max_num_batched_tokens=64,
            max_num_seqs=8,
        ),
        device_config=DeviceConfig("cpu"),
    )
    # On a CPU the configuration switches asynchronous scheduling off.
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = kv_blocks
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(kv_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
