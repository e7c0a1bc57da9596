"""How an engine transfers KV, from its announcement and from the options of its address. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_address import KV_PROTOCOLS, EngineAddress
from pointsman_agent.core.engine_metrics import WrongSender
from pointsman_common.core.addresses import address_of_url, in_brackets

# vLLM's default of VLLM_MOONCAKE_BOOTSTRAP_PORT.
BOOTSTRAP_PORT = 8998
NONE_WRONG: Mapping[WrongSender, int] = {}


def kv_transfer(
    address: EngineAddress,
    announced: Mapping[str, str],
    cache_dtype: str,
    wrong_kv: Mapping[WrongSender, int] = NONE_WRONG,
    *,
    rank: int = 0,
    engine_id: str = "",
) -> pb.KvTransfer | None:
    """Return the KV transfer support to report to routers. None if neither the announcement nor the address names a protocol.

    `announced` are the labels of the connector package's series pointsman_kv_transfer_info, empty for an engine without the
    package. The engine announces its protocol and role, and whether it should receive D's request before P has ended. The
    operator configures the address at which others reach the engine. `cache_dtype` is the type of the KV cache's elements.
    `wrong_kv`: sending engine -> number of requests whose KV was wrong; those that the data-parallel rank `rank` (the `engine`
    label) received are reported. `engine_id`: the id of this rank at the bootstrap server; empty if unknown.
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
        # Blocks with equal numbers of tokens have equal sizes in bytes only if their elements have the same type.
        cache_dtype=cache_dtype,
        layerwise=mooncake and announced.get("layerwise") == "True",
        wrong_from=[
            pb.WrongKv(bootstrap_url=url, engine_id=sender, requests=requests)
            for (url, sender, receiver), requests in sorted(wrong_kv.items(), key=lambda entry: entry[0][:2])
            if receiver in (None, rank)
        ],
        engine_id=engine_id if mooncake else "",
    )


def engine_ids(answer: Mapping[str, Any]) -> dict[int, str]:
    """Return the engine ids in a bootstrap server's answer to /query, by data-parallel rank as in the instances' description."""
    return {
        int(rank): rank_info["engine_id"]
        for rank, rank_info in answer.items()
        if rank.isdecimal() and isinstance(rank_info, Mapping) and isinstance(rank_info.get("engine_id"), str)
    }


def _bootstrap(address: EngineAddress, announced: Mapping[str, str]) -> str:
    """Return the URL of Mooncake's bootstrap server: on the advertised host unless the engine announces another host."""
    host = announced.get("bootstrap_host") or address_of_url(address.advertise).host
    return f"http://{in_brackets(host)}:{announced.get('bootstrap_port') or BOOTSTRAP_PORT}"
