"""Finds where a text may be cut so that its pieces, tokenised one by one, give the whole text's tokens.

Two kinds of place are exact by the way the `tokenizers` library works, and others are not used:

- **Before an added token** ("<|im_start|>"). The library looks for added tokens first, leftmost and longest, and normalises,
  pre-tokenises and encodes what lies between them apart. A place is certain when nothing can swallow, shift or skip the
  token: it is matched on the raw text, takes no blanks on its left, stands as part of a word too, and overlaps no other
  added token. A piece that begins with its token is not at the text's beginning, so that what a Metaspace or Prepend adds
  "at the beginning" or "to each part" is the same in the piece as in the whole.
- **After a newline, before visible ASCII other than "/"**, where the pre-tokenizer splits by a pattern made of known alternatives
  (`pretokenizer_patterns.ASCII`; GPT-4, Llama 3, Qwen and Tekken are). None of them matches a newline followed by such a
  character, looks behind, or looks past one: a run of blanks that ends with a newline is taken whole by `\\s*[\\r\\n]+` (or its
  head by the symbols before it), which therefore must come before the other alternatives for blanks. "/" is left out for the
  patterns that take slashes after newlines. A newline and ASCII do not compose under NFC, and no added token may hold a newline
  or reach to its left.

Which of the certain places are used depends only on the text before them (and on one token's length after), so a text that
grows keeps its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from pointsman.gateway.core.tokens.pretokenizer_patterns import BLANKS, NEWLINES, split_alternatives

# Shorter pieces are joined: each costs a look-up, and some 300 bytes when it is kept.
MIN_PIECE_CHARS = 256
# About as much text is between two cuts at newlines: what a text that grew costs at least.
NEWLINE_PIECE_CHARS = 2_048
# More would cost more to look for than they save.
MAX_SPLIT_TOKENS = 4

_NEWLINE = re.compile(r"\n(?=[!-.0-~])")


@dataclass(frozen=True)
class SplitPoints:
    """The places that are used with one tokenizer: before these added tokens, and at newlines where `lines`. `certain` are all
    added tokens before which a cut is exact."""

    tokens: tuple[str, ...] = ()
    lines: bool = False
    always_matched: tuple[str, ...] = ()

    def head(self, text: str, length: int) -> list[str]:
        """Pieces of the first `length` characters of `text`, as far as they end at a place where a cut is exact."""
        pieces = self.pieces(text[:length])
        # The last one ends where it was told to, not at a place of its own.
        return pieces if text.startswith(self.always_matched, length) else pieces[:-1]

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces, in order; one piece where nothing can be cut."""
        if len(text) <= MIN_PIECE_CHARS or not (self.tokens or self.lines):
            return [text]
        pieces, start = [], 0
        for end in (*sorted(at for token in self.tokens for at in _occurrences(text, token)), len(text)):
            while (
                self.lines
                and end - start > NEWLINE_PIECE_CHARS
                and (found := _NEWLINE.search(text, start + NEWLINE_PIECE_CHARS, end))
            ):
                pieces.append(text[start : found.end()])
                start = found.end()
            if end - start >= MIN_PIECE_CHARS or (end == len(text) and start < end):
                pieces.append(text[start:end])
                start = end
        return pieces


def split_points_for(tokenizer: Tokenizer, samples: Sequence[str]) -> SplitPoints:
    """The places to use: at newlines, and before the certain tokens that `samples` (rendered prompts) hold most often."""
    # Dropout makes tokens random; split special tokens would be matched as text.
    if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
        return SplitPoints()
    added = list(tokenizer.get_added_tokens_decoder().values())
    always_matched = [token.content for token in added if is_always_matched(token, added)]
    often = {token: sum(sample.count(token) for sample in samples) for token in always_matched}
    used = sorted((token for token in always_matched if often[token]), key=lambda token: (-often[token], token))
    return SplitPoints(tuple(used[:MAX_SPLIT_TOKENS]), _cuts_lines(tokenizer, added), tuple(always_matched))


def is_always_matched(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    """Whether `token` is found wherever its text stands, whatever is before it and whichever of `added` are near."""
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
    parts = split_alternatives(tokenizer)
    blanks = [at for at, part in enumerate(parts) if part in BLANKS]
    return NEWLINES in parts and parts.index(NEWLINES) < min(blanks, default=len(parts))


def _occurrences(text: str, token: str) -> Iterator[int]:
    at = text.find(token)
    while at >= 0:
        yield at
        at = text.find(token, at + len(token))
