"""Two engines' workers as emulated_offload has them, each the second child of vLLM's MultiConnector. They are called as vLLM's
model runner calls a connector, and their statistics go where its front end has them.

A module for inside_vllm.py.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata

from pointsman_connector.layerwise.chunks import Chunk
from pointsman_connector.layerwise.connector import LayerwiseMetadata, LayerwiseMooncakeConnector

# In an engine's process this file's folder is on the path, and the package `tests` is not.
if TYPE_CHECKING:
    from tests.support.engines.async_scheduling import LAYERWISE
    from tests.support.engines.emulated_offload import WITHIN_S, Worker, pair
else:
    from async_scheduling import LAYERWISE
    from emulated_offload import WITHIN_S, Worker, pair

SENT, RECEIVED = list(range(1, 9)), list(range(40, 48))


class Engine:
    """An engine's MultiConnector."""

    def __init__(self, config: VllmConfig, name: str, cache_config: Any) -> None:
        self.config = copy.copy(config)
        role = {"kv_role": "kv_both"}
        bystander = {"kv_connector": "Bystander", "kv_connector_module_path": "async_scheduling", **role}
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            engine_id=name,
            kv_connector_extra_config={"connectors": [bystander, {**LAYERWISE, **role}]},
            **role,
        )
        self.connector = MultiConnector(self.config, KVConnectorRole.WORKER, cache_config)
        # The front end has its own, which vLLM makes when the engine starts.
        self.logging = KVConnectorLogging(self.config.kv_transfer_config)
        self.metrics = KVConnectorProm(self.config, ["engine"], {0: ["0"]})
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.invalid: set[int] = set()
        self.counted: dict[str, list[Any]] = {}

    @property
    def worker(self) -> Worker:
        worker: Worker = self.connector.sub_connectors[1].connector_worker
        return worker

    def step(self, message: LayerwiseMetadata, forward: Callable[[], None] = lambda: None) -> None:
        """As KVConnectorModelRunnerMixin._get_kv_connector_output."""
        connector = self.connector
        connector.bind_connector_metadata(MultiKVConnectorMetadata((KVConnectorMetadata(), message)))
        forward()
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.invalid |= connector.get_block_ids_with_load_errors()
        statistics = connector.get_kv_connector_stats()
        connector.clear_connector_metadata()
        if statistics is not None and not statistics.is_empty():
            self.observe(json.loads(json.dumps(statistics.to_dict())))

    def observe(self, stats: dict[str, Any]) -> None:
        """As vLLM's stat loggers, in the process of the front end."""
        self.logging.observe(stats)
        self.metrics.observe(stats)
        for name, values in stats["LayerwiseMooncakeConnector"].items():
            self.counted.setdefault(name, []).extend(values)


def logged(logging: KVConnectorLogging) -> str:
    """The line that vLLM logs."""
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    return "".join(lines)


def message(*chunks: Chunk, idle: bool = False) -> LayerwiseMetadata:
    return LayerwiseMetadata(list(chunks), frozenset(), idle=idle)


def pushed(model_folder: str) -> dict[str, Any]:
    """A prompt of 8 blocks is computed in two chunks and pushed while it is computed."""
    engines: list[Engine] = []

    def make(stream: Any, config: VllmConfig, name: str, cache_config: Any) -> Worker:
        with mock.patch.object(LayerwiseMooncakeConnector, "worker_class", partial(Worker, stream)):
            engines.append(Engine(config, name, cache_config))
        return engines[-1].worker

    with pair(model_folder, 6, make) as both:
        sender, receiver = engines
        both.ask("t", RECEIVED)
        begin = message()
        begin.reqs_to_send["p-t"] = ("t", [])
        sender.step(begin)
        for first, last in ((0, 5), (5, 8)):

            def forward(blocks: list[int] = SENT[first:last]) -> None:
                for name in both.names:
                    values = torch.rand(both.source[name][blocks].shape)
                    both._right[name][blocks] = values
                    both.stream.launch(0.0, partial(both._fill, name, blocks, values))
                    sender.connector.save_kv_layer(name, both.source[name], None)
                # The checksums, which are kernels of the stream on a GPU, are computed at once here.
                computed = both.stream.new_event()
                computed.record()
                computed.synchronize()

            check = tuple((place, SENT[-place]) for place in (1, 2)) if last == 8 else ()
            sender.step(message(Chunk("t", "p-t", tuple(SENT[first:last]), last, 8, False, check)), forward)
        end = message()
        end.reqs_to_send["p-t"] = ("t", [SENT])
        sender.step(end)
        deadline = time.monotonic() + WITHIN_S
        while not (sender.sent and receiver.received) and time.monotonic() < deadline:
            sender.step(message(idle=True))
            receiver.step(message(idle=True))
        return {
            "sent": sorted(sender.sent),
            "received": sorted(receiver.received),
            "invalid": sorted(receiver.invalid),
            "same": both.equal(SENT, RECEIVED),
            "pushes": len(sender.counted.get("num_pushed_regions", ())),
            "fallbacks": len(sender.counted.get("num_push_fallbacks", ())),
            "checked": len(receiver.counted.get("num_checked_requests", ())),
            "logged": logged(sender.logging),
        }


def logged_without_pushes() -> str:
    """What vLLM logs of a transfer after the prefill, if its worker is vLLM's own."""
    statistics = MooncakeKVConnectorStats()
    statistics.record_transfer(0.5, 1 << 20, 3)
    logging = KVConnectorLogging(KVTransferConfig(**LAYERWISE, kv_role="kv_both"))
    logging.observe(statistics.to_dict())
    return logged(logging)
