"""Announcement of an engine's limits, parallelism and devices on its own /metrics, where agents read them.

What this vLLM does not have is announced as empty, so that agents still recognise the engine by its run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from pointsman_connector.engine_run import engine_run
from pointsman_connector.vllm_version import warn_without

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_SCHEDULER = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")

LABELS = ("run", "device", *_PARALLEL, *_SCHEDULER)

# "mostrecent": several API server processes set the same labels.
_INFO = Gauge(
    "pointsman_engine_info",
    "Limits, parallelism and devices of this engine; always 1",
    LABELS,
    multiprocess_mode="mostrecent",
)


def announce_engine(vllm_config: VllmConfig) -> None:
    """Set the series on /metrics."""
    _INFO.clear()
    _INFO.labels(**engine_info(vllm_config)).set(1)


def engine_info(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the labels of pointsman_engine_info. `run` is the id that the engine's step loads have, too. The limits are those of
    one data-parallel rank."""
    told = {"run": engine_run(), "device": ""}
    for config, names in ((vllm_config.parallel_config, _PARALLEL), (vllm_config.scheduler_config, _SCHEDULER)):
        told |= {name: str(getattr(config, name, "")) for name in names}
    try:
        told["device"] = _device()
    except Exception as error:
        warn_without("the announcement of its device", error)
    return told


def _device() -> str:
    """Return the name of the first device, or "" where vLLM would have to initialise the device to know the name."""
    from vllm.platforms import current_platform

    by_driver = current_platform.is_cpu() or current_platform.is_rocm()
    if by_driver or type(current_platform).__name__ == "NvmlCudaPlatform":
        return str(current_platform.get_device_name())
    return ""
