"""What an engine says on /metrics of what makes it interchangeable with others, from its configuration and files alone."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from pointsman_agent.core.engine_metrics import parse_metrics
from pointsman_common.core.engine_identity import EngineIdentity, Use, compatible, differences
from tests.support.fake_modules import fake_modules

MODULE = "pointsman_connector.engine_identity"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class MooncakeConnector:
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "HND"


def resolved(cache_dtype: str, model_config: Any) -> str:
    return getattr(model_config, "checkpoint_kv", "auto") if cache_dtype == "auto" else cache_dtype


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for what is not installed here."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": SimpleNamespace(VLLM_KV_CACHE_LAYOUT=None)},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"resolve_kv_cache_dtype_string": resolved},
        FACTORY: {"KVConnectorFactory": SimpleNamespace(get_connector_class=lambda _: MooncakeConnector)},
        "vllm.logger": {"init_logger": lambda name: __import__("logging").getLogger(name)},
    }
    fake_modules(monkeypatch, contents)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield module
    REGISTRY.unregister(module._INFO)
    del sys.modules[MODULE]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 2, "torch_dtype": "float16", "_name_or_path": "x"}))
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def config(folder: str | Path, *, dtype: str = "bfloat16", cache_dtype: str = "auto", **changes: Any) -> Any:
    """What is read of a VllmConfig."""
    fields: dict[str, Any] = {
        "model": str(folder),
        "model_weights": "",
        "tokenizer": str(folder),
        "revision": None,
        "tokenizer_revision": None,
        "dtype": f"torch.{dtype}",
        "quantization": None,
        "hf_overrides": {},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields | changes),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        kv_transfer_config=SimpleNamespace(kv_connector="MooncakeConnector"),
    )


def announced(module: Any, vllm_config: Any, root: str = "/models/x") -> EngineIdentity:
    """The identity that an agent reads."""
    module.announce_identity(vllm_config)
    return parse_metrics(generate_latest()).identity(root, 0)


def test_types_are_those_in_use(module: Any, model: Path) -> None:
    half, brain = (announced(module, config(model, dtype=dtype)) for dtype in ("float16", "bfloat16"))
    assert (half.dtype, half.kv_dtype, brain.kv_dtype) == ("float16", "float16", "bfloat16")
    assert differences(half, brain) == ("dtype", "kv_dtype")
    flagged = announced(module, config(model, cache_dtype="bfloat16"))
    assert flagged == brain
    # A checkpoint may say how its cache is to be quantised.
    assert announced(module, config(model, checkpoint_kv="fp8_e4m3")).kv_dtype == "fp8_e4m3"


def test_copies_of_a_model_are_equal_and_other_files_are_not(module: Any, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "two"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text(json.dumps({"layers": 2, "torch_dtype": "bfloat16"}))
    one, two = announced(module, config(model)), announced(module, config(copy))
    assert one.weights != two.weights
    assert compatible(one, two, Use.KV)
    (copy / "model.safetensors").write_bytes(bytes(99_999) + b"1")
    assert differences(one, announced(module, config(copy))) == ("weights",)
    (copy / "chat_template.jinja").write_text("another")
    assert differences(one, announced(module, config(copy))) == ("tokenizer", "weights")


def test_files_that_only_a_whole_download_has_do_not_count(module: Any, model: Path, tmp_path: Path) -> None:
    """vLLM downloads what it loads, other programs all files of a commit."""
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (model / "tokenizer_config.json").write_text("{}")
    kept, another = (tmp_path / f"models--maker--model/snapshots/{digit * 40}" for digit in "12")
    lazy = announced(module, config(shutil.copytree(model, kept)))
    for name in ("consolidated.safetensors", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (kept / name).write_text("{}")
    assert announced(module, config(kept)) == lazy
    assert compatible(lazy, announced(module, config(model)), Use.KV), "a folder with a copy"
    shutil.copytree(model, another)
    (another / "model-1.safetensors").write_bytes(bytes(99_999) + b"1")
    (another / "tokenizer.json").write_text('{"model": {}}')
    assert differences(lazy, announced(module, config(another))) == ("tokenizer", "weights")


def test_overrides_and_quantisation_count(module: Any, model: Path) -> None:
    plain = announced(module, config(model))
    assert (plain.overrides, plain.quantization, plain.kv_layout) == ("none", "none", "HND")
    rope = announced(module, config(model, hf_overrides={"rope_parameters": {"factor": 4.0}}))
    older = announced(module, config(model, rope_theta=5e5))
    assert differences(plain, rope) == differences(plain, older) == differences(rope, older) == ("overrides",)
    assert differences(plain, announced(module, config(model, quantization="fp8"))) == ("quantization",)


def test_a_hub_id_has_the_resolved_revision(module: Any) -> None:
    class Resolved(str):
        resolved = "c0ffee"

    found = announced(module, config("maker/model", revision=Resolved("main")))
    assert (found.weights, found.revision, found.weights_digest) == ("maker/model", "c0ffee", "")
    kept = announced(module, config("/hub/models--maker--model/snapshots/c0ffee"))
    assert (kept.weights, kept.revision) == ("maker/model", "c0ffee")


def test_what_another_vllm_lacks_is_empty(module: Any, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = config(model)
    del other.model_config.quantization
    found = announced(module, other)
    assert (found.dtype, found.overrides) == ("", "none")
    assert "without the announcement of its types" in caplog.text


def test_an_engine_without_the_package_tells_its_root_and_the_caches_flag() -> None:
    page = b'vllm:cache_config_info{engine="0",block_size="16",cache_dtype="fp8"} 1.0\n'
    found = parse_metrics(page).identity("/hub/models--maker--model/snapshots/c0ffee", 0)
    assert found == EngineIdentity(weights="maker/model", revision="c0ffee", kv_dtype="fp8")
