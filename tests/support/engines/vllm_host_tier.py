"""vLLM's own scheduler with its OffloadingConnector, without an engine: runs scripts of arrivals, steps and waits in virtual
time, and tells what every step scheduled, and what the host tier and storage have.

A module for inside_vllm.py; tests/engine/test_host_tier.py has the shape of scripts and answers. The worker is a fake: a step
takes 1 s if it schedules anything. Transfers of one direction run one after the other, and take the script's times. Storage is
a set of blocks beside vLLM's TieringOffloadingManager.
"""

from __future__ import annotations

import functools
from collections import Counter
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
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class Direction(list[tuple[float, int, str]]):
    """Transfers that run one after the other: (end, job, request)."""

    def __init__(self, settings: dict[str, Any], tier: str) -> None:
        self.free_at = 0.0
        self.latency_s = settings[f"{tier}_s"]
        self.block_s = settings[f"{tier}_token_s"] * settings["block_size"]

    def begin(self, job: int, request: str, blocks: int, now: float) -> None:
        self.free_at = max(now, self.free_at) + self.latency_s + self.block_s * blocks
        self.append((self.free_at, job, request))

    def ended(self, now: float) -> list[tuple[float, int, str]]:
        """Remove and return the transfers that have ended by `now`."""
        ended = [entry for entry in self if entry[0] <= now]
        self[:] = [entry for entry in self if entry[0] > now]
        return ended


class Region:
    """The host memory of a CPUPrimaryTierOffloadingManager, which nobody reads or writes."""

    def __init__(self, chunks: int) -> None:
        self.view = memoryview(bytearray(chunks)).cast("B", (chunks, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self.view


class Storage(SecondaryTierManager):  # type: ignore[misc]
    """As FileSystemTierManager: a block that is there is not written again, and no block is ever evicted. It knows at once
    whether it has a block, which that class asks a thread."""

    medium = Medium.STORAGE

    def __init__(self, runner: Runner, view: memoryview) -> None:
        super().__init__(None, view, "storage")
        self.runner = runner
        self.keys: set[Any] = set()
        self.jobs: dict[int, TransferJob] = {}
        self.writes, self.reads = (Direction(runner.settings, "storage") for _ in range(2))
        self.events: list[OffloadingEvent] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self.keys else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        new = len([key for key in job_metadata.keys if key not in self.keys])
        self.jobs[job_metadata.job_id] = job_metadata
        self.writes.begin(job_metadata.job_id, job_metadata.req_context.req_id, new, self.runner.now)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.jobs[job_metadata.job_id] = job_metadata
        keys = len(job_metadata.keys)
        self.reads.begin(job_metadata.job_id, job_metadata.req_context.req_id, keys, self.runner.now)

    def get_finished_jobs(self) -> list[JobResult]:
        done = []
        for _, job, _ in (*self.reads.ended(self.runner.now), *self.writes.ended(self.runner.now)):
            metadata = self.jobs.pop(job)
            if not metadata.is_promotion:
                self.keys.update(metadata.keys)
                self.events.append(OffloadingEvent(keys=list(metadata.keys), medium=self.medium, removed=False))
            done.append(JobResult(job_id=job, success=True))
        return done

    def take_events(self) -> list[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        raise NotImplementedError


class Runner:
    """Plays one script."""

    def __init__(self, model: str, script: dict[str, Any]) -> None:
        self.settings, self.requests = script["config"], script["requests"]
        block_size, blocks = self.settings["block_size"], self.settings["kv_blocks"] + 1
        config = _config(model, self.settings["host_blocks"])
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            setattr(config.scheduler_config, name, self.settings[name])
        config.scheduler_config.policy = self.settings["scheduling_policy"]
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        self.connector = scheduler.connector.connector_scheduler
        self.host = self.connector.manager
        assert self.host._num_chunks == self.settings["host_blocks"]
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.now = 0.0
        self.names: dict[Any, str] = {}
        self.preempted: list[str] = []
        self.ended: list[str] = []
        self.batches: list[Any] = []
        self.stores, self.loads = (Direction(self.settings, "host") for _ in range(2))
        self.tiers = None
        if script["storage"]:
            region = Region(self.settings["host_blocks"])
            self.host = CPUPrimaryTierOffloadingManager(self.settings["host_blocks"], region, enable_events=True)
            self.storage = Storage(self, region.view)
            self.connector.manager = self.tiers = TieringOffloadingManager(self.host, [self.storage])
        scheduler.kv_event_publisher.publish = self.batches.append
        self._record()

    def _record(self) -> None:
        """Record the order of preemptions, and in which requests end: vLLM keeps these in a set."""
        scheduler, connector = self.scheduler, self.connector
        preempt, build, finished = (
            scheduler._preempt_request,
            connector.build_connector_meta,
            connector.request_finished,
        )

        def preempted(request: Any, *args: Any, **more: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **more)

        def ended(request: Any) -> Any:
            self.ended.append(request.request_id)
            return finished(request)

        def built(output: Any) -> Any:
            output.finished_req_ids = sorted(output.finished_req_ids, key=self.ended.index)
            return build(output)

        scheduler._preempt_request = preempted
        connector.request_finished, connector.build_connector_meta = ended, built

    def play(self, actions: list[list[Any]]) -> list[dict[str, Any]]:
        steps = []
        for number, (action, name) in enumerate(actions):
            if action == "submit":
                asked = self.requests[name]
                self.scheduler.add_request(
                    Request(
                        name,
                        asked["prompt"],
                        SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True),
                        None,
                        arrival_time=float(number),
                        priority=asked["priority"],
                        block_hasher=self.hasher,
                    )
                )
            elif action == "abort":
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            elif action == "wait":
                self.now += name
            else:
                steps.append(self.step())
        return steps

    def step(self) -> dict[str, Any]:
        scheduler, now = self.scheduler, self.now
        self.preempted.clear()
        self.batches.clear()
        # An idle engine steps on while there are transfers, and has heard of those that ended since the last step.
        scheduler._update_from_kv_xfer_finished(self._done(now))
        self._storage_done()
        before = {name: request.status for name, request in scheduler.requests.items()}
        output = scheduler.schedule()
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        awaited = [
            name
            for name, request in scheduler.requests.items()
            if request.status == loading and before[name] != loading
        ]
        meta, jobs = output.kv_connector_metadata, self.connector._jobs
        for job, load in meta.load_jobs.items():
            self.loads.begin(job, load.req_id, len(jobs[job].keys), now)
        # Blocks of ended requests that are allocated again are waited for, too: the model has no physical blocks. A step that
        # schedules nothing waits as well: GPUModelRunner.execute_model() calls handle_preemptions() first.
        waits = [end for end, _, name in self.stores if name in self.preempted]
        duration = max([0.0, *(end - now for end in waits)]) + (1.0 if output.num_scheduled_tokens else 0.0)
        self.now += duration
        for job, store in meta.store_jobs.items():
            self.stores.begin(job, store.req_id, len(jobs[job].keys), self.now)
        ids, sampled, prefills = list(output.num_scheduled_tokens), [], {}
        for name in ids:
            request = scheduler.requests[name]
            whole = request.num_computed_tokens == request.num_tokens
            if whole and not request.num_output_tokens:
                stats = request.prefill_stats
                prefills[name] = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
            sampled.append([self.requests[name]["answer"][request.num_output_tokens]] if whole else [])
        running, waiting = scheduler.get_request_counts()
        positions = {name: at for at, name in enumerate(ids)}
        done = self._done(self.now)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() + self._freed_by(done)
        # vLLM hears of these in the next step.
        self._storage_done()
        scheduler.update_from_output(output, ModelRunnerOutput(ids, positions, sampled, kv_connector_output=done))
        own, host = self._events()
        return {
            "seconds": duration,
            "scheduled": list(output.num_scheduled_tokens.items()),
            "preempted": list(self.preempted),
            "events": own,
            "host events": host,
            "awaited": sorted(awaited),
            "prefills": prefills,
            "running": running,
            "waiting": waiting,
            "free": free,
            "host": self._host(),
            "storage": sorted(self._name(key) for key in self.storage.keys) if self.tiers else [],
        }

    def _done(self, now: float) -> KVConnectorOutput:
        """What the worker tells of the transfers that have ended by `now`."""
        stored, loaded = self.stores.ended(now), self.loads.ended(now)
        meta = OffloadingWorkerMetadata(completed_jobs={job: 1 for _, job, _ in (*stored, *loaded)})
        return KVConnectorOutput(finished_recving={name for _, _, name in loaded}, kv_connector_worker_meta=meta)

    def _freed_by(self, done: KVConnectorOutput) -> int:
        """Number of blocks that these ends of loads will free, because their requests were aborted meanwhile."""
        scheduler = self.scheduler
        aborted = [name for name in done.finished_recving if scheduler.requests[name].is_finished()]
        held = Counter(
            block.block_id for name in aborted for block in scheduler.kv_cache_manager.get_blocks(name).blocks[0]
        )
        pool = scheduler.kv_cache_manager.block_pool
        return sum(pool.blocks[block].ref_cnt == users for block, users in held.items())

    def _storage_done(self) -> None:
        if self.tiers is not None:
            self.tiers._process_finished_jobs()

    def _name(self, key: Any) -> str:
        return self.names[maybe_convert_block_hash(get_offload_block_hash(key))]

    def _events(self) -> tuple[list[list[str]], list[list[str]]]:
        """[kind, block] of the engine's own cache and [kind, block, medium] of the tiers below, each block named by all tokens up
        to its end. An event of a tier below names its blocks in no order."""
        own: list[list[str]] = []
        host: list[list[str]] = []
        for event in [event for batch in self.batches for event in batch.events]:
            events, medium = (own, []) if event.medium == "GPU" else (host, [event.medium])
            if type(event).__name__ == "BlockStored":
                size, text = event.block_size, self.names.get(event.parent_block_hash, "")
                for index, value in enumerate(event.block_hashes):
                    if not size:
                        # A block that came from storage is published without its tokens if it was not looked up again yet.
                        events.append(["stored", self.names[value], *medium])
                        continue
                    text += "".join(f"{token} " for token in event.token_ids[index * size : (index + 1) * size])
                    self.names[value] = text
                    events.append(["stored", text, *medium])
            else:
                events += [["removed", self.names[value], *medium] for value in event.block_hashes]
        return own, sorted(host)

    def _host(self) -> list[list[Any]]:
        """The host tier's blocks, least recently used first: [block, transfers that read it, or -1]."""
        policy = self.host._policy
        ordered = sorted(policy.chunks, key=policy._ranks.__getitem__)
        return [[self._name(key), policy.chunks[key].ref_cnt] for key in ordered]


def _config(model: str, host_blocks: int) -> VllmConfig:
    settings = {
        "cpu_bytes_to_use": host_blocks * CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT,
        "blocks_per_chunk": 1,
        "self_describing_kv_events": True,
    }
    return VllmConfig(
        model_config=_model(model),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=4096, is_encoder_decoder=False, async_scheduling=False, enable_chunked_prefill=True
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        device_config=DeviceConfig("cpu"),
    )


@functools.cache
def _model(model: str) -> ModelConfig:
    init_none_hash(sha256)
    return ModelConfig(model=model, dtype="float32", max_model_len=4096)


def play(model: str, script: dict[str, Any]) -> list[Any]:
    """What every step of the script did."""
    return Runner(model, script).play(script["actions"])
