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

# Bytes of a value by vLLM's name of the cache's type. Types with scales beside the values are left out.
_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}

LABELS = ("run", "device", "kv_token_bytes", *_PARALLEL, *_SCHEDULER)

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
    one data-parallel rank. `kv_token_bytes`: size of the KV of one token on each device."""
    labels = {"run": engine_run(), "device": "", "kv_token_bytes": ""}
    for config, names in ((vllm_config.parallel_config, _PARALLEL), (vllm_config.scheduler_config, _SCHEDULER)):
        labels |= {name: str(getattr(config, name, "")) for name in names}
    try:
        labels["device"] = _device()
    except Exception as error:
        warn_without("the announcement of its device", error)
    try:
        labels["kv_token_bytes"] = _kv_token_bytes(vllm_config)
    except Exception as error:
        warn_without("the announcement of its KV's size", error)
    return labels


def _kv_token_bytes(vllm_config: VllmConfig) -> str:
    """Return the bytes of keys and values of one token on each device; "" if the layers do not all keep both, or the size is
    unknown."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla or model.is_hybrid or model.is_attention_free:
        return ""
    cache_dtype = vllm_config.cache_config.cache_dtype
    size = model.dtype.itemsize if cache_dtype == "auto" else _DTYPE_BYTES.get(cache_dtype, 0)
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    return str(2 * heads * model.get_head_size() * layers * size) if size else ""


def _device() -> str:
    """Return the name of the first device, or "" where vLLM would have to initialise the device to know the name."""
    from vllm.platforms import current_platform

    by_driver = current_platform.is_cpu() or current_platform.is_rocm()
    if by_driver or type(current_platform).__name__ == "NvmlCudaPlatform":
        return str(current_platform.get_device_name())
    return ""
