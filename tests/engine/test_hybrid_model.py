"""A model with two KV cache groups: its prefixes are exact. Layer-wise push does not support it, and the engine says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import Event
from tests.support.engines.chat_client import assert_agree, complete, fresh_words
from tests.support.engines.model import VOCAB, make_config, make_tokenizer, text_config
from tests.support.engines.servers import (
    LAYERWISE,
    SERVED_NAME,
    Engine,
    EngineSpec,
    running_engines,
)
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

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


@pytest.fixture(scope="module")
def engine(model_folder: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the connector package, and so few blocks that they are evicted soon."""
    folder = tmp_path_factory.mktemp("hybrid")
    spec = EngineSpec(
        "hybrid",
        max_model_len=1_024,
        model=hybrid_model(folder / "model"),
        kv_transfer=LAYERWISE,
        extra_args=("--load-format", "dummy", "--num-gpu-blocks-override", "120"),
        env={"PYTHONPATH": str(site)},
    )
    with running_engines([spec], model_folder, folder) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def plane(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane([engine], tmp_path_factory.mktemp("plane")).running() as plane:
        yield plane


def cached_blocks_of(engine: Engine) -> CachedBlocks:
    """What the agent must know, from the engine's whole event history."""
    cached_blocks = CachedBlocks(SERVED_NAME)
    cached_blocks.apply(msgspec.convert(engine.kv_event_history(), list[Event]))
    cached_blocks.check()
    return cached_blocks


def test_predicted_prefixes_of_two_groups_are_the_engines(plane: ControlPlane, engine: Engine) -> None:
    """Prompts continue earlier ones, from their ends or from the middle, while blocks are evicted."""
    rng = random.Random(19)
    texts: list[list[str]] = []
    hits = gaps = 0
    with plane.client() as client:
        for _ in range(40):
            words = fresh_words(rng.randrange(20, 200)).split()
            if texts and rng.random() < 0.8:
                earlier = rng.choice(texts[-4:])
                words = earlier[: rng.choice([len(earlier), len(earlier), rng.randrange(len(earlier))])] + words
            words = words[:800]
            texts.append(words)
            # While the answer is computed, blocks that the window has passed are freed before those of full attention.
            answer = complete(client, " " + " ".join(words), max_tokens=rng.choice([1, 40]))
            assert_agree(plane, answer, answer.cached_tokens)
            hits += answer.cached_tokens > 0

            def settled() -> bool:
                return plane.instance(engine).keys == cached_blocks_of(engine).key_count

            until(settled, within_s=20, what="the router has the engine's keys")
            grouped = cached_blocks_of(engine).grouped
            assert grouped is not None
            gaps += any(node.hit and node.parent is not None and not node.parent.hit for node in grouped.nodes.values())
    instance = plane.instance(engine).instance
    assert (instance.prefix_mode, instance.sparse_prefixes) == (agent_pb2.PREFIX_MODE_EXACT, True)
    assert hits > 10
    assert gaps > 10, "longer prefixes were cached than shorter ones"


def test_its_kv_leaves_after_the_prefill(engine: Engine) -> None:
    body = {"model": SERVED_NAME, "prompt": fresh_words(100), "max_tokens": 4}
    assert engine.ask("/v1/completions", body).status == 200
    assert (
        "Layer-wise push is off, KV is sent after the prefill: the model has 2 KV cache groups"
        in engine.process.log.read_text()
    )
    # Agents are told, too: sending the receiver its request first would gain nothing here.
    assert engine.metric("pointsman_kv_transfer_info", protocol="mooncake", layerwise="False") == 1
