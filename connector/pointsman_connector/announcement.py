"""What an engine says on its own /metrics, for as long as it lives, of its KV connector and tokenizer: agents read it there."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Gauge
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
    get_mooncake_bootstrap_addr,
)

from pointsman_connector.layerwise.connector import LayerwiseMooncakeConnector
from pointsman_connector.layerwise.support import enabled, full_attention_only, unsupported_engine

# Where a hub's library keeps a model; offline, vLLM names that folder in place of the model.
_KEPT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([^/]+)/?")

LABELS = ("connector", "protocol", "role", "layerwise", "bootstrap_host", "bootstrap_port")

# Of several API server processes all say the same.
_INFO = Gauge(
    "pointsman_kv_transfer_info", "How this engine passes KV on; always 1", LABELS, multiprocess_mode="mostrecent"
)
_TOKENIZER = Gauge(
    "pointsman_tokenizer_info",
    "Where this engine's tokenizer is from; always 1",
    ("tokenizer", "revision"),
    multiprocess_mode="mostrecent",
)


def announce(vllm_config: VllmConfig) -> None:
    """Say on /metrics where the engine with this configuration has its tokenizer from, and how it passes KV on, if it does."""
    _TOKENIZER.clear()
    _TOKENIZER.labels(**tokenizer_place(vllm_config)).set(1)
    _INFO.clear()
    if told := announcement(vllm_config):
        _INFO.labels(**told).set(1)


def tokenizer_place(vllm_config: VllmConfig) -> dict[str, str]:
    """The tokenizer's hub id or folder, and the revision that was loaded: a commit where vLLM could resolve it, else as it was
    asked for; empty for a folder, and where none was asked for."""
    config = vllm_config.model_config
    place, revision = str(config.tokenizer), config.tokenizer_revision
    if (kept := _KEPT.fullmatch(place)) is not None:
        return {"tokenizer": kept[1].replace("--", "/"), "revision": kept[2]}
    if Path(place).exists():
        return {"tokenizer": place, "revision": ""}
    # huggingface_hub's ResolvedRevision is a str of what was asked for, and brings the commit along.
    return {"tokenizer": place, "revision": str(getattr(revision, "resolved", None) or revision or "")}


def announcement(vllm_config: VllmConfig) -> dict[str, str]:
    """The series' labels, LABELS; empty for an engine without a connector, or with one that agents have no word for.

    `layerwise` is "True" where the engine gains when D's request is there before P has computed the prompt. `bootstrap_host` is
    empty where the bootstrap server is the engine's own: how others reach the engine, it does not know.
    """
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector is None:
        return {}
    told = {"connector": config.kv_connector, "role": str(config.kv_role), "layerwise": "False"}
    if config.kv_connector == "NixlConnector":
        return told | {"protocol": "nixl", "bootstrap_host": "", "bootstrap_port": ""}
    kind = KVConnectorFactory.get_connector_class(config)
    if not issubclass(kind, MooncakeConnector):
        return {}
    host, port = "", envs.VLLM_MOONCAKE_BOOTSTRAP_PORT
    if config.get_from_extra_config("bootstrap_server_address", None) is not None:
        host, port = get_mooncake_bootstrap_addr(vllm_config)
    layerwise = (
        issubclass(kind, LayerwiseMooncakeConnector)
        and enabled(config.kv_connector_extra_config)
        and not unsupported_engine(vllm_config)
        and full_attention_only(vllm_config)
    )
    return told | {
        "protocol": "mooncake",
        "layerwise": str(layerwise),
        "bootstrap_host": host,
        "bootstrap_port": str(port),
    }
