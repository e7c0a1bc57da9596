"""The known alternatives of the patterns by which pre-tokenizers split texts into words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
NEWLINES = r"\s*[\r\n]+"
BLANKS = (r"\s+(?!\S)", r"\s+")
_GPT2 = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", *BLANKS)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Alternative -> its equivalent for ASCII text, for Python's `re` with re.ASCII.
ASCII: Mapping[str, str] = (
    {same: same for same in (CONTRACTIONS, NEWLINES, *BLANKS, *_GPT2[:7])}
    | {rf" ?\p{{{what}}}+": f" ?{ascii_}+" for what, ascii_ in (("L", "[A-Za-z]"), ("N", "[0-9]"))}
    | {r"\p{N}": "[0-9]", r"\p{N}{1,3}": "[0-9]{1,3}"}
    | {rf"[^\r\n\p{{L}}\p{{N}}]?{word}+": r"[^\r\nA-Za-z0-9]?[A-Za-z]+" for word in (r"\p{L}", r"[\p{L}\p{M}]")}
    | {
        rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{after}": rf" ?[^\sA-Za-z0-9]+{after}"
        for marks in ("", r"\p{M}")
        for after in ("", r"[\r\n]*", r"[\r\n/]*")
    }
    | {
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}{end}": rf"[^\r\nA-Za-z0-9]?{ascii_}{end}"
        for word, ascii_ in ((f"{_UPPER}*{_LOWER}+", "[A-Z]*[a-z]+"), (f"{_UPPER}+{_LOWER}*", "[A-Z]+[a-z]*"))
        for end in ("", CONTRACTIONS + "?")
    }
)


def split_alternatives(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the alternatives by which `tokenizer` splits a text into the words that its model gets, as bytes. Empty if an
    alternative is not known, or if the tokenizer changes texts in another way before."""
    if tokenizer.normalizer is not None and state(tokenizer.normalizer) != {"type": "NFC"}:
        return ()
    if tokenizer.pre_tokenizer is None:
        return ()
    match state(tokenizer.pre_tokenizer):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            parts = tuple(_alternatives(pattern))
            return parts if ASCII.keys() >= set(parts) else ()
    return ()


def state(component: Any) -> object:
    """Return the description of a tokenizer's component in the format of tokenizer.json."""
    return json.loads(component.__getstate__())


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the parts of `pattern` between the `|` outside of groups and classes."""
    depth, start = 0, 0
    for found in re.finditer(r"\\.|[()|\[\]]", pattern):
        mark = found.group()
        depth += (mark in "([") - (mark in ")]")
        if mark == "|" and not depth:
            yield pattern[start : found.start()]
            start = found.end()
    yield pattern[start:]
