"""Finds split points: places where a text can be cut so that its pieces, tokenised one by one, give the whole text's tokens.

A text is cut only before an added token ("<|im_start|>"). Tokenizers first find the added tokens, leftmost and longest, and
normalise, pre-tokenise and encode the text between them separately. The split point is exact if the token is always matched: it
is matched on the raw text, takes no whitespace on its left, may be part of a word, and overlaps no other added token. In a piece
that begins with an added token, the text after the token is not at the beginning. So what a Metaspace or Prepend adds "at the
beginning" or "to each part" is the same in the piece as in the whole text.

Which exact split points are used depends only on the text before them (and on one token's length after), so a text that grows
keeps its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

# Maximum number of added tokens at which texts are split. The search for more would cost more than they save.
MAX_SPLIT_TOKENS = 4


@dataclass(frozen=True)
class SplitPoints:
    """The split points of one tokenizer: before the added tokens `tokens`. `always_matched`: all added tokens before which a
    split is exact."""

    tokens: tuple[str, ...] = ()
    always_matched: tuple[str, ...] = ()

    def head(self, text: str, length: int) -> str:
        """Return the longest known part of the first `length` characters of `text` that ends at an exact split point."""
        if text.startswith(self.always_matched, length):
            return text[:length]
        return text[: max((text.rfind(token, 0, length) for token in self.tokens), default=0)] if length else ""

    def pieces(self, text: str, least: int) -> list[str]:
        """Return `text` in pieces of at least `least` characters, except the last one, in order."""
        pieces, start, length = list[str](), 0, len(text)
        # Token -> its next occurrence from which a piece may begin. No token is searched twice in the same text.
        following = {token: _next(text, token, least) for token in self.tokens}
        while (end := min(following.values(), default=length)) < length:
            pieces.append(text[start:end])
            start = end
            for token, at in following.items():
                if at < start + least:  # nearer ends would make no piece
                    following[token] = _next(text, token, start + least)
        return [*pieces, text[start:]]


def split_points_for(tokenizer: Tokenizer, samples: Sequence[str]) -> SplitPoints:
    """Return the split points to use: before the always matched tokens that are most frequent in `samples` (rendered prompts)."""
    if not is_plain(tokenizer):
        return SplitPoints()
    added = list(tokenizer.get_added_tokens_decoder().values())
    always_matched = [token.content for token in added if is_always_matched(token, added)]
    often = {token: sum(sample.count(token) for sample in samples) for token in always_matched}
    used = sorted((token for token in always_matched if often[token]), key=lambda token: (-often[token], token))
    return SplitPoints(tuple(used[:MAX_SPLIT_TOKENS]), tuple(always_matched))


def is_plain(tokenizer: Tokenizer) -> bool:
    """Return whether a text always has the same tokens, its added tokens among them. Dropout makes tokens random; split special
    tokens would be matched as text."""
    return not (getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens)


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


def _next(text: str, token: str, start: int) -> int:
    """Return where `token` occurs next from `start` on; the text's length if nowhere."""
    at = text.find(token, start)
    return at if at >= 0 else len(text)
