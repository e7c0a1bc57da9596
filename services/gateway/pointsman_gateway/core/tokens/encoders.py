"""The libraries that encode texts: `tokenizers`, the reference, and `fastokens`, which takes a twentieth of its time or less.

`fastokens` keeps the tokens of the text between added tokens, so that a conversation pays for each message once. The pieces of a
text that `tokenizers` encodes (`split_points`) are kept here.

Both encoders are thread-safe, and raise Unrenderable for half a surrogate pair. `least_chars` is the minimum length of the pieces
that one wants, and `inline_chars` the number of characters that it encodes within 3 ms, whatever they are. `most_chars` is the
maximum length of a piece: what an encoder takes of memory for each character (`tokenizers` 120 to 330 bytes, `fastokens` 20 to
100) is in no budget.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from typing import Any

import structlog
from tokenizers import Tokenizer

from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.split_points import is_plain
from pointsman_gateway.core.tokens.token_cache import ByteBoundedLru, TokenCache, TokenIds

log = structlog.get_logger()

# Maximum number of characters of a piece whose encoding by `tokenizers` takes 30 to 60 MB of memory (120 to 240 bytes for each).
LARGE_PIECE_CHARS = 1 << 18
_HALF_A_PAIR = "a text with half a surrogate pair"


class FastEncoderError(Exception):
    """Raised if `fastokens` fails on a text."""


class LibraryEncoder:
    """Encodes with `tokenizers`, and keeps the tokens of pieces once it has joined the cache."""

    name = "tokenizers"
    # A piece costs a look-up, and about 300 bytes in the cache.
    least_chars = 256
    inline_chars = 4 << 10
    most_chars = 1 << 20

    def __init__(self, tokenizer: Tokenizer, cache: TokenCache) -> None:
        """Mutates `tokenizer`: it neither truncates nor pads."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cache = cache
        self._kept = ByteBoundedLru(0)

    def join_cache(self) -> None:
        """Take part in the cache."""
        self._cache.join(self._kept)

    def encode(self, piece: str) -> TokenIds:
        """Return the tokens of a piece, and keep them. Counts it as a hit or miss."""
        if (known := self._kept.get(piece)) is not None:
            self._cache.hits += len(piece)
            return known
        self._cache.misses += len(piece)
        ids = self.encode_anew(piece)
        self._kept.put(piece, ids, sys.getsizeof(piece))
        return ids

    def encode_anew(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Return the tokens of a text, and keep none."""
        # One call per text encodes it in this thread. The library spreads several texts over all cores, which costs more than it
        # saves for short ones. encode() holds the interpreter lock; encode_batch_fast() releases it.
        try:
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise Unrenderable(_HALF_A_PAIR) from error
        return array("I", encoded.ids)


class FastEncoder:
    """Encodes with `fastokens`. Its cache of the text between added tokens compares whole texts, not hashes."""

    name = "fastokens"
    # So few cuts that they cost nothing, and so many that a prompt that is too long is not encoded to its end.
    least_chars = LARGE_PIECE_CHARS
    inline_chars = 16 << 10
    most_chars = 4 << 20

    def __init__(self, tokenizer: Any, cache: TokenCache) -> None:
        """`tokenizer`: a fastokens.Tokenizer. Mutates it: it neither truncates nor pads."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cache = cache
        self._counting = threading.Lock()
        self._counted = 0, 0
        cache.join(self)

    @property
    def bytes(self) -> int:
        """Number of bytes of the cached texts and tokens."""
        stats = self._tokenizer.segment_cache_stats()
        return stats["bytes"] if stats else 0

    def set_limit(self, limit: int) -> None:
        """Set the maximum of `bytes`. What is cached is lost. Mutates."""
        with self._counting:
            self._tokenizer.enable_segment_cache(limit)
            self._counted = 0, 0

    def encode(self, piece: str, *, counted: bool = True) -> TokenIds:
        """As LibraryEncoder.encode(). `counted`: as hits and misses. Raises FastEncoderError."""
        try:
            ids = array("I", self._tokenizer.encode_batch_flat([piece])[0])
        except UnicodeError as error:
            raise Unrenderable(_HALF_A_PAIR) from error
        except BaseException as error:
            # A panic of the library is no Exception, and ends nothing but this call.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise FastEncoderError(type(error).__name__) from error
            raise
        known, new = self._count()
        if counted:
            self._cache.hits += known
            # A text without added tokens is neither found nor kept.
            self._cache.misses += new if known or new else len(piece)
        return ids

    def _count(self) -> tuple[int, int]:
        """Return how many bytes were found and had to be encoded since the last call. Mutates."""
        with self._counting:
            stats = self._tokenizer.segment_cache_stats()
            if not stats:
                return 0, 0
            (known, new), self._counted = self._counted, (stats["hit_bytes"], stats["miss_bytes"])
            return self._counted[0] - known, self._counted[1] - new


def fast_encoder_for(tokenizer: Tokenizer, cache: TokenCache) -> FastEncoder | None:
    """Return an encoder by `fastokens`; None if it is not installed or does not accept the tokenizer."""
    # Its own threads wait for work by spinning. Must be set before the first text is encoded.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    try:
        import fastokens
    except ImportError as error:  # no build for this platform
        log.info("tokenizers encodes, since fastokens cannot be imported", reason=str(error))
        return None
    if not is_plain(tokenizer):
        return None
    try:
        fast = FastEncoder(fastokens.Tokenizer.from_json_str(tokenizer.to_str()), cache)
        fast.encode("a", counted=False)  # builds its tables
    except (ValueError, FastEncoderError) as error:
        log.info("tokenizers encodes, since fastokens does not accept the tokenizer", reason=str(error))
        return None
    return fast
