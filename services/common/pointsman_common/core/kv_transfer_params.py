"""The `kv_transfer_params` that make vLLM's KV connectors keep a prompt's KV for another engine, and fetch it. Pure.

Also the time that a fetch of a cached prefix may take.
"""

from __future__ import annotations

from typing import Any

# Maximum duration of a fetch: FETCH_S, for the first connection between two instances and what waits at the source, and the time
# in which a slow instance computes as many tokens. A longer fetch gains nothing; it shows that the source does not answer, or has
# evicted the tokens and computes them.
FETCH_S, FETCH_TOKENS_PER_S = 5.0, 2_000.0


def fetch_limit_s(tokens: int) -> float:
    """Return how long a fetch of a prefix of `tokens` may take until it is given up, s."""
    return FETCH_S + tokens / FETCH_TOKENS_PER_S


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
