"""Engines and models for which layer-wise push is off, and what is said of them at their start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pointsman_connector.layerwise.support import (
    enabled,
    full_attention_only,
    layers_without_region,
    unsupported_cache,
    unsupported_engine,
    unsupported_receiver,
)


class FullAttentionSpec: ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec: ...


def engine(**changes: Any) -> Any:
    """What is read of a VllmConfig."""
    parallel: dict[str, Any] = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
        "use_ubatching": False,
    }
    speculative = changes.pop("speculative_config", None)
    graphs = changes.pop("cudagraph_mode", None)
    device = changes.pop("device_type", "cuda")
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(**parallel | changes),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs and SimpleNamespace(name=graphs)),
    )


def model(
    *, window: int | None = None, chunk: int | None = None, kinds: Any = None, merged: bool = False, **more: bool
) -> Any:
    """What is read of a VllmConfig, of its model."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{"is_hybrid": False, "is_encoder_decoder": False} | more,
            get_sliding_window=lambda: window,
            attention_chunk_size=chunk,
            hf_text_config=SimpleNamespace(layer_types=kinds) if kinds is not None else SimpleNamespace(),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=merged),
    )


def cache(*specs: Any) -> Any:
    """What is read of a KVCacheConfig."""
    return SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_it_is_on_unless_the_engine_says_no() -> None:
    assert enabled({})
    assert enabled({"layerwise": True})
    assert not enabled({"layerwise": False})


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_whole_graphs_of_decode_steps_do_no_harm(mode: str) -> None:
    assert unsupported_engine(engine(cudagraph_mode=mode)) == ""


def test_every_layer_needs_memory_of_its_own() -> None:
    assert layers_without_region(["a", "b"], ["a", "b"]) == ""
    assert layers_without_region(["a", "b"], ["a", "a", "b"]) == "", "a region for each head"
    reason = layers_without_region(["a", "b", "c"], ["a"])
    assert reason == "2 layers have no memory of their own (VLLM_KV_CACHE_LAYOUT), such as b"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_layers_are_complete_when_they_are_launched_or_have_events(device: str) -> None:
    """ROCm's devices are "cuda" in torch, too."""
    assert unsupported_engine(engine(device_type=device)) == ""


def test_several_workers_share_the_heads() -> None:
    assert unsupported_engine(engine()) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative decoding is on"),
        ({"decode_context_parallel_size": 2}, "context parallelism is on"),
        ({"prefill_context_parallel_size": 2}, "context parallelism is on"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is on"),
        ({"use_ubatching": True}, "microbatches are on (--enable-dbo, --ubatch-size)"),
        ({"device_type": "xpu"}, "it is not known when a layer is computed on a device of type xpu"),
        ({"cudagraph_mode": "FULL"}, "prefills run as whole CUDA graphs (cudagraph_mode FULL)"),
    ],
)
def test_engines_whose_kv_goes_after_the_prefill(changes: dict[str, Any], reason: str) -> None:
    assert unsupported_engine(engine(**changes)) == reason


def test_models_whose_kv_goes_after_the_prefill() -> None:
    assert unsupported_cache(cache(FullAttentionSpec())) == ""
    assert unsupported_cache(cache(MLAAttentionSpec())) == ""
    assert unsupported_cache(cache()) == "the model has 0 KV cache groups"
    assert unsupported_cache(cache(FullAttentionSpec(), SlidingWindowSpec())) == "the model has 2 KV cache groups"
    assert unsupported_cache(cache(SlidingWindowSpec())) == "the model's KV cache is of the kind SlidingWindowSpec"


def test_receivers_whose_kv_goes_after_the_prefill() -> None:
    def reason(tp: int, pp: int) -> str:
        return unsupported_receiver(SimpleNamespace(remote_tp_size=tp, remote_pp_size=pp), tp_size=2, pp_size=1)

    assert reason(2, 1) == ""
    assert reason(1, 1) == "its tensor parallelism is 1, here it is 2"
    assert reason(2, 2) == "its pipeline parallelism is 2, here it is 1"


def test_what_the_front_end_knows_of_the_cache() -> None:
    assert full_attention_only(model())
    assert not full_attention_only(model(window=64))
    assert not full_attention_only(model(chunk=64))
    assert not full_attention_only(model(is_hybrid=True, merged=True))
    assert not full_attention_only(model(is_encoder_decoder=True))


@pytest.mark.parametrize("local", ["window", "chunk"])
def test_layers_that_see_a_part_are_kept_like_others_only_where_there_are_others(local: str) -> None:
    mixed = ["sliding_attention", "full_attention"]
    part: dict[str, Any] = {local: 64}
    assert full_attention_only(model(**part, kinds=mixed, merged=True))
    assert not full_attention_only(model(**part, kinds=mixed))
    assert not full_attention_only(model(**part, kinds=["sliding_attention"] * 2, merged=True))
    assert not full_attention_only(model(**part, merged=True)), "a model that has one kind names none"
