"""How an engine passes KV on: by what it announces itself, and by what its agent was told of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pointsman.agent.core.engine_address import KV_PROTOCOLS, EngineAddress
from pointsman.agent.v1 import agent_pb2 as pb

# VLLM_MOONCAKE_BOOTSTRAP_PORT where nobody set it.
BOOTSTRAP_PORT = 8998


def kv_transfer(address: EngineAddress, announced: Mapping[str, str], cache_dtype: str) -> pb.KvTransfer | None:
    """What routers are told; None for an engine that passes no KV on, or does not say and nobody else did.

    `announced` are the labels of the connector package's series pointsman_kv_transfer_info, empty for an engine without the
    package. The engine knows its protocol and role, and whether it wants D's request before P has ended; the operator knows at
    which address others reach it. `cache_dtype` is the type of its KV cache's elements.
    """
    protocol = announced.get("protocol") or address.kv
    if protocol not in KV_PROTOCOLS:
        return None
    role = announced.get("role", "").removeprefix("kv_") or address.kv_role
    mooncake = protocol == "mooncake"
    return pb.KvTransfer(
        protocol=pb.KvProtocol.Value(f"KV_PROTOCOL_{protocol.upper()}"),
        bootstrap_url=(address.bootstrap or _bootstrap(address, announced)) if mooncake else "",
        role={"producer": pb.KV_ROLE_PRODUCER, "consumer": pb.KV_ROLE_CONSUMER}.get(role, pb.KV_ROLE_UNSPECIFIED),
        # Blocks of equal size hold equal bytes only where the elements are of one type.
        cache_dtype=cache_dtype,
        layerwise=mooncake and announced.get("layerwise") == "True",
    )


def _bootstrap(address: EngineAddress, announced: Mapping[str, str]) -> str:
    """Mooncake's bootstrap server: the engine's own, on the host at which it is advertised, unless it names another."""
    host = announced.get("bootstrap_host") or urlsplit(address.advertise).hostname or ""
    port = announced.get("bootstrap_port") or BOOTSTRAP_PORT
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
