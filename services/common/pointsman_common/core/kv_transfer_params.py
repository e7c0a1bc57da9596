"""The `kv_transfer_params` that make vLLM's KV connectors keep a prompt's KV for another engine, and fetch it. Pure."""

from __future__ import annotations

from typing import Any


def mooncake_send(transfer_id: str) -> dict[str, Any]:
    """Return the parameters that make P keep the KV for a transfer. `transfer_id` must be new and hard to guess: any request with
    it can fetch the KV."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def mooncake_fetch(transfer_id: str, engine_id: str, bootstrap: str) -> dict[str, Any]:
    """Return the parameters that make D fetch the KV that P keeps, or will keep, for a transfer."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }


def nixl_send() -> dict[str, Any]:
    """Return the parameters that make P keep the KV for a transfer by NIXL, where P's answer names the KV."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
