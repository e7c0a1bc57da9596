"""Tokenises short ASCII texts word by word, each word once, in an eighth of the library's time for the whole text.

The result is exact because of how the `tokenizers` library works: it splits a text at added tokens, splits the text between them
into words by the pre-tokenizer's pattern, and passes each word to the model alone. This module does the same if:

- every added token that ASCII text can contain is matched on the raw text wherever it occurs, takes no whitespace, and overlaps
no other (`pointsman_gateway.core.tokens.split_points.is_always_matched`);
- the library does nothing else to ASCII text before the split (no normaliser, or NFC), and all alternatives of the pattern have
an equivalent for Python's `re` in `pretokenizer_patterns.ASCII`, tried in the same order and with the same greediness.

The model is the library's own; it is called for each word that is not cached.

Prose need not be split into words: in all of these patterns a space before a character that is not whitespace begins a word. So
the text between two such spaces has the same tokens in any context, and is cached as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping

from tokenizers import Tokenizer

from pointsman_gateway.core.tokens.pretokenizer_patterns import ASCII, BLANKS, split_alternatives
from pointsman_gateway.core.tokens.split_points import is_always_matched
from pointsman_gateway.core.tokens.token_cache import TokenIds

# Maximum number of cached words, and of cached stretches: about 10 MB at most for each cache. A full cache is cleared; frequent
# words are soon cached again.
MAX_WORDS = 1 << 16
MAX_WORD_CHARS = 64
# A byte-level model gets printable ASCII unchanged, and the other bytes as the letters from U+0100 on, in order.
_AS_BYTES = {byte: 256 + at for at, byte in enumerate((*range(33), 127))}


class WordTokenizer:
    """Tokenises ASCII texts with one tokenizer, and caches the tokens of words. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str], added: Mapping[str, int]) -> None:
        """`added`: text -> id of the added tokens that ASCII text can contain."""
        self._find = pattern.findall
        self._model = tokenizer.model
        self._words = _Known(self._of_word)
        self._stretches = _Known(self._of_stretch)
        self._of_added = {text: array("I", [id_]).tobytes() for text, id_ in added.items()}
        # No added token is part of another or overlaps it, so the order of the alternatives does not matter.
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None

    def ids(self, text: str) -> TokenIds | None:
        """Return the tokens of `text` without special tokens around it; None if only the library can tokenise it."""
        if not text.isascii():
            return None
        ids = array("I")
        for at, part in enumerate(self._added.split(text) if self._added is not None else (text,)):
            ids.frombytes(self._of_added[part] if at % 2 else self._of_part(part))
        return ids

    def _of_part(self, part: str) -> bytes:
        """Return the tokens of the text between two added tokens, as the bytes of u32."""
        if "  " not in part:
            first, *stretches = part.split(" ")
            try:
                return self._by_words(first) + b"".join(map(self._stretches.__getitem__, stretches))
            except _BeginsBlankError:
                pass
        return self._by_words(part)

    def _by_words(self, text: str) -> bytes:
        return b"".join(map(self._words.__getitem__, self._find(text)))

    def _of_stretch(self, stretch: str) -> bytes:
        if not stretch or stretch[0].isspace():
            raise _BeginsBlankError
        return self._by_words(f" {stretch}")

    def _of_word(self, word: str) -> bytes:
        return array("I", [token.id for token in self._model.tokenize(word.translate(_AS_BYTES))]).tobytes()


class _BeginsBlankError(Exception):
    """The space before a stretch does not begin a word, since whitespace or nothing follows it."""


class _Known(dict[str, bytes]):
    """Text -> its tokens as the bytes of u32. Computes missing values with `ask`; is cleared when it is full."""

    def __init__(self, ask: Callable[[str], bytes]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, text: str) -> bytes:
        tokens = self._ask(text)
        if len(text) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[text] = tokens
        return tokens


def word_tokenizer_for(tokenizer: Tokenizer) -> WordTokenizer | None:
    """Return a WordTokenizer if all that splits a text with `tokenizer` is known, else None."""
    # Dropout makes tokens random; split special tokens would be matched as text.
    if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
        return None
    parts = split_alternatives(tokenizer)
    # Each ASCII character must match some alternative. The library makes a word of a character that none matches; findall() drops
    # it. BLANKS[0] is excluded because it depends on what follows.
    always_matched = re.compile("|".join(ASCII[part] for part in parts if part != BLANKS[0]), re.ASCII)
    if not parts or not all(always_matched.match(chr(byte)) for byte in range(128)):
        return None
    added = tokenizer.get_added_tokens_decoder()
    reachable = {id_: token for id_, token in added.items() if token.content.isascii()}
    if not all(is_always_matched(token, list(added.values())) and not token.rstrip for token in reachable.values()):
        return None
    pattern = re.compile("|".join(ASCII[part] for part in parts), re.ASCII)
    return WordTokenizer(tokenizer, pattern, {token.content: id_ for id_, token in reachable.items()})
