"""vLLM's MooncakeConnector for engines with or without an accelerator, alone or under a MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from pointsman_connector.vllm_version import warn_if_untested, warn_without

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class AnyDeviceMooncakeConnector(MooncakeConnector):
    """MooncakeConnector that also starts on a CPU engine, and whose statistics a MultiConnector can handle.

    On a CPU engine only one call of upstream's constructor fails (vLLM 0.32), the query of the current accelerator; this class
    replaces its result.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if role == KVConnectorRole.SCHEDULER:
            # There is one scheduler, but one worker on each device.
            warn_if_untested()
        with some_device():
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        """Return upstream's metrics; if it has none (vLLM 0.32), metrics that record nothing. A MultiConnector fails at the first
        statistics of a child without metrics, in vLLM's handler of all outputs, which ends every request."""
        return super().build_prom_metrics(*args, **kwargs) or _NoMetrics(*args, **kwargs)


class _NoMetrics(KVConnectorPromMetrics):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Do nothing: stat_logger counts the statistics."""


def register(kind: type[MooncakeConnector]) -> None:
    """Register a connector class under its name. A MultiConnector looks up the classes of its children's statistics among the
    registered names only, in vLLM's handler of all outputs."""
    name = kind.__name__
    try:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, kind.__module__, name)
    except Exception as error:
        warn_without(f"statistics of {name} under a MultiConnector", error)


@contextmanager
def some_device() -> Iterator[None]:
    """Context manager in which the current accelerator's index is 0 if there is no accelerator, instead of an error."""
    if torch.accelerator.is_available():
        yield
        return
    asked = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = asked


register(AnyDeviceMooncakeConnector)
