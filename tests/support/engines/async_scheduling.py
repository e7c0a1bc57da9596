"""vLLM's AsyncScheduler with the connector's scheduler side, and a worker that only keeps which token's KV is in which slot.

A module for inside_vllm.py; tests/engine/test_async_scheduling.py draws the scripts. Two batches are in flight: a step is
scheduled before the step before it has answered. Batches run in the order in which they were scheduled, as on a GPU's stream.

After each step every block that the connector's messages declare sendable must have the KV of its prompt: what is read from it
until the next message is then right, whenever it is read.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LAYERWISE = {
    "kv_connector": "LayerwiseMooncakeConnector",
    "kv_connector_module_path": "pointsman_connector.layerwise.connector",
}
# The token that each request generates.
ANSWER = 9
IN_FLIGHT = 2


class Bystander(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Another child of a MultiConnector, which has and saves nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Memory:
    """The worker: its block tables, and the text (a hash of all tokens up to it) whose KV each slot has."""

    def __init__(self, block_size: int, prompts: dict[str, list[int]]) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self._prompts = prompts
        self._tables: dict[str, list[int]] = {}
        self._texts: dict[str, list[int]] = {name: [] for name in prompts}

    def text(self, name: str, position: int) -> int:
        """Name of the request's tokens up to `position`."""
        texts, prompt = self._texts[name], self._prompts[name]
        while len(texts) <= position:
            token = prompt[len(texts)] if len(texts) < len(prompt) else ANSWER
            texts.append(hash((texts[-1] if texts else 0, token)))
        return texts[position]

    def write(self, name: str, block: int, position: int) -> None:
        self.slots[block, position % self.block_size] = self.text(name, position)

    def run(self, output: Any) -> dict[str, tuple[int, int]]:
        """Compute a step from what the engine's own worker gets; returns for each request the first position that was computed,
        and the first that was not."""
        computed = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        known = output.scheduled_cached_reqs
        for name, blocks, done in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            if name in known.resumed_req_ids:
                self._tables[name] = []
            self._tables[name] += blocks[0] if blocks is not None else []
            computed[name] = done
        ran = {}
        for name, tokens in output.num_scheduled_tokens.items():
            ran[name] = (computed[name], computed[name] + tokens)
            for position in range(*ran[name]):
                self.write(name, self._tables[name][position // self.block_size], position)
        return ran

    def holds(self, name: str, blocks: list[int], up_to: int) -> str:
        """Why the first `up_to` blocks of the prompt are not in these blocks; "" if they are."""
        length = len(self._prompts[name])
        for position in range(min(up_to * self.block_size, length)):
            block = blocks[position // self.block_size]
            if self.slots.get((block, position % self.block_size)) != self.text(name, position):
                return f"block {block} has not the KV of {name}'s position {position}"
        return ""


class Sendable:
    """What the connector's messages say of one transfer."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.up_to = self.total = 0
        self.confirmed = False
        # What the checked blocks had when they were summed: by slot, the text whose KV is there.
        self.summed: dict[tuple[int, int], int | None] = {}


class Engine:
    """One engine that plays a script; `counts` says what has happened."""

    def __init__(self, config: VllmConfig, structured: Any, script: dict[str, Any]) -> None:
        settings, self.requests = script["config"], script["requests"]
        self.block_size, blocks = settings["block_size"], settings["kv_blocks"] + 1
        self.multi, self.producer = settings["multi"], settings["kv_role"] == "kv_producer"
        config.model_config.max_model_len = settings["max_model_len"]
        for name in ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "policy"):
            setattr(config.scheduler_config, name, settings[name])
        config.scheduler_config.async_scheduling = True
        config.cache_config.block_size = self.block_size
        config.cache_config.num_gpu_blocks = blocks
        role = {"kv_role": settings["kv_role"]}
        config.kv_transfer_config = KVTransferConfig(**LAYERWISE, **role)
        if self.multi:
            bystander = {"kv_connector": "Bystander", "kv_connector_module_path": "async_scheduling", **role}
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_connector_extra_config={"connectors": [bystander, {**LAYERWISE, **role}]},
                **role,
            )
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=structured,
            block_size=self.block_size,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = settings["v2_runner"]
        self.memory = Memory(self.block_size, {name: request["prompt"] for name, request in self.requests.items()})
        self.hasher = get_request_block_hasher(self.block_size, sha256)
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.sendable: dict[str, Sendable] = {}
        self.awaited: dict[str, list[int]] = {}
        self.to_report: dict[str, set[str]] = {"sent": set(), "received": set()}
        self.counts: Counter[str] = Counter()

    def submit(self, name: str, number: int) -> None:
        asked = self.requests[name]
        params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True)
        if asked["stops"]:
            params.stop_token_ids = [ANSWER]
        transfer = {"transfer_id": f"t-{name}"}
        kind = asked["kind"]
        if kind == "send":
            params.extra_args = {"kv_transfer_params": {"do_remote_decode": True, **transfer}}
        elif kind == "load" and not self.producer:
            remote = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_bootstrap_addr": "http://p:1"}
            params.extra_args = {"kv_transfer_params": {**remote, **transfer}}
        priority = asked["priority"]
        made = Request(
            name,
            list(asked["prompt"]),
            params,
            None,
            arrival_time=float(number),
            priority=priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(made)

    def act(self, action: str, name: str | None, number: int) -> None:
        if action == "submit":
            self.submit(str(name), number)
        elif action == "abort":
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif action == "preempt":
            try:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError:
                self.counts["cache not reset"] += 1
        elif action == "sent":
            if (sendable := self.sendable.get(f"t-{name}")) is not None and sendable.confirmed:
                self.to_report["sent"].add(str(name))
        elif action == "receive":
            if name in self.awaited:
                self.to_report["received"].add(str(name))
        elif action == "schedule":
            if len(self.in_flight) < IN_FLIGHT and self.scheduler.has_requests():
                self.schedule()
        elif self.in_flight:
            self.scheduler.update_from_output(*self.in_flight.popleft())

    def schedule(self) -> None:
        """Schedule a step and run it; its answer waits in `in_flight`."""
        self.counts["overlapping"] += bool(self.in_flight)
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        # The scheduler has just counted the step's tokens.
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [ANSWER] for name in names]
        message = output.kv_connector_metadata
        message = message.metadata[1] if self.multi else message
        self.withdraw(message)
        ran = self.memory.run(output)
        self.extend(message, ran)
        for transfer, sendable in self.sendable.items():
            name = transfer.removeprefix("t-")
            assert name in self.scheduler.requests, f"{transfer} has ended, and was not told to be aborted"
            wrong = self.memory.holds(name, sendable.blocks, sendable.up_to)
            assert not wrong, f"{wrong}: told {vars(sendable)}"
            changed = {slot for slot, text in sendable.summed.items() if self.memory.slots.get(slot) != text}
            assert not changed, f"{transfer} has other KV in {changed} than when it was summed"
        self.in_flight.append((output, self.answer(message, names, sampled)))

    def withdraw(self, message: Any) -> None:
        """What the worker drops before the step may overwrite anything."""
        for transfer in message.preempted:
            self.counts["preempted"] += self.sendable.pop(transfer, None) is not None
        for transfer in message.reqs_not_processed:
            self.counts["aborted"] += self.sendable.pop(transfer, None) is not None

    def extend(self, message: Any, ran: dict[str, tuple[int, int]]) -> None:
        """The chunks must be those that the step has computed."""
        chunks = {chunk.request_id: chunk for chunk in message.chunks}
        assert len(chunks) == len(message.chunks)
        assert message.idle == (not ran)
        computing = {
            name
            for name, (first, _) in ran.items()
            if self.requests[name]["kind"] == "send" and first < len(self.requests[name]["prompt"])
        }
        assert computing <= chunks.keys() <= ran.keys(), (computing, chunks, ran)
        for name, chunk in chunks.items():
            length, end = len(self.requests[name]["prompt"]), ran[name][1]
            sendable = self.sendable.get(f"t-{name}")
            if chunk.restarted:
                assert sendable is None, "a prompt restarts that was not told to be preempted"
                self.counts["restarted"] += 1
            self.counts["later chunks"] += sendable is not None
            sendable = self.sendable.setdefault(chunk.transfer_id, Sendable())
            sendable.blocks += chunk.new_blocks
            sendable.up_to, sendable.total = chunk.up_to, chunk.total
            assert chunk.total == -(-length // self.block_size)
            assert chunk.up_to == (chunk.total if end >= length else end // self.block_size)
            ended = chunk.up_to == chunk.total and end >= length
            full = length % self.block_size == 0
            comparable = chunk.total - (not full and self.requests[name]["max_tokens"] > 1)
            assert bool(chunk.check) == (ended and comparable > 0)
            self.counts["checked"] += bool(chunk.check)
            slots = [(block, offset) for _, block in chunk.check for offset in range(self.block_size)]
            sendable.summed |= {slot: self.memory.slots.get(slot) for slot in slots}
            assert all(sendable.blocks[-place] == block for place, block in chunk.check)
            self.counts["complete"] += ended
        for name, (transfer, groups) in message.reqs_to_send.items():
            if groups:
                # The scheduler keeps these blocks until they are sent.
                sendable = self.sendable[transfer]
                assert (sendable.up_to, groups[0][: sendable.total]) == (sendable.total, sendable.blocks), (
                    name,
                    groups,
                    vars(sendable),
                )
                sendable.confirmed = True
                self.counts["confirmed"] += 1

    def answer(self, message: Any, names: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
        """What the worker answers: with the requests that were sent or received by then."""
        for pulls in message.reqs_to_recv.values():
            for name, pull in pulls.items():
                if pull.local_block_ids and pull.local_block_ids[0]:
                    self.awaited[name] = list(pull.local_block_ids[0])
        received, self.to_report["received"] = self.to_report["received"], set()
        for name in received:
            self.load(name, self.awaited.pop(name))
        sent, self.to_report["sent"] = self.to_report["sent"], set()
        for name in sent:
            del self.sendable[f"t-{name}"]
        self.counts["sent"] += len(sent)
        self.counts["received"] += len(received)
        return ModelRunnerOutput(
            names,
            {name: number for number, name in enumerate(names)},
            sampled,
            kv_connector_output=KVConnectorOutput(finished_sending=sent, finished_recving=received),
        )

    def load(self, name: str, blocks: list[int]) -> None:
        """Another engine's write, which no stream orders: it may end at any time."""
        length = len(self.requests[name]["prompt"])
        first = -(-length // self.block_size) - len(blocks)
        for position in range(first * self.block_size, length):
            self.memory.write(name, blocks[position // self.block_size - first], position)


@functools.cache
def _config(model_folder: str) -> tuple[VllmConfig, Any]:
    config = VllmConfig(
        model_config=ModelConfig(model=model_folder, dtype="float32", max_model_len=4096),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, enable_chunked_prefill=True),
        kv_transfer_config=KVTransferConfig(**LAYERWISE, kv_role="kv_both"),
        device_config=DeviceConfig("cpu"),
    )
    init_none_hash(sha256)
    return config, StructuredOutputManager(config)


def play(model_folder: str, script: dict[str, Any]) -> dict[str, int]:
    """Play a script; returns how often what has happened. AssertionError if the connector's messages are wrong."""
    engine = Engine(*_config(model_folder), script)
    for number, (action, name) in enumerate(script["actions"]):
        engine.act(action, name, number)
    while engine.in_flight:
        engine.act("answer", None, 0)
    return dict(engine.counts)
