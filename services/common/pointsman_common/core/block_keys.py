"""Block keys: the hashes by which agents, routers and gateways identify blocks of a prompt.

A key identifies one block of 16 tokens *and everything before it*: key[i] = XXH3-64(16 token ids as little-endian u32, seed =
key[i-1]). The chain starts from a root that depends on model, LoRA adapter and cache salt. Equal keys therefore mean an equal
prefix under equal conditions, whatever hash and block size the engine itself uses. Pure.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Sequence

from xxhash import xxh3_64_intdigest

KEY_TOKENS = 16
KEY_SCHEME = "xxh3-64/16/1"
# Number of keys of a prompt from one anchor to the next (see anchor_of).
ANCHOR_KEYS = 64
_ANCHOR = 0x9E37_79B9_7F4A_7C15
_KEY_BYTES = KEY_TOKENS * 4
_MASK = (1 << 64) - 1
# Number of keys that digest_of folds at a time.
_ROW_KEYS = 256
# Number of keys from which folding is faster than a loop.
_FOLDED_FROM = 128
_EVERY_OTHER = int.from_bytes((b"\xff" * 8 + bytes(8)) * (_ROW_KEYS // 2), "little")
# Half the length of a row in bits and a mask of that length, for each halving until one product is left.
_HALVES = [(64 * keys, (1 << 64 * keys) - 1) for keys in (128, 64, 32, 16, 8, 4, 2)]


def root_key(model: str, lora: str = "", cache_salt: str = "") -> int:
    """Return the parent of a prompt's first key. `model` is the pool's name; empty `lora` and `cache_salt` mean none."""
    parts = "\x1f".join((KEY_SCHEME, model, lora, cache_salt))
    return xxh3_64_intdigest(parts.encode())


def extend_keys(parent: int, token_ids: Sequence[int], extra: bytes = b"") -> list[int]:
    """Return the keys of the full 16-token blocks of `token_ids` that follow the block whose key is `parent`.

    Tokens after the last full block have no key. `extra` distinguishes blocks with equal tokens and different content
    (multimodal hashes); it enters every key that this call computes. Raises OverflowError for ids outside u32.
    """
    words = array("I", token_ids[: len(token_ids) // KEY_TOKENS * KEY_TOKENS])
    if sys.byteorder != "little":
        words.byteswap()
    seed = parent ^ xxh3_64_intdigest(extra) if extra else parent
    # struct.iter_unpack takes half the time of slicing a memoryview.
    return [
        seed := xxh3_64_intdigest(block, seed) for (block,) in struct.iter_unpack(f"{_KEY_BYTES}s", words.tobytes())
    ]


def prompt_keys(token_ids: Sequence[int], model: str, lora: str = "", cache_salt: str = "") -> list[int]:
    """Return the keys of a whole prompt: one for each full block of 16 tokens."""
    return extend_keys(root_key(model, lora, cache_salt), token_ids)


def anchor_of(key: int) -> int:
    """Return the anchor that belongs to the last of each ANCHOR_KEYS keys of a prompt.

    An instance with sparse prefixes has the anchor in its set of keys while a cached prefix may end there or later, because a
    group of full attention has all blocks up to there. So routers know where not to look for one.
    """
    return key ^ _ANCHOR


def digest_of(tier: int, keys: Collection[int]) -> int:
    """Return a digest of (tier, key) pairs that does not depend on their order: the xor of key * (2 * tier + 1) mod 2^64.

    The digest of a union of disjoint sets is the xor of their digests.
    """
    factor, digest = 2 * tier + 1, 0
    # The lower 64 bits of a xor are the xor of the lower 64 bits, so one cut at the end is enough.
    if len(keys) < _FOLDED_FROM:
        for key in keys:
            digest ^= key * factor
        return digest & _MASK
    # Many keys form one long integer that is multiplied and folded as a whole. This takes two thirds of a loop's time.
    words = array("Q", keys)
    for start in range(0, len(words), _ROW_KEYS):
        row = int.from_bytes(words[start : start + _ROW_KEYS].tobytes(), sys.byteorder)
        # Every other key, so that a 128-bit product fits into the bits of the key and its neighbour.
        digest ^= (row & _EVERY_OTHER) * factor ^ (row >> 64 & _EVERY_OTHER) * factor
    for half, lower in _HALVES:
        digest = digest >> half ^ digest & lower
    return digest & _MASK
