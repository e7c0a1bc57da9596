"""Encodes texts in pieces and remembers the pieces, so that a conversation's next turn costs the encoding of its new messages.

A tokenizer cuts a text at its special tokens before it does anything else. A text that is cut in front of a special token has
therefore, piece by piece, the token ids of the whole.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict

from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

# Number of token ids that are remembered: 4 bytes each.
REMEMBERED_TOKENS = 4_000_000


class EncodedSegments:
    """Token ids of texts, by `tokenizer`, with a cache of at most `capacity` ids (LRU). May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, capacity: int = REMEMBERED_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        added = tokenizer.get_added_tokens_decoder().values()
        # A token that takes spaces beside it, or is a part of another one, may match differently in a piece.
        plain = [
            token.content
            for token in added
            if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            and not any(token.content in other.content for other in added if other is not token)
        ]
        self._cuts = re.compile("(?=" + "|".join(map(re.escape, sorted(plain))) + ")") if plain else None

    @property
    def remembered(self) -> int:
        """Number of token ids that are remembered."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. Special tokens that are written out in the text are recognised."""
        ids: list[int] = []
        for piece in self._cuts.split(text) if self._cuts is not None else [text]:
            if piece:
                ids.extend(self._piece(piece))
        return ids

    def _piece(self, text: str) -> array[int]:
        key = xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        with self._lock:
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return found
        made = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._size += len(made)
            while self._size > self._capacity:
                _, oldest = self._known.popitem(last=False)
                self._size -= len(oldest)
        return made
