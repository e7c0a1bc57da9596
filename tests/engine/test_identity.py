"""What vLLM's own configurations make of an engine's identity: two engines of other types, or with overrides, differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pointsman_common.core.engine_identity import EngineIdentity, differences
from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]

IDENTITY_OF = """
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from pointsman_connector.engine_identity import engine_identity

answer = engine_identity(
    VllmConfig(
        model_config=ModelConfig(max_model_len=4096, **asked["model"]),
        cache_config=CacheConfig(block_size=32, **asked["cache"]),
        scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False),
        device_config=DeviceConfig("cpu"),
    )
)
"""


def test_types_are_those_that_vllm_takes_and_overrides_count(vllm: Vllm, model_folder: Path) -> None:
    model = str(model_folder)

    def identity(cache: dict[str, Any] | None = None, **changes: Any) -> EngineIdentity:
        asked = {"model": {"model": model, **changes}, "cache": cache or {}}
        return EngineIdentity(**vllm.ask(IDENTITY_OF, asked) | {"weights": model})

    half, brain = identity(dtype="float16"), identity(dtype="bfloat16")
    assert (half.dtype, half.kv_dtype, brain.kv_dtype) == ("float16", "float16", "bfloat16")
    assert differences(half, brain) == ("dtype", "kv_dtype")
    taken = identity()  # auto
    assert taken.dtype in ("float32", "float16", "bfloat16")
    assert taken.kv_dtype == taken.dtype
    assert all((taken.weights_digest, taken.tokenizer_digest))
    assert (taken.quantization, taken.overrides) == ("none", "none")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert differences(taken, identity(hf_overrides=rope)) == ("overrides",)
    assert differences(half, identity({"cache_dtype": "bfloat16"}, dtype="float16")) == ("kv_dtype",)
