"""Block keys of the blocks in a KV event. Pure."""

from __future__ import annotations

import msgspec

from pointsman_agent.core.kv_events import BlockStored
from pointsman_common.core.block_keys import extend_keys, root_key


def root_of(event: BlockStored, model: str) -> int:
    """Return the key before the first block of a prompt, for an event without a parent."""
    return root_key(model, event.lora_name or "", _cache_salt(event))


def block_keys(parent: int, event: BlockStored, fresh: int) -> list[int]:
    """Return the keys of the event's blocks from number `fresh` on; `parent` is the key before them. Raises OverflowError if a
    token id does not fit."""
    size = event.block_size
    first_is_root = fresh == 0 and event.parent_block_hash is None
    entries = (event.extra_keys or [])[fresh:]
    # Most events have an entry for each block, and nothing in them.
    extras = [
        _extra_bytes(entry, event.lora_name, has_salt=first_is_root and at == 0)
        for at, entry in enumerate(entries if any(entries) else ())
    ]
    if not any(extras):
        return extend_keys(parent, event.token_ids[fresh * size :] if fresh else event.token_ids)
    keys: list[int] = []
    for at in range(len(event.block_hashes) - fresh):
        tokens = event.token_ids[(fresh + at) * size : (fresh + at + 1) * size]
        keys += extend_keys(parent, tokens, extras[at] if at < len(extras) else b"")
        parent = keys[-1]
    return keys


def has_extra_keys(event: BlockStored) -> bool:
    """Return whether a block's hash depends on more than tokens and LoRA adapter."""
    return any(list(entry) != [event.lora_name] for entry in filter(None, event.extra_keys or ()))


def _cache_salt(event: BlockStored) -> str:
    """Return the salt of a prompt's first block: the string that is not the adapter's name. Embedding digests are bytes."""
    entry = event.extra_keys[0] if event.extra_keys else None
    strings = [item for item in entry or [] if isinstance(item, str)]
    if event.lora_name and strings and strings[0] == event.lora_name:
        strings = strings[1:]
    return strings[0] if strings else ""


def _extra_bytes(entry: list[object] | None, lora_name: str | None, *, has_salt: bool) -> bytes:
    """Return an `extra_keys` entry without adapter and salt, as msgpack; b"" if nothing is left. The root key has these two."""
    if not entry:
        return b""
    rest = list(entry)
    if lora_name and rest and rest[0] == lora_name:
        rest = rest[1:]
    if has_salt:
        salt = next((at for at, item in enumerate(rest) if isinstance(item, str)), None)
        if salt is not None:
            del rest[salt]
    return msgspec.msgpack.encode(rest) if rest else b""
