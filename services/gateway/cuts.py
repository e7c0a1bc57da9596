"""Where a text may be cut so that its pieces, tokenised one by one, give the whole text's tokens. Pure.

Two kinds of place are exact by the way the `tokenizers` library works, and others are not used:

- **Before an added token** ("<|im_start|>"). The library looks for added tokens first, leftmost and longest, and normalises,
  pre-tokenises and encodes what lies between them apart. A place is certain when nothing can swallow, shift or skip the
  token: it is matched on the raw text, takes no blanks on its left, stands as part of a word too, and overlaps no other
  added token. A piece that begins with its token is not at the text's beginning, so that what a Metaspace or Prepend adds
  "at the beginning" or "to each part" is the same in the piece as in the whole.
- **After a newline, before visible ASCII other than "/"**, where the pre-tokenizer splits by a pattern made of
  `_KNOWN` alternatives (GPT-4, Llama 3, Qwen and Tekken are). None of them matches a newline followed by such a character,
  looks behind, or looks past one: a run of blanks that ends with a newline is taken whole by `\\s*[\\r\\n]+` (or its head by
  the symbols before it), which therefore must come before the other alternatives for blanks. "/" is left out for the
  patterns that take slashes after newlines. A newline and ASCII do not compose under NFC, and no added token may hold a
  newline or reach to its left.

Which of the certain places are used depends only on the text before them (and on one token's length after), so a text that
grows keeps its pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

# Shorter pieces are joined: each costs a look-up, and some 300 bytes when it is kept.
SHORTEST = 256
# About as much text is between two cuts at newlines: what a text that grew costs at least.
LINES = 2_048
# More would cost more to look for than they save.
MOST_TOKENS = 4

_NEWLINE = re.compile(r"\n(?=[!-.0-~])")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NEWLINES = r"\s*[\r\n]+"
_BLANKS = (r"\s+(?!\S)", r"\s+")
_KNOWN = frozenset(
    {_CONTRACTIONS, _NEWLINES, *_BLANKS}
    | {r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r"\p{N}{1,3}"}
    | {rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n{more}]*" for marks in ("", r"\p{M}") for more in ("", "/")}
    | {
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}{end}"
        for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
        for end in ("", _CONTRACTIONS + "?")
    }
)


@dataclass(frozen=True)
class Cuts:
    """The places that are used with one tokenizer: before these added tokens, and at newlines where `lines`. `certain` are all
    added tokens before which a cut is exact."""

    tokens: tuple[str, ...] = ()
    lines: bool = False
    certain: tuple[str, ...] = ()

    def head(self, text: str, length: int) -> list[str]:
        """Pieces of the first `length` characters of `text`, as far as they end at a place where a cut is exact."""
        pieces = self.pieces(text[:length])
        # The last one ends where it was told to, not at a place of its own.
        return pieces if text.startswith(self.certain, length) else pieces[:-1]

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces, in order; one piece where nothing can be cut."""
        if len(text) <= SHORTEST or not (self.tokens or self.lines):
            return [text]
        pieces, start = [], 0
        for end in (*sorted(at for token in self.tokens for at in _occurrences(text, token)), len(text)):
            while self.lines and end - start > LINES and (found := _NEWLINE.search(text, start + LINES, end)):
                pieces.append(text[start : found.end()])
                start = found.end()
            if end - start >= SHORTEST or (end == len(text) and start < end):
                pieces.append(text[start:end])
                start = end
        return pieces


def cuts_for(tokenizer: Tokenizer, samples: Sequence[str]) -> Cuts:
    """The places to use: at newlines, and before the certain tokens that `samples` (rendered prompts) hold most often."""
    # Dropout makes tokens random; split special tokens would be matched as text.
    if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
        return Cuts()
    added = list(tokenizer.get_added_tokens_decoder().values())
    certain = [token.content for token in added if _is_certain(token, added)]
    often = {token: sum(sample.count(token) for sample in samples) for token in certain}
    used = sorted((token for token in certain if often[token]), key=lambda token: (-often[token], token))
    return Cuts(tuple(used[:MOST_TOKENS]), _cuts_lines(tokenizer, added), tuple(certain))


def _is_certain(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    text = token.content
    if token.normalized or token.lstrip or token.single_word or not text or re.match(r"[\s\w]", text):
        return False
    # Tokens that are matched on normalised text are looked for only between those that are not.
    rivals = [other.content for other in added if not other.normalized]
    return all(text == rival or text not in rival for rival in rivals) and not any(
        rival.endswith(text[:length]) for rival in rivals for length in range(1, len(text))
    )


def _cuts_lines(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> bool:
    if any(token.lstrip or "\n" in token.content for token in added):
        return False
    if tokenizer.normalizer is not None and _state(tokenizer.normalizer) != {"type": "NFC"}:
        return False
    if tokenizer.pre_tokenizer is None:
        return False
    match _state(tokenizer.pre_tokenizer):
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return _is_known(pattern)
    return False


def _is_known(pattern: str) -> bool:
    parts = list(_alternatives(pattern))
    blanks = [at for at, part in enumerate(parts) if part in _BLANKS]
    return _NEWLINES in parts and _KNOWN.issuperset(parts) and parts.index(_NEWLINES) < min(blanks, default=len(parts))


def _alternatives(pattern: str) -> Iterator[str]:
    """What the `|` outside of groups and classes separate."""
    depth, start = 0, 0
    for found in re.finditer(r"\\.|[()|\[\]]", pattern):
        mark = found.group()
        depth += (mark in "([") - (mark in ")]")
        if mark == "|" and not depth:
            yield pattern[start : found.start()]
            start = found.end()
    yield pattern[start:]


def _occurrences(text: str, token: str) -> Iterator[int]:
    at = text.find(token)
    while at >= 0:
        yield at
        at = text.find(token, at + len(token))


def _state(component: Any) -> object:
    """A tokenizer's part as tokenizer.json has it."""
    return json.loads(component.__getstate__())
