"""Tokenises short ASCII texts word by word, each word once: an eighth of what the library takes for the whole.

Exact by the way the `tokenizers` library works: a text is cut at added tokens, what lies between is split into words by the
pre-tokenizer's pattern, and the model sees each word alone. All of that is done here where it is known:

- every added token that ASCII text can hold is matched on the raw text, wherever it stands, takes no blanks, and overlaps no
  other (`pointsman.gateway.core.tokens.split_points.is_certain`);
- nothing else is done to ASCII text before the split (no normaliser, or NFC), and the pattern is made of alternatives of which
  `pretokenizer_patterns.ASCII` has the like for Python's `re`, tried in the same order with the same greed;
- the model is the library's own, asked for each word that is not known.

Prose is not even split into words: by all of these patterns a blank before something that is no blank begins a word, so what
stands between two such blanks has its tokens whatever stands around it, and is known as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping

from tokenizers import Tokenizer

from pointsman.gateway.core.tokens.pretokenizer_patterns import ASCII, BLANKS, split_alternatives
from pointsman.gateway.core.tokens.split_points import is_always_matched
from pointsman.gateway.core.tokens.token_cache import TokenIds

# Some 10 MB at most, twice. What people write again and again is back at once after a fresh start.
MAX_WORDS = 1 << 16
MAX_WORD_CHARS = 64
# A byte-level model sees printable ASCII as it is, and other bytes as the letters from U+0100 on, in order.
_AS_BYTES = {byte: 256 + at for at, byte in enumerate((*range(33), 127))}


class WordTokenizer:
    """One tokenizer's words. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str], added: Mapping[str, int]) -> None:
        """`added`: the added tokens that ASCII text can hold, by their text."""
        self._find = pattern.findall
        self._model = tokenizer.model
        self._words = _Known(self._of_word)
        self._stretches = _Known(self._of_stretch)
        self._of_added = {text: array("I", [id_]).tobytes() for text, id_ in added.items()}
        # None of the tokens is part of another or overlaps it, so that their order does not matter.
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None

    def ids(self, text: str) -> TokenIds | None:
        """The tokens of `text` without special tokens around it; None where only the library can tell."""
        if not text.isascii():
            return None
        ids = array("I")
        for at, part in enumerate(self._added.split(text) if self._added is not None else (text,)):
            ids.frombytes(self._of_added[part] if at % 2 else self._of_part(part))
        return ids

    def _of_part(self, part: str) -> bytes:
        """The tokens, as the bytes of u32, of what stands between two added tokens."""
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
    """The blank before a stretch begins no word."""


class _Known(dict[str, bytes]):
    """Text -> its tokens as the bytes of u32; asks for what it has not, and starts again when it is full."""

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
    """The words of a tokenizer where all that splits a text is known, else None."""
    # Dropout makes tokens random; split special tokens would be matched as text.
    if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
        return None
    parts = split_alternatives(tokenizer)
    # A letter that no alternative takes whatever follows it would be a word of its own in the library, and none here.
    always_matched = re.compile("|".join(ASCII[part] for part in parts if part != BLANKS[0]), re.ASCII)
    if not parts or not all(always_matched.match(chr(byte)) for byte in range(128)):
        return None
    added = tokenizer.get_added_tokens_decoder()
    reachable = {id_: token for id_, token in added.items() if token.content.isascii()}
    if not all(is_always_matched(token, list(added.values())) and not token.rstrip for token in reachable.values()):
        return None
    pattern = re.compile("|".join(ASCII[part] for part in parts), re.ASCII)
    return WordTokenizer(tokenizer, pattern, {token.content: id_ for id_, token in reachable.items()})
