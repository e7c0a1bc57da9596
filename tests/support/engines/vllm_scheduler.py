"""vLLM's own scheduler without an engine: runs scripts of arrivals and steps, and tells what every step scheduled.

A module for inside_vllm.py; tests/engine/test_scheduler.py has the shape of scripts and answers. The executor is a fake: it
answers what the script says.
"""

from __future__ import annotations

import functools
from typing import Any

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
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class LoadsWhatIsAsked(KVConnectorBase_V1):  # type: ignore[misc]
    """As MooncakeConnector on the decoding side: a request's leading `remote` tokens come from elsewhere, once."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        missing = params.get("remote", 0) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.kv_transfer_params:
            request.kv_transfer_params["remote"] = 0

    def build_connector_meta(self, scheduler_output: Any) -> None:
        return None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Runner:
    """Plays scripts; the configuration is made once, and changed for each."""

    def __init__(self, model_folder: str) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(model=model_folder, dtype="float32", max_model_len=4096),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=4096, is_encoder_decoder=False, async_scheduling=False, enable_chunked_prefill=True
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="LoadsWhatIsAsked", kv_connector_module_path="vllm_scheduler", kv_role="kv_consumer"
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            device_config=DeviceConfig("cpu"),
        )
        self.structured = StructuredOutputManager(self.config)
        init_none_hash(sha256)

    def play(self, script: dict[str, Any]) -> list[dict[str, Any]]:
        settings, config = script["config"], self.config
        block_size, blocks = settings["block_size"], settings["kv_blocks"] + 1
        config.model_config.max_model_len = settings["max_model_len"]
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "watermark",
        ):
            setattr(config.scheduler_config, name, settings[name])
        config.scheduler_config.policy = settings["scheduling_policy"]
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=self.structured,
            block_size=block_size,
            log_stats=True,
        )
        self.preempted: list[str] = []
        preempt = scheduler._preempt_request

        def recorded(request: Any, *args: Any, **more: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **more)

        scheduler._preempt_request = recorded
        hasher = get_request_block_hasher(block_size, sha256)
        self.names: dict[Any, str] = {}
        steps = []
        for number, (action, name) in enumerate(script["actions"]):
            asked = script["requests"].get(name)
            if action == "submit":
                params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True)
                params.extra_args = {
                    "kv_transfer_params": {"remote": min(asked["remote_tokens"], len(asked["prompt"]))}
                }
                scheduler.add_request(
                    Request(
                        name,
                        asked["prompt"],
                        params,
                        None,
                        arrival_time=float(number),
                        priority=asked["priority"],
                        block_hasher=hasher,
                    )
                )
            elif action == "abort":
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            elif action == "reset":
                scheduler.kv_cache_manager.reset_prefix_cache()
            elif action == "receive":
                request = scheduler.requests.get(name)
                loading = RequestStatus.WAITING_FOR_REMOTE_KVS
                if request is not None and (request.status == loading or request.is_finished()):
                    scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={name}))
            else:
                steps.append(self.step(script["requests"]))
        return steps

    def step(self, requests: dict[str, Any]) -> dict[str, Any]:
        scheduler = self.scheduler
        self.preempted.clear()
        before = {name: request.status for name, request in scheduler.requests.items()}
        output = scheduler.schedule()
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        awaited = [
            name
            for name, request in scheduler.requests.items()
            if request.status == loading and before[name] != loading
        ]
        events = self.events()
        sampled, ids = [], list(output.num_scheduled_tokens)
        prefills = {}
        for name in ids:
            request = scheduler.requests[name]
            whole = request.num_computed_tokens == request.num_tokens
            if whole and not request.num_output_tokens:
                stats = request.prefill_stats
                prefills[name] = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
            sampled.append([requests[name]["answer"][request.num_output_tokens]] if whole else [])
        running, waiting = scheduler.get_request_counts()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        scheduler.update_from_output(output, ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled))
        return {
            "scheduled": list(output.num_scheduled_tokens.items()),
            "preempted": list(self.preempted),
            "events": events,
            "awaited": sorted(awaited),
            "prefills": prefills,
            "running": running,
            "waiting": waiting,
            "free": free,
        }

    def events(self) -> list[list[str]]:
        """[kind, block], each block named by all tokens up to its end."""
        listed = []
        for event in self.scheduler.kv_cache_manager.take_events():
            kind = type(event).__name__
            if kind == "BlockStored":
                size, text = event.block_size, self.names.get(event.parent_block_hash, "")
                for index, value in enumerate(event.block_hashes):
                    text += "".join(f"{token} " for token in event.token_ids[index * size : (index + 1) * size])
                    self.names[value] = text
                    listed.append(["stored", text])
            elif kind == "AllBlocksCleared":
                listed.append(["cleared", ""])
            else:
                listed += [["removed", self.names[value]] for value in event.block_hashes]
        return listed


@functools.cache
def _runner(model: str) -> Runner:
    return Runner(model)


def play(model: str, script: dict[str, Any]) -> list[Any]:
    """What every step of the script scheduled, with this model's configuration."""
    return _runner(model).play(script)
