"""KV events of synthetic blocks, and the keys that CachedBlocks holds of them."""

from __future__ import annotations

from typing import Any

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import BlockStored
from pointsman_common.core.key_report_types import Tier

MODEL = "tiny"
BLOCK = 32
PER_BLOCK = BLOCK // 16


def tokens_of(path: tuple[int, ...]) -> list[int]:
    """Return a prompt with one block per letter. Equal letters at different depths are equal tokens after different prefixes."""
    return [letter * 1000 + at for letter in path for at in range(BLOCK)]


def hash_of(path: tuple[int, ...]) -> int:
    return hash(path) & (1 << 64) - 1


def store(path: tuple[int, ...], first: int = 0, medium: str | None = "GPU", **more: Any) -> BlockStored:
    """Return the event that stores the blocks from `first` on of the chain `path`."""
    return BlockStored(
        block_hashes=[hash_of(path[: at + 1]) for at in range(first, len(path))],
        parent_block_hash=hash_of(path[:first]) if first else None,
        token_ids=tokens_of(path)[first * BLOCK :],
        block_size=BLOCK,
        medium=medium,
        **more,
    )


def pairs_of(cached_blocks: CachedBlocks) -> set[tuple[int, int]]:
    return {(tier, key) for tier in Tier for key in cached_blocks.keys(tier)}
