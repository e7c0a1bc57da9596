"""Announcement of an engine's KV connector and tokenizer on its own /metrics, where agents read it.

vLLM's modules are imported where they are used, and classes are recognised by their names: an engine whose vLLM lacks one of
them announces the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from pointsman_connector.layerwise.support import (
    LAYOUTS_OF_SHARED_ROWS,
    enabled,
    full_attention_only,
    unsupported_engine,
)
from pointsman_connector.model_places import place_of
from pointsman_connector.vllm_version import warn_without

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
    """Set the series on /metrics: the tokenizer's source, and the KV transfer support if the engine has any. Logs a line if one
    of them cannot be read from this vLLM."""
    for series, read, part in (
        (_TOKENIZER, tokenizer_place, "the announcement of its tokenizer"),
        (_INFO, announcement, "the announcement of its KV transfer support"),
    ):
        series.clear()
        try:
            if labels := read(vllm_config):
                series.labels(**labels).set(1)
        except Exception as error:
            warn_without(part, error)


def tokenizer_place(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the tokenizer's hub id or folder, and the loaded revision."""
    config = vllm_config.model_config
    place, revision = place_of(str(config.tokenizer), config.tokenizer_revision)
    return {"tokenizer": place, "revision": revision}


def announcement(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the labels of pointsman_kv_transfer_info; empty for an engine without a connector, or with an unknown one.

    `layerwise` is "True" if the engine profits from a D request that arrives before P has computed the prompt. `bootstrap_host`
    is empty if the engine runs its own bootstrap server: an engine does not know the address at which others reach it.
    """
    for kind, config in _connectors(vllm_config):
        if labels := _announcement_of(kind, config):
            return labels
    return {}


def _connectors(vllm_config: VllmConfig) -> list[tuple[type, VllmConfig]]:
    """The engine's connector classes, each with its configuration: several under a MultiConnector, which loads from the first
    that has anything."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    kind = KVConnectorFactory.get_connector_class(transfer)
    if _is(kind, "MultiConnector"):
        return list(kind._get_connector_classes_and_configs(vllm_config))
    return [(kind, vllm_config)]


def _is(kind: type, name: str) -> bool:
    """Return whether a class or one of its bases has this name."""
    return any(base.__name__ == name for base in kind.__mro__)


def _announcement_of(kind: type, vllm_config: VllmConfig) -> dict[str, str]:
    config = vllm_config.kv_transfer_config
    labels = {"connector": config.kv_connector, "role": str(config.kv_role), "layerwise": "False"}
    if config.kv_connector == "NixlConnector":
        return labels | {"protocol": "nixl", "bootstrap_host": "", "bootstrap_port": ""}
    if not _is(kind, "MooncakeConnector"):
        return {}
    from vllm import envs

    host, port = "", envs.VLLM_MOONCAKE_BOOTSTRAP_PORT
    if config.get_from_extra_config("bootstrap_server_address", None) is not None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import get_mooncake_bootstrap_addr

        host, port = get_mooncake_bootstrap_addr(vllm_config)
    layerwise = (
        _is(kind, "LayerwiseMooncakeConnector")
        and enabled(config.kv_connector_extra_config)
        and not unsupported_engine(vllm_config)
        and full_attention_only(vllm_config)
        and envs.VLLM_KV_CACHE_LAYOUT not in LAYOUTS_OF_SHARED_ROWS
    )
    return labels | {
        "protocol": "mooncake",
        "layerwise": str(layerwise),
        "bootstrap_host": host,
        "bootstrap_port": str(port),
    }
