"""Block keys: the names under which agents, routers and gateways know a piece of prompt.

A key stands for one block of 16 tokens *and everything before it*: key[i] = XXH3-64(16 token ids as little-endian u32, seed =
key[i-1]), and the chain starts from a root that depends on model, LoRA adapter and cache salt. Equal keys therefore mean an
equal prefix under equal conditions, whatever hash and block size an engine uses itself. Pure.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Sequence

from xxhash import xxh3_64_intdigest

KEY_TOKENS = 16
KEY_SCHEME = "xxh3-64/16/1"
_KEY_BYTES = KEY_TOKENS * 4
_MASK = (1 << 64) - 1
# How many keys are folded at a time by digest_of, and from how many on that pays.
_ROW_KEYS = 256
_FOLDED_FROM = 128
_EVERY_OTHER = int.from_bytes((b"\xff" * 8 + bytes(8)) * (_ROW_KEYS // 2), "little")
# A row's half in bits, with a mask for it, and so on until there is one product.
_HALVES = [(64 * keys, (1 << 64 * keys) - 1) for keys in (128, 64, 32, 16, 8, 4, 2)]


def root_key(model: str, lora: str = "", cache_salt: str = "") -> int:
    """The parent of a prompt's first key. `model` is the pool's name; empty `lora` and `cache_salt` mean none."""
    parts = "\x1f".join((KEY_SCHEME, model, lora, cache_salt))
    return xxh3_64_intdigest(parts.encode())


def extend_keys(parent: int, token_ids: Sequence[int], extra: bytes = b"") -> list[int]:
    """Keys of the full 16-token blocks of `token_ids` that follow the block named `parent`.

    The remainder that fills no block has no key. `extra` tells apart blocks with equal tokens and different content
    (multimodal hashes); it enters every key made by this call. Raises OverflowError for ids outside u32.
    """
    words = array("I", token_ids[: len(token_ids) // KEY_TOKENS * KEY_TOKENS])
    if sys.byteorder != "little":
        words.byteswap()
    seed = parent ^ xxh3_64_intdigest(extra) if extra else parent
    # Half the time that slices of a memoryview take.
    return [
        seed := xxh3_64_intdigest(block, seed) for (block,) in struct.iter_unpack(f"{_KEY_BYTES}s", words.tobytes())
    ]


def prompt_keys(token_ids: Sequence[int], model: str, lora: str = "", cache_salt: str = "") -> list[int]:
    """Keys of a whole prompt: one for each full block of 16 tokens."""
    return extend_keys(root_key(model, lora, cache_salt), token_ids)


def digest_of(tier: int, keys: Collection[int]) -> int:
    """Order-free digest of (tier, key) pairs: the xor of key * (2 * tier + 1) mod 2^64. Digests of disjoint sets xor."""
    factor, digest = 2 * tier + 1, 0
    # The lower 64 bits of a xor are the xor of the lower 64 bits: products may be cut at the end.
    if len(keys) < _FOLDED_FROM:
        for key in keys:
            digest ^= key * factor
        return digest & _MASK
    # Many keys are one long number, multiplied and folded as a whole: two thirds of the time that one by one takes.
    words = array("Q", keys)
    for start in range(0, len(words), _ROW_KEYS):
        row = int.from_bytes(words[start : start + _ROW_KEYS].tobytes(), sys.byteorder)
        # Every other key, with room for its product where its neighbour was.
        digest ^= (row & _EVERY_OTHER) * factor ^ (row >> 64 & _EVERY_OTHER) * factor
    for half, lower in _HALVES:
        digest = digest >> half ^ digest & lower
    return digest & _MASK
