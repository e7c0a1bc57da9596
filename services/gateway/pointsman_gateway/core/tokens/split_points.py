"""Finds split points: places where a text can be cut so that its pieces, tokenised one by one, give the whole text's tokens.

Three kinds of split points are exact because of how the `tokenizers` library works. Others are not used:

- **Before an added token** ("<|im_start|>"). The library first finds the added tokens, leftmost and longest, and normalises,
  pre-tokenises and encodes the text between them separately. The split point is exact if the token is always matched: it is
  matched on the raw text, takes no whitespace on its left, may be part of a word, and overlaps no other added token. In a piece
  that begins with an added token, the text after the token is not at the beginning. So what a Metaspace or Prepend adds "at the
  beginning" or "to each part" is the same in the piece as in the whole text.
- **After a newline, before visible ASCII other than "/"**, if the pre-tokenizer splits by a pattern of known alternatives
  (`pretokenizer_patterns.ASCII`; those of GPT-4, Llama 3, Qwen and Tekken are known). No alternative matches a newline together
  with such a character after it, looks behind, or looks ahead past a newline. The last holds because `\\s*[\\r\\n]+` matches
  a whole run of whitespace that ends with a newline (or the alternative for symbols matches its first part). It must therefore
  come before the other alternatives for whitespace. "/" is excluded because of patterns that match slashes after newlines. A
  newline and ASCII do not compose under NFC, and no added token may contain a newline or take whitespace on its left.
- **After a lower-case ASCII letter, before one of `WORD_ENDS`**, under the same condition. Only the alternatives for words and
  for contractions match letters, none of them matches such a character after one, and none looks behind. So a word ends there.
  No added token may contain this place or take whitespace on its right. It is used in long lines only, because the memory for
  encoding a piece is more than a hundred times its length.

Which exact split points are used depends only on the text before them (and on one token's length after), so a text that grows
keeps its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from pointsman_gateway.core.tokens.pretokenizer_patterns import BLANKS, NEWLINES, split_alternatives

# Minimum length of a piece, characters. A piece costs a look-up, and about 300 bytes in the cache.
MIN_PIECE_CHARS = 256
# Approximate length of pieces that end at newlines, characters. At least one such piece is tokenised again when a text has grown.
NEWLINE_PIECE_CHARS = 2_048
# Approximate maximum length of a piece without a newline, characters.
LONG_PIECE_CHARS = 16 << 10
# Maximum number of added tokens at which texts are split. The search for more would cost more than they save.
MAX_SPLIT_TOKENS = 4

WORD_ENDS = ' ",.:;()\\'
_NEWLINE = re.compile(r"\n(?=[!-.0-~])")
_WORD_END = re.compile(rf"[a-z](?=[{re.escape(WORD_ENDS)}])")


@dataclass(frozen=True)
class SplitPoints:
    """The split points of one tokenizer: before the added tokens `tokens`, at newlines if `lines`, and at ends of words in long
    lines if `words`. `always_matched`: all added tokens before which a split is exact."""

    tokens: tuple[str, ...] = ()
    lines: bool = False
    always_matched: tuple[str, ...] = ()
    words: bool = False

    def head(self, text: str, length: int) -> list[str]:
        """Return pieces of the first `length` characters of `text`, without a last piece that does not end at an exact split
        point."""
        pieces = self.pieces(text[:length])
        # The last piece ends at `length`, which is an exact split point only before an always matched token.
        return pieces if text.startswith(self.always_matched, length) else pieces[:-1]

    def pieces(self, text: str) -> list[str]:
        """Return `text` in pieces, in order; one piece if there is no split point."""
        if len(text) <= MIN_PIECE_CHARS or not (self.tokens or self.lines):
            return [text]
        pieces, start, length = list[str](), 0, len(text)
        # Token -> its next occurrence from which a piece may begin. No token is searched twice in the same text.
        following = {token: _next(text, token, MIN_PIECE_CHARS) for token in self.tokens}
        end = min(following.values(), default=length)
        while start < length:
            while (
                self.lines
                and end - start > NEWLINE_PIECE_CHARS
                and (found := _NEWLINE.search(text, start + NEWLINE_PIECE_CHARS, end))
            ):
                start = self._cut_words(text, start, found.end(), pieces)
                pieces.append(text[start : found.end()])
                start = found.end()
            start = self._cut_words(text, start, end, pieces)
            if end - start >= MIN_PIECE_CHARS or (end == length and start < end):
                pieces.append(text[start:end])
                start = end
            # Nearer ends would make no piece.
            least = start + MIN_PIECE_CHARS
            for token, at in following.items():
                if at < least:
                    following[token] = _next(text, token, least)
            end = min(following.values(), default=length)
        return pieces

    def _cut_words(self, text: str, start: int, stop: int, pieces: list[str]) -> int:
        """Add pieces of about LONG_PIECE_CHARS to `pieces` while more than that is left up to `stop`; return where the rest
        begins."""
        while (
            self.words
            and stop - start > LONG_PIECE_CHARS
            and (found := _WORD_END.search(text, start + LONG_PIECE_CHARS, stop))
        ):
            pieces.append(text[start : found.end()])
            start = found.end()
        return start


def split_points_for(tokenizer: Tokenizer, samples: Sequence[str]) -> SplitPoints:
    """Return the split points to use: at newlines, and before the always matched tokens that are most frequent in `samples`
    (rendered prompts)."""
    # Dropout makes tokens random; split special tokens would be matched as text.
    if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
        return SplitPoints()
    added = list(tokenizer.get_added_tokens_decoder().values())
    always_matched = [token.content for token in added if is_always_matched(token, added)]
    often = {token: sum(sample.count(token) for sample in samples) for token in always_matched}
    used = sorted((token for token in always_matched if often[token]), key=lambda token: (-often[token], token))
    lines = _cuts_lines(tokenizer, added)
    words = lines and not any(token.rstrip or _WORD_END.search(token.content) for token in added)
    return SplitPoints(tuple(used[:MAX_SPLIT_TOKENS]), lines, tuple(always_matched), words)


def is_always_matched(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    """Whether `token` is matched wherever its text occurs, independent of the text before it and of the other tokens in
    `added`."""
    text = token.content
    if token.normalized or token.lstrip or token.single_word or not text or re.match(r"[\s\w]", text):
        return False
    # Tokens that are matched on normalised text are searched only between the tokens that are matched on the raw text.
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


def _next(text: str, token: str, start: int) -> int:
    """Return where `token` occurs next from `start` on; the text's length if nowhere."""
    at = text.find(token, start)
    return at if at >= 0 else len(text)
