"""Announcement of an engine's KV connector and tokenizer on its own /metrics, where agents read it."""

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
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from pointsman_connector.layerwise.connector import LayerwiseMooncakeConnector
from pointsman_connector.layerwise.support import (
    LAYOUTS_OF_SHARED_ROWS,
    enabled,
    full_attention_only,
    unsupported_engine,
)

# Path of a model in huggingface_hub's cache. In offline mode vLLM replaces the model's name with this path.
_KEPT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([^/]+)/?")

LABELS = ("connector", "protocol", "role", "layerwise", "bootstrap_host", "bootstrap_port")

# "mostrecent": several API server processes set the same labels.
_INFO = Gauge(
    "pointsman_kv_transfer_info", "KV transfer support of this engine; always 1", LABELS, multiprocess_mode="mostrecent"
)
_TOKENIZER = Gauge(
    "pointsman_tokenizer_info",
    "Source of this engine's tokenizer; always 1",
    ("tokenizer", "revision"),
    multiprocess_mode="mostrecent",
)


def announce(vllm_config: VllmConfig) -> None:
    """Set the series on /metrics: the tokenizer's source, and the KV transfer support if the engine has any."""
    _TOKENIZER.clear()
    _TOKENIZER.labels(**tokenizer_place(vllm_config)).set(1)
    _INFO.clear()
    if told := announcement(vllm_config):
        _INFO.labels(**told).set(1)


def tokenizer_place(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the tokenizer's hub id or folder, and the loaded revision.

    The revision is a commit if vLLM could resolve it, else the configured one. It is empty for a folder, and if none is
    configured."""
    config = vllm_config.model_config
    place, revision = str(config.tokenizer), config.tokenizer_revision
    if (kept := _KEPT.fullmatch(place)) is not None:
        return {"tokenizer": kept[1].replace("--", "/"), "revision": kept[2]}
    if Path(place).exists():
        return {"tokenizer": place, "revision": ""}
    # huggingface_hub's ResolvedRevision is a str of the configured revision, with the commit as an attribute.
    return {"tokenizer": place, "revision": str(getattr(revision, "resolved", None) or revision or "")}


def announcement(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the labels of pointsman_kv_transfer_info; empty for an engine without a connector, or with an unknown one.

    `layerwise` is "True" if the engine profits from a D request that arrives before P has computed the prompt. `bootstrap_host`
    is empty if the engine runs its own bootstrap server: an engine does not know the address at which others reach it.
    """
    for kind, config in _connectors(vllm_config):
        if told := _announcement_of(kind, config):
            return told
    return {}


def _connectors(vllm_config: VllmConfig) -> list[tuple[type, VllmConfig]]:
    """The engine's connector classes, each with its configuration: several under a MultiConnector, which loads from the first
    that has anything."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    kind = KVConnectorFactory.get_connector_class(transfer)
    if issubclass(kind, MultiConnector):
        return list(kind._get_connector_classes_and_configs(vllm_config))
    return [(kind, vllm_config)]


def _announcement_of(kind: type, vllm_config: VllmConfig) -> dict[str, str]:
    config = vllm_config.kv_transfer_config
    told = {"connector": config.kv_connector, "role": str(config.kv_role), "layerwise": "False"}
    if config.kv_connector == "NixlConnector":
        return told | {"protocol": "nixl", "bootstrap_host": "", "bootstrap_port": ""}
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
        and envs.VLLM_KV_CACHE_LAYOUT not in LAYOUTS_OF_SHARED_ROWS
    )
    return told | {
        "protocol": "mooncake",
        "layerwise": str(layerwise),
        "bootstrap_host": host,
        "bootstrap_port": str(port),
    }
