"""A cache, bounded in bytes, of the tokens of texts and the block keys of tokens. A conversation pays for each text only once."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol, TypeAlias
from weakref import WeakSet

from xxhash import xxh3_128_intdigest

from pointsman_common.core.block_keys import KEY_TOKENS, extend_keys, root_key

ENTRY_BYTES = 250  # size of dictionary entry, key and objects around a value; measured
# Number of keys in a cached run: long enough for few look-ups, short enough that little is computed again after the last whole
# run.
RUN_KEYS = 64
RUN_TOKENS = RUN_KEYS * KEY_TOKENS
# Share of the cache limit for block keys, which take an eighth of the memory that tokens take.
KEYS_SHARE = 1 / 8

TokenIds: TypeAlias = "array[int]"  # "I"
BlockKeys: TypeAlias = "array[int]"  # "Q"


class KeepsTokens(Protocol):
    """A part of the cache: the tokens of one tokenizer's texts."""

    @property
    def bytes(self) -> int:
        """Number of bytes used."""

    def set_limit(self, limit: int) -> None:
        """Set the maximum number of bytes. Mutates."""


class ByteBoundedLru:
    """A dictionary of arrays that removes the least recently used ones when it holds more than `limit` bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, tuple[TokenIds, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> TokenIds | None:
        """Return the value and mark it as used; None if it is not kept."""
        with self._lock:
            if (value := self._values.get(key)) is None:
                return None
            self._values.move_to_end(key)
            return value[0]

    def put(self, key: Hashable, value: TokenIds, key_bytes: int) -> None:
        """Keep a value, unless it is larger than the limit or its key is present."""
        size = ENTRY_BYTES + key_bytes + len(value) * value.itemsize
        if size > self._limit:
            return
        with self._lock:
            if key in self._values:
                return  # another thread was first
            self._values[key] = (value, size)
            self.bytes += size
            self._shrink()

    def set_limit(self, limit: int) -> None:
        """Set the maximum number of bytes. Mutates."""
        with self._lock:
            self._limit = limit
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self._limit:
            self.bytes -= self._values.popitem(last=False)[1][1]


class TokenCache:
    """The token cache of one gateway process: the tokens of each tokenizer's texts, and the block keys of runs of tokens.

    `hits` and `misses` count the characters that were cached and those that had to be tokenised.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._texts_limit = int(limit_bytes * (1 - KEYS_SHARE))
        self._texts: WeakSet[KeepsTokens] = WeakSet()
        self._joining = threading.Lock()
        self._runs = ByteBoundedLru(int(limit_bytes * KEYS_SHARE))
        self.hits = 0
        self.misses = 0

    @property
    def bytes(self) -> int:
        """Number of bytes used."""
        return sum(texts.bytes for texts in [*self._texts]) + self._runs.bytes

    def join(self, texts: KeepsTokens) -> None:
        """Give each tokenizer's texts, `texts` now among them, an equal share of the memory as long as they are referred to."""
        with self._joining:
            self._texts.add(texts)
            sharing = [*self._texts]
            for each in sharing:
                each.set_limit(self._texts_limit // len(sharing))

    def keys(self, ids: TokenIds, model: str, lora: str = "", cache_salt: str = "") -> BlockKeys:
        """Return the same keys as `block_keys.prompt_keys`; only runs that are not cached after the same tokens are computed."""
        parent = root_key(model, lora, cache_salt)
        keys = array("Q")
        for start in range(0, len(ids) - RUN_TOKENS + 1, RUN_TOKENS):
            run = ids[start : start + RUN_TOKENS]
            # The name is as collision-resistant as the keys: the parent key is a hash of everything before the run.
            name = (parent, xxh3_128_intdigest(run, parent))
            known = self._runs.get(name)
            if known is None:
                known = array("Q", extend_keys(parent, run))
                self._runs.put(name, known, 0)
            keys += known
            parent = keys[-1]
        keys.extend(extend_keys(parent, ids[len(keys) * KEY_TOKENS :]))
        return keys
