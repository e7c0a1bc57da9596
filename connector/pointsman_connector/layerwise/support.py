"""Decides for which engines and models layer-wise push works. For all others KV is sent after the prefill.

The functions only read attributes of vLLM's objects and do not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Values of VLLM_KV_CACHE_LAYOUT with which a block's row holds all layers, interleaved.
LAYOUTS_OF_SHARED_ROWS = ("BLNHC", "BHLNC")

# Device types on which it is known when a layer's KV is in memory: CUDA and ROCm ("cuda") have events, on a CPU it is there when
# the layer has been launched.
DEVICES = ("cuda", "cpu")


def enabled(extra_config: Mapping[str, Any]) -> bool:
    """Return whether layer-wise push is enabled in the engine's configuration. It is by default."""
    return bool(extra_config.get("layerwise", True))


def unsupported_engine(vllm_config: Any) -> str:
    """Return why an engine with this VllmConfig cannot push layer by layer; "" if its configuration permits it."""
    if (device := vllm_config.device_config.device_type) not in DEVICES:
        return f"it is not known when a layer is computed on a device of type {device}"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    if parallel.use_ubatching:
        # A layer's hook is called once for each microbatch, and does not tell which tokens it has computed.
        return "microbatches are on (--enable-dbo, --ubatch-size)"
    if vllm_config.compilation_config.cudagraph_mode is not None and (
        vllm_config.compilation_config.cudagraph_mode.name == "FULL"
    ):
        # Replaying a whole captured graph calls no hook. FULL_AND_PIECEWISE, the default, does so for pure decode steps only.
        return "prefills run as whole CUDA graphs (cudagraph_mode FULL)"
    return ""


def layers_without_region(layers: Iterable[str], registered: Iterable[str]) -> str:
    """Why KV cannot be pushed layer by layer where these layers' caches were `registered` under these names; empty when it can.

    Layouts in which a block's row holds several layers interleaved (BLNHC, BHLNC) are registered as one region with one layer's
    name: writing that region when this layer is computed would send the others too early.
    """
    names = set(registered)
    hidden = [layer for layer in layers if layer not in names]
    if not hidden:
        return ""
    return f"{len(hidden)} layers have no memory of their own (VLLM_KV_CACHE_LAYOUT), such as {hidden[0]}"


def unsupported_receiver(meta: Any, *, tp_size: int, pp_size: int) -> str:
    """Return why a worker with these parallel sizes does not push layer by layer to the sender of `meta`, a MooncakeXferMetadata;
    "" if it does. An unsupported receiver gets its KV after the prefill."""
    for kind, theirs, ours in (("tensor", meta.remote_tp_size, tp_size), ("pipeline", meta.remote_pp_size, pp_size)):
        if theirs != ours:
            return f"its {kind} parallelism is {theirs}, here it is {ours}"
    return ""


def full_attention_only(vllm_config: Any) -> bool:
    """Return whether the model's KV cache will be one that layer-wise push supports, as far as its configuration shows.

    An engine's front end does not have the KVCacheConfig, by which `unsupported_cache` decides.
    """
    model = vllm_config.model_config
    if model.is_hybrid or model.is_encoder_decoder:
        return False
    if model.get_sliding_window() is None and model.attention_chunk_size is None:
        return True
    # With merged groups, layers with a limited window get the same cache as full-attention layers, if the model has such layers.
    merged = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    return bool(merged) and "full_attention" in (getattr(model.hf_text_config, "layer_types", None) or ())


def unsupported_cache(kv_cache_config: Any) -> str:
    """Return why KV of this KVCacheConfig cannot be pushed layer by layer; "" if it can."""
    groups = kv_cache_config.transfer_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups"
    kind = type(groups[0].kv_cache_spec)
    if not any(base.__name__ == "FullAttentionSpec" for base in kind.__mro__):
        return f"the model's KV cache is of the kind {kind.__name__}"
    return ""
