"""Announcement of an engine's limits, parallelism and devices on its own /metrics, where agents read them."""

from __future__ import annotations

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from pointsman_connector.engine_run import engine_run

LABELS = (
    "run",
    "device",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
)

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
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    return {
        "run": engine_run(),
        "device": _device(),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "data_parallel_size": str(parallel.data_parallel_size),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "max_num_seqs": str(scheduler.max_num_seqs),
        "long_prefill_token_threshold": str(scheduler.long_prefill_token_threshold),
    }


def _device() -> str:
    """Return the name of the first device, or "" where vLLM would have to initialise the device to know the name."""
    by_driver = current_platform.is_cpu() or current_platform.is_rocm()
    if by_driver or type(current_platform).__name__ == "NvmlCudaPlatform":
        return str(current_platform.get_device_name())
    return ""
