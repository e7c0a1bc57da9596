"""What an engine says on /metrics of its KV connector and tokenizer, from its configuration alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from tests.support.fake_modules import fake_modules

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
MODULE = "pointsman_connector.announcement"


class MooncakeConnector: ...


class LayerwiseMooncakeConnector(MooncakeConnector): ...


class Derived(LayerwiseMooncakeConnector): ...


class OtherConnector: ...


class NixlConnector: ...


class MultiConnector:
    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type, Any]]:
        children = vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
        return [(KINDS[child], config(child)) for child in children]


KINDS = {
    kind.__name__: kind
    for kind in (
        MooncakeConnector,
        LayerwiseMooncakeConnector,
        Derived,
        OtherConnector,
        NixlConnector,
        MultiConnector,
    )
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with what stands in for vLLM's, which is not installed here."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": SimpleNamespace(VLLM_MOONCAKE_BOOTSTRAP_PORT=9001, VLLM_KV_CACHE_LAYOUT=None)},
        f"{CONNECTORS}.factory": {
            "KVConnectorFactory": SimpleNamespace(get_connector_class=lambda config: KINDS[config.kv_connector])
        },
        f"{CONNECTORS}.v1.mooncake.mooncake_connector": {
            "get_mooncake_bootstrap_addr": lambda config: ("boot", 7),
        },
    }
    fake_modules(monkeypatch, contents)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield module
    REGISTRY.unregister(module._INFO)
    REGISTRY.unregister(module._TOKENIZER)
    del sys.modules[MODULE]


def config(
    connector: str | None,
    *,
    tp: int = 1,
    pp: int = 1,
    window: int | None = None,
    ubatching: bool = False,
    **extra: Any,
) -> Any:
    """What is read of a VllmConfig."""
    transfer = SimpleNamespace(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        get_from_extra_config=extra.get,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=pp,
            tensor_parallel_size=tp,
            use_ubatching=ubatching,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        model_config=SimpleNamespace(
            is_hybrid=False,
            is_encoder_decoder=False,
            get_sliding_window=lambda: window,
            attention_chunk_size=None,
            hf_text_config=SimpleNamespace(),
            tokenizer="maker/tiny",
            tokenizer_revision=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )


LAYERWISE = {
    "connector": "LayerwiseMooncakeConnector",
    "protocol": "mooncake",
    "role": "kv_both",
    "layerwise": "True",
    "bootstrap_host": "",
    "bootstrap_port": "9001",
}


def test_layer_by_layer(module: Any) -> None:
    assert module.announcement(config("LayerwiseMooncakeConnector")) == LAYERWISE
    assert module.announcement(config("LayerwiseMooncakeConnector", tp=2)) == LAYERWISE
    assert module.announcement(config("Derived")) == LAYERWISE | {"connector": "Derived"}


def test_after_the_prefill(module: Any) -> None:
    after = LAYERWISE | {"layerwise": "False"}
    assert module.announcement(config("LayerwiseMooncakeConnector", layerwise=False)) == after
    assert module.announcement(config("LayerwiseMooncakeConnector", pp=2)) == after
    assert module.announcement(config("LayerwiseMooncakeConnector", window=64)) == after
    assert module.announcement(config("MooncakeConnector")) == after | {"connector": "MooncakeConnector"}


def test_microbatches_and_shared_rows_go_after_the_prefill(module: Any) -> None:
    after = LAYERWISE | {"layerwise": "False"}
    assert module.announcement(config("LayerwiseMooncakeConnector", ubatching=True)) == after
    envs = sys.modules["vllm"].envs
    envs.VLLM_KV_CACHE_LAYOUT = "BLNHC"
    assert module.announcement(config("LayerwiseMooncakeConnector")) == after
    envs.VLLM_KV_CACHE_LAYOUT = "LBHNC"
    assert module.announcement(config("LayerwiseMooncakeConnector")) == LAYERWISE


def test_of_several_connectors_the_one_that_others_can_load_from(module: Any) -> None:
    several = config("MultiConnector", connectors=["OtherConnector", "LayerwiseMooncakeConnector"])
    assert module.announcement(several) == LAYERWISE
    assert module.announcement(config("MultiConnector", connectors=["OtherConnector"])) == {}


def test_where_a_bootstrap_server_of_its_own_is(module: Any) -> None:
    seen = module.announcement(config("LayerwiseMooncakeConnector", bootstrap_server_address="boot:7"))
    assert seen == LAYERWISE | {"bootstrap_host": "boot", "bootstrap_port": "7"}


def test_other_connectors_and_none(module: Any) -> None:
    nixl = module.announcement(config("NixlConnector"))
    assert (nixl["protocol"], nixl["layerwise"]) == ("nixl", "False")
    assert module.announcement(config("OtherConnector")) == {}
    assert module.announcement(config(None)) == {}
    assert module.announcement(SimpleNamespace(kv_transfer_config=None)) == {}


def test_the_page_says_what_is_so_now(module: Any) -> None:
    def page() -> list[str]:
        text = generate_latest(REGISTRY).decode()
        return [line for line in text.splitlines() if line.startswith("pointsman_kv_transfer_info{")]

    module.announce(config("LayerwiseMooncakeConnector"))
    module.announce(config("NixlConnector"))
    (line,) = page()
    assert 'protocol="nixl"' in line
    module.announce(config(None))
    assert page() == []


class Resolved(str):
    """As huggingface_hub's ResolvedRevision: what was asked for, with the commit that it is."""

    resolved = "abc123"


@pytest.mark.parametrize(
    ("revision", "announced"),
    [(None, ""), ("v2", "v2"), (Resolved("main"), "abc123")],
    ids=["none", "asked", "resolved"],
)
def test_where_the_tokenizer_is_from(module: Any, revision: str | None, announced: str) -> None:
    engine = config(None)
    engine.model_config.tokenizer_revision = revision
    assert module.tokenizer_place(engine) == {"tokenizer": "maker/tiny", "revision": announced}
    module.announce(engine)
    expected = f'pointsman_tokenizer_info{{revision="{announced}",tokenizer="maker/tiny"}} 1.0'
    assert expected in generate_latest(REGISTRY).decode().splitlines()


def test_a_folder_has_no_revision(module: Any, tmp_path: Path) -> None:
    engine = config(None)
    engine.model_config.tokenizer, engine.model_config.tokenizer_revision = str(tmp_path), "v2"
    assert module.tokenizer_place(engine) == {"tokenizer": str(tmp_path), "revision": ""}


def test_a_hubs_cache_is_announced_as_what_is_kept_there(module: Any) -> None:
    """Offline, vLLM names the folder in place of the model."""
    engine = config(None)
    engine.model_config.tokenizer = "/cache/hub/models--maker--tiny-coder/snapshots/abc123"
    assert module.tokenizer_place(engine) == {"tokenizer": "maker/tiny-coder", "revision": "abc123"}


def test_an_engine_without_one_of_vllms_modules_announces_the_rest(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, f"{CONNECTORS}.factory")
    module.announce(config("LayerwiseMooncakeConnector"))
    page = generate_latest(REGISTRY).decode()
    assert 'pointsman_tokenizer_info{revision="",tokenizer="maker/tiny"} 1.0' in page
    assert "pointsman_kv_transfer_info{" not in page
    (message,) = [record.getMessage() for record in caplog.records]
    assert "runs without the announcement of its KV transfer support: ModuleNotFoundError" in message
