"""What the connector costs an engine in a step, without an engine and without vLLM: its plug-in, its events and its checksums.

A module for inside_vllm.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from pointsman_connector import engine_plugin
from pointsman_connector.layerwise.block_sums import BlockSums, Region
from pointsman_connector.layerwise.event_waiter import EventWaiter

# An agent's end of the socket.
AGENT = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(sys.argv[1])
print("bound", flush=True)
while True:
    socket.recv()
"""


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


def events_us(device: str, *, layers: int, rounds: int) -> float:
    """Median time that the events of a step with so many layers take the engine's thread, us. On a CPU none is recorded."""
    waiter = EventWaiter(partial(torch.cuda.Event, blocking=True) if device == "cuda" else None, _failed)
    work = torch.ones(1024, 1024, device=device)
    taken = []
    for _ in range(rounds):
        took = 0.0
        for _ in range(layers):
            work = work * 1.0001
            began = time.perf_counter()
            waiter.after_launched(lambda: None)
            took += time.perf_counter() - began
        taken.append(took)
        work.cpu()
    waiter.close()
    return 1e6 * statistics.median(taken)


def _failed(error: BaseException) -> None:
    raise RuntimeError("an event could not be waited for") from error


def sums_us(device: str, *, layers: int, block_bytes: int, rounds: int) -> float:
    """Median time that the checksums of four blocks of a prompt take the engine's thread, us. `block_bytes`: of one layer."""
    caches = [torch.ones((16, block_bytes), dtype=torch.uint8, device=device) for _ in range(layers)]
    sums = BlockSums(caches, [Region(cache.data_ptr(), block_bytes, block_bytes) for cache in caches])
    taken = []
    for number in range(rounds):
        began = time.perf_counter()
        found = sums.enqueue([number % 12 + at for at in range(4)])
        taken.append(time.perf_counter() - began)
        if device == "cuda":
            torch.cuda.synchronize()
        assert len(found) == 4
    return 1e6 * statistics.median(taken)
