"""The connector's plug-in on vLLM's own schedulers without an engine: what it pushes of their steps, and what a step costs.

A module for inside_vllm.py. The executor is a fake: each request's next token is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from types import SimpleNamespace
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
# An agent's end of the socket.
AGENT = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(sys.argv[1])
print("bound", flush=True)
while True:
    socket.recv()
"""


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


class StubScheduler:
    """Schedules and computes nothing: each step has the same requests."""

    def __init__(self, decoding: int, prompts: int) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0))
        names = [f"r{number}" for number in range(decoding + prompts)]
        self.requests = {name: SimpleNamespace(num_tokens=100_000, num_computed_tokens=50_000) for name in names}
        self._new = [SimpleNamespace(req_id=name) for name in names[:prompts]]
        self._amounts = dict.fromkeys(names, 1)

    def schedule(self) -> Any:
        return SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=set(),
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens=self._amounts,
            total_num_scheduled_tokens=len(self._amounts),
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        return None

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def get_kv_cache_usage(self) -> float:
        return 0.5


def cost_us(folder: str, *, decoding: int, prompts: int, steps: int, pause_s: float) -> list[float]:
    """CPU time that the plug-in adds to a step: of the engine core's own thread, and of all threads, us. Between two steps there
    is a pause, in which the message leaves for another process."""
    address = f"ipc://{folder}/cost"

    def took(scheduler: StubScheduler) -> tuple[float, float]:
        process, thread = time.process_time(), time.thread_time()
        for _ in range(steps):
            scheduler.update_from_output(scheduler.schedule(), None)
            time.sleep(pause_s)
        return time.thread_time() - thread, time.process_time() - process

    bare, observed = StubScheduler(decoding, prompts), StubScheduler(decoding, prompts)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, address], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    with agent:
        agent.stdout.readline()
        engine_plugin.attach(observed, address)
        assert "schedule" in vars(observed)
        took(observed)
        costs = [1e6 * (with_it - without) / steps for with_it, without in zip(took(observed), took(bare), strict=True)]
        agent.kill()
    return costs
