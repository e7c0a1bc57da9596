"""If layer-wise push does not support a model, the engine says so at its start and serves the model without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.chat_client import fresh_words
from tests.support.engines.model import VOCAB, make_config, make_tokenizer, text_config
from tests.support.engines.servers import LAYERWISE, SERVED_NAME, EngineSpec, running_engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def hybrid_model(folder: Path) -> Path:
    """A model with alternating layers of sliding window (64 tokens) and full attention: two KV cache groups. Without weights."""
    folder.mkdir()
    make_tokenizer(folder)
    special = {name: value for name, value in text_config().items() if name.endswith("_token_id")}
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "max_position_embeddings": 4_096,
        "query_pre_attn_scalar": 64,
        "bos_token_id": 0,
        **special,
    }
    make_config(folder, config)
    return folder


def test_a_model_of_two_kv_groups_gets_its_kv_after_the_prefill(model_folder: Path, site: Path, tmp_path: Path) -> None:
    model = hybrid_model(tmp_path / "hybrid")
    spec = EngineSpec(
        "hybrid",
        model=model,
        kv_transfer=LAYERWISE,
        extra_args=("--load-format", "dummy"),
        env={"PYTHONPATH": str(site)},
    )
    with running_engines([spec], model_folder, tmp_path) as (engine,):
        body = {"model": SERVED_NAME, "prompt": fresh_words(100), "max_tokens": 4}
        assert engine.ask("/v1/completions", body).status == 200
        assert (
            "Layer-wise push is off, KV is sent after the prefill: the model has 2 KV cache groups"
            in engine.process.log.read_text()
        )
        # Agents are told, too: sending the receiver its request first would gain nothing here.
        assert engine.metric("pointsman_kv_transfer_info", protocol="mooncake", layerwise="False") == 1
