"""A cache of texts' tokens and tokens' keys, bounded in bytes, so that a conversation pays for each text once."""

from __future__ import annotations

import itertools
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from xxhash import xxh3_128_intdigest

from pointsman.common.core.block_keys import KEY_TOKENS, extend_keys, root_key

ENTRY_BYTES = 250  # of dictionary, key and objects around a value, measured
# Keys are looked up for as many tokens at once: few look-ups, and little to compute again behind the last whole one.
RUN_KEYS = 64
RUN_TOKENS = RUN_KEYS * KEY_TOKENS
# Keys take an eighth of the room that tokens take.
KEYS_SHARE = 1 / 8

TokenIds: TypeAlias = "array[int]"  # "I"
BlockKeys: TypeAlias = "array[int]"  # "Q"
_spaces = itertools.count()


class ByteBoundedLru:
    """A dictionary of arrays that forgets the least recently used when it holds more than `limit` bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, tuple[TokenIds, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> TokenIds | None:
        """The value, which is used now; None when it is not kept."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: TokenIds, key_bytes: int) -> None:
        """Keep a value, unless it is larger than all the room."""
        size = ENTRY_BYTES + key_bytes + len(value) * value.itemsize
        if size > self._limit:
            return
        with self._lock:
            if key in self._values:
                return  # another thread was first
            self._values[key] = (value, size)
            self.bytes += size
            while self.bytes > self._limit:
                self.bytes -= self._values.popitem(last=False)[1][1]


class TokenCache:
    """What one gateway remembers: for every tokenizer the tokens of pieces of text, and the block keys of runs of tokens.

    `hits` and `misses` count characters that were known and that had to be tokenised. Pieces are compared whole, not by a hash.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._pieces = ByteBoundedLru(int(limit_bytes * (1 - KEYS_SHARE)))
        self._runs = ByteBoundedLru(int(limit_bytes * KEYS_SHARE))
        self.hits = 0
        self.misses = 0

    @property
    def bytes(self) -> int:
        """Room taken."""
        return self._pieces.bytes + self._runs.bytes

    @staticmethod
    def space() -> int:
        """A name for one tokenizer's pieces."""
        return next(_spaces)

    def find(self, space: int, pieces: Sequence[str]) -> list[TokenIds | None]:
        """The tokens of each piece, None where they are not known. Counts hits and misses."""
        found = [self._pieces.get((space, piece)) for piece in pieces]
        missing = sum(len(piece) for piece, ids in zip(pieces, found, strict=True) if ids is None)
        self.misses += missing
        self.hits += sum(map(len, pieces)) - missing
        return found

    def keep(self, space: int, piece: str, ids: TokenIds) -> None:
        """Remember a piece's tokens."""
        self._pieces.put((space, piece), ids, sys.getsizeof(piece))

    def keys(self, ids: TokenIds, model: str, lora: str = "", cache_salt: str = "") -> BlockKeys:
        """`block_keys.prompt_keys`, of which only runs that were not seen behind the same tokens are computed."""
        parent = root_key(model, lora, cache_salt)
        keys = array("Q")
        for start in range(0, len(ids) - RUN_TOKENS + 1, RUN_TOKENS):
            run = ids[start : start + RUN_TOKENS]
            # As strong as the keys themselves: a key is a hash of everything before it.
            name = (parent, xxh3_128_intdigest(run, parent))
            known = self._runs.get(name)
            if known is None:
                known = array("Q", extend_keys(parent, run))
                self._runs.put(name, known, 0)
            keys += known
            parent = keys[-1]
        keys.extend(extend_keys(parent, ids[len(keys) * KEY_TOKENS :]))
        return keys
