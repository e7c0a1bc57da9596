"""Two layer-wise workers in one process, over CPU tensors: the sender's layers run on an emulated stream, writes are copies.

A module for inside_vllm.py. The workers are the real ones, and speak ZMQ with each other; only the transfer engine, the process
groups and the bootstrap server are replaced.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm import envs
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from pointsman_connector.layerwise import receiver as layerwise_receiver
from pointsman_connector.layerwise import sender as layerwise_sender
from pointsman_connector.layerwise.chunks import Chunk
from pointsman_connector.layerwise.kv_checks import CheckSettings
from pointsman_connector.layerwise.receiver import LayerwiseWorker

# In an engine's process this file's folder is on the path, and the package `tests` is not.
if TYPE_CHECKING:
    from tests.support.engines.emulated_stream import EmulatedStream
else:
    from emulated_stream import EmulatedStream

BLOCK_TOKENS, HEADS, HEAD_SIZE = 32, 4, 64
BLOCKS = 160
# Of this size each layer of a prompt is worth a write of its own.
PROMPT_BLOCKS = 16
WITHIN_S = 30.0


class CopyingEngine:
    """A transfer engine whose writes are copies within this process."""

    def __init__(self) -> None:
        self.writes: list[tuple[float, float, int]] = []
        self.write_s = 0.0
        # Whether a write is reported as complete before its bytes arrive, which they do by `arrive_late`.
        self.late = False
        self._late_copies: list[tuple[int, bytes]] = []
        # Called before the bytes of a write are read.
        self.before_reading: Callable[[], object] = lambda: None

    def initialize(self, *_: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_register_memory(self, *_: Any) -> int:
        return 0

    def batch_transfer_async_write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        began = time.perf_counter()
        self.before_reading()
        time.sleep(self.write_s)
        copies = [
            (target, ctypes.string_at(source, length)) for source, target, length in zip(src, dst, lengths, strict=True)
        ]
        if self.late:
            self._late_copies += copies
        else:
            self._arrive(copies)
        self.writes.append((began, time.perf_counter(), sum(lengths)))
        return 1

    def arrive_late(self) -> None:
        """The bytes of all writes arrive."""
        self.late = False
        self._arrive(self._late_copies)

    def _arrive(self, copies: list[tuple[int, bytes]]) -> None:
        for target, bytes_ in copies:
            ctypes.memmove(target, bytes_, len(bytes_))

    def batch_transfer_sync_write(self, *arguments: Any) -> int:
        return 0 if self.batch_transfer_async_write(*arguments) else -1

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return 0


class Worker(LayerwiseWorker):
    """A worker whose layers run on `stream`."""

    _block_sums: Any

    def __init__(self, stream: EmulatedStream | None, *arguments: Any) -> None:
        self.stream = stream
        super().__init__(*arguments)

    def _new_event(self) -> Any:
        return self.stream.new_event if self.stream is not None else None

    async def register_worker_with_bootstrap(self) -> None: ...

    def shutdown(self) -> None:
        """Do nothing: vLLM's own waits for sockets that only the end of the process closes."""


@contextmanager
def pair(model_folder: str, layers: int, make: Callable[..., Worker] = Worker, **extra_config: Any) -> Iterator[Pair]:
    """A sender on an emulated stream and a receiver, with caches of `layers` layers. `make` makes their workers."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    cache_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])
    config = VllmConfig(
        model_config=ModelConfig(model=model_folder, dtype="float32", max_model_len=4096),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS),
        scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeConnector", kv_role="kv_both", kv_connector_extra_config=extra_config
        ),
        device_config=DeviceConfig("cpu"),
    )
    stream = EmulatedStream()
    stand_ins: dict[str, Any] = {
        "TransferEngine": CopyingEngine,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
        "get_current_attn_backends": lambda *_: [CPUAttentionBackend],
        "get_current_attn_backends_and_specs": lambda *_: ([CPUAttentionBackend], [spec]),
        "select_common_block_size": lambda size, *_: size,
        "should_launch_bootstrap_server": lambda _: False,
        "current_platform": SimpleNamespace(set_device=lambda _: None),
    }
    with (
        mock.patch.multiple(upstream, **stand_ins),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
    ):
        made = [make(stream, config, name, cache_config) for stream, name in ((stream, "P"), (None, "D"))]
        caches = []
        for worker in made:
            # K and V of a head side by side, as the CPU backend has them.
            tensors = {name: torch.zeros((BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)) for name in names}
            worker.register_kv_caches(tensors)
            caches.append(tensors)
        try:
            yield Pair(stream, made[0], made[1], caches[0], caches[1], names)
        finally:
            stream.close()
            for worker in made:
                worker.shutdown()


class Pair:
    """A sender, a receiver and their caches."""

    def __init__(
        self,
        stream: EmulatedStream,
        sender: Worker,
        receiver: Worker,
        source: dict[str, torch.Tensor],
        target: dict[str, torch.Tensor],
        names: list[str],
    ) -> None:
        self.stream, self.sender, self.receiver = stream, sender, receiver
        self.source, self.target, self.names = source, target, names
        self._generator = torch.Generator().manual_seed(1)
        self._right = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        # How many writes must have read their bytes before this layer is computed.
        self.writes_before: Callable[[int], int] = lambda layer: 0
        # Called in the stream before the checksums of the steps that are launched from now on.
        self.before_sums: Callable[[], object] = lambda: None
        self._computed = 0
        self._blocks: dict[str, list[int]] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()

    @property
    def engine(self) -> CopyingEngine:
        """The sender's transfer engine."""
        engine: CopyingEngine = self.sender.engine._engine
        return engine

    def ask(self, transfer_id: str, blocks: list[int]) -> None:
        """The receiver asks for a prompt's KV, into these blocks."""
        self._blocks[transfer_id] = blocks
        pull = upstream.PullReqMeta(f"d-{transfer_id}", transfer_id, [list(blocks)], "P", "http://p:1")
        pull.pull_tasks_count = 1
        address = f"tcp://{self.sender.hostname}:{self.sender.side_channel_port}"
        coroutine = self.receiver.receive_kv_from_single_worker(address, {pull.d_req_id: pull})
        asyncio.run_coroutine_threadsafe(coroutine, self.receiver.receiver_loop)
        # The sender must know of it before it computes.
        self._until(lambda: self._asked(transfer_id))

    def release(self, transfer_id: str) -> None:
        """The receiver, which has asked, releases the prompt's blocks at the sender, as vLLM does for a request that its client
        cancels. Returns when this is answered."""
        pull = upstream.PullReqMeta(f"r-{transfer_id}", transfer_id, [], "P", "http://p:1")
        pull.pull_tasks_count = 1
        address = f"tcp://{self.sender.hostname}:{self.sender.side_channel_port}"
        coroutine = self.receiver.receive_kv_from_single_worker(address, {pull.d_req_id: pull})
        asyncio.run_coroutine_threadsafe(coroutine, self.receiver.receiver_loop).result(WITHIN_S)

    def _asked(self, transfer_id: str) -> bool:
        transfer = self.sender._transfers.get(transfer_id)
        return transfer is not None and bool(transfer.receivers)

    def begin(self, transfer_id: str) -> None:
        """The sender's scheduler starts the prompt."""
        metadata = upstream.MooncakeConnectorMetadata()
        metadata.reqs_to_send[f"p-{transfer_id}"] = (transfer_id, [])
        self.sender.start_load_kv(metadata)

    def end(self, transfer_id: str, blocks: list[int]) -> None:
        """The sender's scheduler has the prompt's end."""
        metadata = upstream.MooncakeConnectorMetadata()
        metadata.reqs_to_send[f"p-{transfer_id}"] = (transfer_id, [list(blocks)])
        self.sender.start_load_kv(metadata)

    def step(self, transfer_id: str, blocks: list[int], *, layer_s: float, launch_s: float = 0.0, **more: Any) -> None:
        """One step computes a whole prompt. Returns when it is launched."""
        chunk = Chunk(
            transfer_id,
            f"p-{transfer_id}",
            tuple(blocks),
            len(blocks),
            len(blocks),
            more.get("restarted", False),
            tuple((place, blocks[-place]) for place in more.get("check", (1, 2)) if place <= len(blocks)),
        )
        self.sender.begin_step([chunk], aborted=(), preempted=())
        for name in self.names:
            values = torch.rand(self.source[name][blocks].shape, generator=self._generator)
            self._right[name][blocks] = values
            self.stream.launch(layer_s, partial(self._compute, name, blocks, values))
            self.sender.save_layer(name)
            time.sleep(launch_s)
        self.sums_in_stream()

    def sums_in_stream(self) -> None:
        """The checksums are kernels of the stream, too."""
        sums, worker = self.sender._block_sums, self.sender

        class Launched:
            def enqueue(_, blocks: list[int]) -> torch.Tensor:  # noqa: N805
                found = torch.zeros(len(blocks), dtype=torch.int64)
                self.stream.launch(0.0, self.before_sums)
                self.stream.launch(0.0, lambda: found.copy_(sums.of(blocks)))
                return found

        worker._block_sums = Launched()
        try:
            worker.end_step()
        finally:
            worker._block_sums = sums

    def end_when_written(self, transfer_id: str, blocks: list[int]) -> None:
        """As `end`, when the receivers have all bytes. Returns when the sender has done all that it does without further
        checksums: its answer, too, if it does not wait for them."""
        transfer = self.sender._transfers[transfer_id]
        computed = transfer.computed
        assert computed is not None
        self._until(
            lambda: self._in_sender(
                lambda: all(receiver.delivery.done(computed) for receiver in transfer.receivers.values())
            )
        )
        self.end(transfer_id, blocks)
        self._until(transfer.scheduler_confirmed.is_set)
        # The tasks that waited for it run now, each until it waits for something else.
        for _ in range(10):
            self._in_sender(lambda: None)

    def check_before_arrival(self, before_further: Callable[[], None]) -> None:
        """The bytes of all writes arrive after the receiver's first check. `before_further` is called before each further one."""
        sums, checks = self.receiver._block_sums, itertools.count()
        assert sums is not None
        self.engine.late = True

        class Early:
            def now(_, blocks: list[int]) -> list[int]:  # noqa: N805
                if next(checks):
                    before_further()
                found: list[int] = sums.now(blocks)
                if self.engine.late:
                    self.engine.arrive_late()
                return found

        self.receiver._block_sums = Early()

    def _in_sender(self, call: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), self.sender.sender_loop).result(WITHIN_S)

    def _compute(self, name: str, blocks: list[int], values: torch.Tensor) -> None:
        self._until(lambda: len(self.engine.writes) >= self.writes_before(self._computed))
        self._computed += 1
        self._fill(name, blocks, values)

    def _fill(self, name: str, blocks: list[int], values: torch.Tensor) -> None:
        self.source[name][blocks] = values

    def overwrite(self, blocks: list[int]) -> None:
        """Another prompt's KV gets into these blocks of the sender."""
        for name in self.names:
            self.stream.launch(0.0, partial(self._fill, name, blocks, torch.full_like(self.source[name][blocks], 9.0)))

    def arrived(self, transfer_id: str) -> bool:
        """Wait until the receiver has the prompt; whether it may use it."""
        self._until(lambda: f"d-{transfer_id}" in self.received())
        return not self._invalid.intersection(self._blocks[transfer_id])

    def received(self) -> set[str]:
        """The requests that the receiver has said to be over, well or not."""
        self._received |= self.receiver.transfer_results(idle=False).finished_recving
        self._invalid |= self.receiver.get_block_ids_with_load_errors()
        return self._received

    def equal(self, sent: list[int], received: list[int]) -> bool:
        """Whether the receiver has in these blocks what the sender computed in those."""
        return all(torch.equal(self._right[name][sent], self.target[name][received]) for name in self.names)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"threads: {[thread.name for thread in threading.enumerate()]}")
            time.sleep(0.002)


def layer_by_layer(
    model_folder: str, layers: int, prompts: int, layer_ms: float = 0.0, launch_ms: float = 0.0, gated: bool = False
) -> dict[str, Any]:
    """`prompts` prompts, launched one after the other without a pause. `gated`: no layer is computed before the one before it has
    been written. Without: each takes `layer_ms`, and the answer tells how many writes it took and when the last one ended."""
    with pair(model_folder, layers, num_workers=1) as both:
        sent = [list(range(1 + PROMPT_BLOCKS * number, 1 + PROMPT_BLOCKS * (number + 1))) for number in range(prompts)]
        received = [[BLOCKS - 1 - block for block in blocks] for blocks in sent]
        for number in range(prompts):
            both.ask(f"t{number}", received[number])
            both.begin(f"t{number}")
        if gated:
            both.writes_before = lambda layer: layer
        launched = time.perf_counter()
        for number in range(prompts):
            both.step(f"t{number}", sent[number], layer_s=layer_ms / 1e3, launch_s=launch_ms / 1e3)
        launched = time.perf_counter() - launched
        usable = [both.arrived(f"t{number}") for number in range(prompts)]
        equal = [both.equal(sent[number], received[number]) for number in range(prompts)]
        result = {
            "usable": usable,
            "equal": equal,
            "writes": len(both.engine.writes),
            "checked": len(both.receiver.xfer_stats.data["num_checked_requests"]),
        }
        if ended := both.stream.ended_at:
            result |= {
                "launch_s": launched,
                "computed_s": ended[-1] - ended[0],
                "last_write_after_s": both.engine.writes[-1][1] - ended[-1],
            }
        return result


def checksum_ms(model_folder: str, layers: int, rounds: int) -> dict[str, float]:
    """What the checksums of a transfer cost one side: milliseconds of CPU time (median), and the MiB that they read."""
    blocks = CheckSettings().blocks
    with pair(model_folder, layers) as both:
        sums = both.receiver._block_sums
        assert sums is not None
        taken = []
        for number in range(rounds):
            began = time.thread_time()
            sums.of(range(number % 10, number % 10 + blocks)).tolist()
            taken.append(time.thread_time() - began)
        layer = next(iter(both.target.values()))
        return {
            "ms": statistics.median(taken) * 1e3,
            "mib": blocks * layers * layer[0].nbytes / 2**20,
        }


def wrong_kv(model_folder: str, fault: str, rank: int = 0) -> dict[str, Any]:
    """A prompt of 8 blocks is sent with a fault put back: whether its receiver took it, and whether the bytes are the same.
    "early": layers are told to be computed when they are launched (as a microbatch's hook is called before the others have run).
    "one name": only the first layer is registered for a row of all (block-outermost layouts). "reused": the prompt is preempted
    when it is computed, another one gets its blocks, and no one is told. "late": writes are reported as complete before their
    bytes arrive, which is no fault of the sender. "none": no fault. `rank`: the receiver's among its tensor parallel workers."""
    sent, received = list(range(1, 9)), list(range(40, 48))
    with pair(model_folder, 6) as both:
        sender: Any = both.sender
        overwritten = threading.Event()
        if fault == "early":
            sender.save_layer = lambda layer: sender._post(sender._saved, layer)
            sender._in_loop = sender._post
            both.writes_before = lambda layer: 1
        if fault == "one name":
            sender._layers_in = lambda region: [both.names[0]]
            both.writes_before = lambda layer: min(layer, 1)
        if fault == "reused":
            both.engine.before_reading = partial(overwritten.wait, WITHIN_S)
        if fault == "late":
            both.check_before_arrival(lambda: None)
        both.ask("t", received)
        # The sender, which is alone, has heard of a receiver that is alone.
        both.receiver.tp_rank = rank
        both.begin("t")
        both.step("t", sent, layer_s=0.001)
        if fault == "reused":
            both.overwrite(sent)
            both.stream.launch(0.0, overwritten.set)
        used = both.arrived("t")
        refused = "P" in both.receiver._refused
        same = both.equal(sent, received)
        counted = dict(both.receiver.xfer_stats.data)
        return {
            "used": used,
            "same": same,
            "refused": refused,
            "checked": len(counted["num_checked_requests"]),
            "wrong": sum(map(len, (v for k, v in counted.items() if k.startswith("num_wrong")))),
        }


def repeated_check_fails(model_folder: str) -> dict[str, Any]:
    """Right KV arrives after its answer, so that it is checked again, and the further check raises an error."""
    with pair(model_folder, 6) as both:

        def fail() -> None:
            raise torch.OutOfMemoryError("no memory for checksums")

        both.check_before_arrival(fail)
        both.ask("t", list(range(40, 48)))
        both.begin("t")
        both.step("t", list(range(1, 9)), layer_s=0.005)
        used = both.arrived("t")
        return {"used": used, "refused": "P" in both.receiver._refused}


def preempted(model_folder: str, sums_s: float) -> dict[str, Any]:
    """A prompt is preempted when all its layers are computed, while a write reads its blocks, and then computed anew in others.
    The receiver has everything before the new checksums are there, for which the sender waits `sums_s`."""
    sent, again, received = list(range(1, 9)), list(range(20, 28)), list(range(40, 48))
    with pair(model_folder, 6) as both, mock.patch.object(layerwise_sender, "SUMS_S", sums_s):
        may_sum = threading.Event()
        both.engine.before_reading = lambda: time.sleep(0.1)
        both.ask("t", received)
        both.begin("t")
        both.step("t", sent, layer_s=0.005)
        both.sender.begin_step([], aborted=(), preempted=["t"])
        both.overwrite(sent)
        time.sleep(0.5)
        early = "d-t" in both.received()
        both.before_sums = partial(may_sum.wait, WITHIN_S)
        both.step("t", again, layer_s=0.005, restarted=True)
        both.end_when_written("t", again)
        may_sum.set()
        used = both.arrived("t")
        checked = len(both.receiver.xfer_stats.data["num_checked_requests"])
        return {"early": early, "used": used, "same": both.equal(again, received), "checked": checked}


def preempted_after_its_end(model_folder: str) -> dict[str, Any]:
    """A prompt is preempted by the step after its last one, when its receiver has it and the scheduler does not know that it is
    complete (async scheduling). It is computed anew, and its blocks are free once the scheduler has its end."""
    sent, again, received = list(range(1, 9)), list(range(20, 28)), list(range(40, 48))
    with pair(model_folder, 6) as both:
        sender = both.sender
        both.ask("t", received)
        both.begin("t")
        both.step("t", sent, layer_s=0.001)
        used, same = both.arrived("t"), both.equal(sent, received)
        sender.begin_step([], aborted=(), preempted=["t"])
        both.overwrite(sent)
        both.step("t", again, layer_s=0.001, restarted=True)
        freed = set(sender.transfer_results(idle=False).finished_sending)
        early = bool(freed)
        both.end("t", again)

        def has_freed() -> bool:
            freed.update(sender.transfer_results(idle=False).finished_sending)
            return bool(freed)

        both._until(has_freed)
        both._until(lambda: not sender._transfers)
        return {"used": used, "same": same, "early": early, "freed": sorted(freed), "kept": len(sender._transfer_of)}


def released_while_it_is_written(model_folder: str, aborted: bool) -> dict[str, Any]:
    """A receiver's request is cancelled, so that it releases a prompt's blocks while a write to it still reads them. `aborted`:
    the prompt is aborted then, too, and another one gets its blocks."""
    sent, received = list(range(1, 9)), list(range(40, 48))
    with pair(model_folder, 6) as both:
        sender = both.sender
        reads, may_read = threading.Event(), threading.Event()

        def before_reading() -> None:
            reads.set()
            may_read.wait(WITHIN_S)

        both.engine.before_reading = before_reading
        both.ask("t", received)
        both.begin("t")
        both.step("t", sent, layer_s=0.001)
        reads.wait(WITHIN_S)
        both.release("t")
        if aborted:
            metadata = upstream.MooncakeConnectorMetadata()
            metadata.reqs_not_processed.add("t")
            sender.begin_step([], aborted=["t"], preempted=())
            sender.start_load_kv(metadata)
            both.overwrite(sent)
        else:
            both.end("t", sent)
        time.sleep(0.2)
        early = bool(sender.transfer_results(idle=False).finished_sending)
        may_read.set()
        used = both.arrived("t")
        return {"early": early, "used": used, "refused": "P" in both.receiver._refused}


def fails_after_an_answer(model_folder: str) -> dict[str, list[Any]]:
    """A sender answers one request of a message, and then fails: what the receiver is told to be over, with the blocks that lack
    KV, in this order."""
    with pair(model_folder, 2) as both:
        sender: Any = both.sender
        may_fail = asyncio.Event()

        async def serve(identity: bytes, sock: Any, meta: Any) -> None:
            answer = upstream.MooncakeXferResponse(upstream.MooncakeXferResponseStatus.CONTINUE, ok_reqs=["d-a"])
            await sock.send_multipart((identity, sender._encoder.encode(answer)))
            await may_fail.wait()
            raise RuntimeError("a test")

        sender.send_kv_to_decode = serve
        pulls = {}
        for name, block in (("a", 40), ("b", 41)):
            pulls[f"d-{name}"] = upstream.PullReqMeta(f"d-{name}", name, [[block]], "P", "http://p:1")
            pulls[f"d-{name}"].pull_tasks_count = 1
        address = f"tcp://{sender.hostname}:{sender.side_channel_port}"
        coroutine = both.receiver.receive_kv_from_single_worker(address, pulls)
        conversation = asyncio.run_coroutine_threadsafe(coroutine, both.receiver.receiver_loop)
        told: list[Any] = []

        def tells() -> bool:
            told.extend(sorted(both.receiver.transfer_results(idle=False).finished_recving))
            return bool(told)

        both._until(tells)
        sender.sender_loop.call_soon_threadsafe(may_fail.set)
        conversation.result(WITHIN_S)
        tells()
        return {"told": told, "invalid": sorted(both.receiver.get_block_ids_with_load_errors())}


def expires_while_it_is_written(model_folder: str) -> dict[str, bool]:
    """The abort timeout passes while a write of the prompt's first layer reads it, and the second one is not computed."""
    sent, received = list(range(1, 1 + PROMPT_BLOCKS)), list(range(40, 40 + PROMPT_BLOCKS))
    abort_s = 1
    with pair(model_folder, 6) as both, mock.patch.object(envs, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", abort_s):
        reads, may_read = threading.Event(), threading.Event()

        def before_reading() -> None:
            reads.set()
            may_read.wait(WITHIN_S)

        both.engine.before_reading = before_reading
        both.writes_before = lambda layer: min(layer, 1)
        both.ask("t", received)
        both.begin("t")
        both.step("t", sent, layer_s=0.001)
        reads.wait(WITHIN_S)
        time.sleep(abort_s + 0.5)
        early = "d-t" in both.received()
        may_read.set()
        return {"early": early, "used": both.arrived("t")}


def waits_for_a_thread(model_folder: str, passed_s: float) -> dict[str, Any]:
    """The write after the prefill waits until the sender's only thread is free; meanwhile `passed_s` pass."""
    sent, received = list(range(1, 9)), list(range(40, 48))
    with pair(model_folder, 6, num_workers=1) as both:
        sender = both.sender
        free = threading.Event()
        executor = sender._sender_executor
        executor.submit(free.wait, WITHIN_S)
        sender._push_off = "a test"
        both.ask("t", received)
        both.begin("t")
        both.step("t", sent, layer_s=0.001)
        both.end("t", sent)
        both._until(lambda: bool(executor._work_queue.qsize()))
        sender.engine._clock = lambda: time.monotonic() + passed_s
        free.set()
        return {"used": both.arrived("t"), "writes": len(both.engine.writes)}


def senders_out_of_reach(model_folder: str, probes: int) -> list[str]:
    """The warnings of two receivers of the same sender, which each cannot reach it `probes` times before it is gone."""
    warnings: list[str] = []
    failures: list[OSError] = [*(OSError(113, "No route to host") for _ in range(probes)), ConnectionRefusedError()]

    async def wait() -> None:
        for _ in range(2):
            with mock.patch.object(asyncio, "open_connection", mock.AsyncMock(side_effect=failures)):
                await layerwise_receiver._wait_until_gone("tcp://p:1")

    with (
        mock.patch.multiple(layerwise_receiver, PROBE_S=0.0, GRACE_S=0.0),
        mock.patch.object(
            layerwise_receiver.logger, "warning", lambda text, *values, **_: warnings.append(text % values)
        ),
    ):
        asyncio.run(wait())
    return warnings


def sleeps(model_folder: str, data_parallel_size: int) -> dict[str, int]:
    """How often the receiver sleeps in a step: without a request that waits for KV, in a step that computes, and in one that
    computes nothing."""

    def make(stream: EmulatedStream | None, config: VllmConfig, *more: Any) -> Worker:
        config.parallel_config.data_parallel_size = data_parallel_size
        return Worker(stream, config, *more)

    with pair(model_folder, 2, make) as both:
        both.receiver._arrived = arrived = mock.Mock(wraps=threading.Event())
        counts = {}
        for name, waits, idle in (("nothing awaited", False, True), ("computes", True, False), ("idle", True, True)):
            both.receiver._awaited = {"d-t"} if waits else set()
            arrived.wait.reset_mock()
            both.receiver.transfer_results(idle=idle)
            counts[name] = arrived.wait.call_count
        return counts
