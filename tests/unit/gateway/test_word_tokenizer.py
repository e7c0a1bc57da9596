"""Texts made of known words have the library's tokens, or the library is asked."""

from __future__ import annotations

import random
import string
from array import array
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from pointsman_gateway.core.tokens import word_tokenizer
from pointsman_gateway.core.tokens.pretokenizer_patterns import ASCII
from pointsman_gateway.core.tokens.word_tokenizer import WordTokenizer, word_tokenizer_for
from tests.support import tokenizer_families
from tests.support.tokenizer_families import SPECIALS

CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
MORE = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(pattern: str) -> Tokenizer:
    tokenizer = tokenizer_families.qwen()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def gpt2() -> Tokenizer:
    tokenizer = tokenizer_families.llama3()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def paired(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a model that joins any two letters, so that wrong word bounds show in the tokens. Trained models
    know few words with blanks in them."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    pairs = [(letter, other) for letter in letters for other in letters if letter < "\u0122" and other < "\u0122"]
    random.Random(1).shuffle(pairs)
    tokens = [*letters, *("".join(pair) for pair in pairs)]
    specials = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    made.add_tokens(specials)
    return made


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "qwen": tokenizer_families.qwen,
    "llama3": tokenizer_families.llama3,
    "tekken": tokenizer_families.tekken,
    "gpt2": gpt2,
    "gpt2 as a split": lambda: split_by(tokenizer_families.GPT2_SPLIT),
    "gpt-4o": lambda: split_by(f"{CASED}|{UPPER}|{MORE}"),
    "marks": lambda: split_by(MARKS),
}
EVERY = "".join(map(chr, range(128)))
FRAGMENTS = (
    st.sampled_from([special for special in SPECIALS if special.isascii()])
    | st.sampled_from(
        [
            "'s",
            "'LL",
            "'",
            "'S'D",
            "don't",
            "  ",
            " \n",
            "\r\n\r\n",
            "//\n/",
            "12345",
            "aBCd",
            " the points",
            "\x1c",
            " ",
            "a b",
            ", and",
            "\nso ",
            "\x1f ",
        ]
    )
    | st.text(alphabet=EVERY, max_size=4)
    | st.text(alphabet=" \n\r\t\x0b\x0c\x1d\x00", max_size=5)
    | st.text(alphabet=string.ascii_letters + "'", max_size=6)
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[Tokenizer, WordTokenizer]]:
    made = {}
    for name, make in KNOWN.items():
        for tokenizer, called in ((make(), name), (paired(make()), f"{name}, paired")):
            found = word_tokenizer_for(tokenizer)
            assert found is not None, called
            made[called] = (tokenizer, found)
    return made


@pytest.mark.parametrize("name", [called for name in KNOWN for called in (name, f"{name}, paired")])
@settings(max_examples=400)
@given(text=TEXTS)
@example(text="")
@example(text=EVERY)
@example(text=" a\n b \n c \x1d d\te \tf")
@example(text="a\t \nb")
@example(text="a\n \x0c b")
@example(text="".join(f" {letter}x{letter}\n{letter}{letter}1{letter}" for letter in EVERY))
def test_words_have_the_whole_texts_tokens(
    known: dict[str, tuple[Tokenizer, WordTokenizer]], name: str, text: str
) -> None:
    tokenizer, found = known[name]
    ids = found.ids(text)
    assert ids is not None
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_every_pair_of_letters_is_split_as_the_library_splits_it(
    known: dict[str, tuple[Tokenizer, WordTokenizer]],
) -> None:
    for name, (tokenizer, found) in known.items():
        for letter in EVERY:
            text = "".join(f"{letter}{other}a {letter}{other}" for other in EVERY)
            ids = found.ids(text)
            assert ids is not None
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, (name, letter)


def test_what_is_not_ascii_is_left_to_the_library(known: dict[str, tuple[Tokenizer, WordTokenizer]]) -> None:
    for _, found in known.values():
        assert found.ids("naïve") is None


def test_every_alternative_of_the_table_is_tried_here() -> None:
    tried = "|".join(
        (
            tokenizer_families.QWEN_SPLIT,
            tokenizer_families.LLAMA3_SPLIT,
            tokenizer_families.TEKKEN_SPLIT,
            tokenizer_families.GPT2_SPLIT,
        )
    )
    tried += f"|{CASED}|{UPPER}|{MORE}|{MARKS}"
    untried = {letter for letter in ASCII if letter not in tried}
    # The remaining pattern is a combination of tried ones: marks of one, newlines and slashes of another.
    assert untried == {r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n/]*"}


def changed(change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = tokenizer_families.qwen()
    change(tokenizer)
    return tokenizer


def _set(name: str, value: object) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: setattr(tokenizer, name, value)


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_families.mistral(),
        tokenizer_families.llama2(),
        changed(_set("normalizer", normalizers.NFKC())),
        changed(_set("normalizer", normalizers.Lowercase())),
        changed(_set("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))),
        changed(_set("pre_tokenizer", pre_tokenizers.Whitespace())),
        changed(_set("encode_special_tokens", True)),
        changed(lambda tokenizer: setattr(tokenizer.model, "dropout", 0.1)),
        changed(lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<x>", normalized=True)])),
        changed(lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<x>", rstrip=True, normalized=False)])),
        changed(lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<x>", lstrip=True, normalized=False)])),
        changed(lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|im", normalized=False)])),
        split_by(r"\p{L}+|\p{N}|\s+"),
        split_by(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+(?!\S)| ?[^\s\p{L}\p{N}]+"),
        split_by(r"\w+|\s+|[^\w\s]+"),
    ],
)
def test_nothing_is_split_here_that_is_not_known_to_the_last_letter(tokenizer: Tokenizer) -> None:
    assert word_tokenizer_for(tokenizer) is None


def test_an_added_token_that_ascii_cannot_hold_hinders_nothing() -> None:
    tokenizer = tokenizer_families.qwen()
    tokenizer.add_special_tokens([AddedToken("<｜end｜>", rstrip=True, normalized=True)])
    assert word_tokenizer_for(tokenizer) is not None


def test_words_start_again_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_tokenizer, "MAX_WORDS", 12)
    monkeypatch.setattr(word_tokenizer, "MAX_WORD_CHARS", 5)
    tokenizer = tokenizer_families.qwen()
    found = word_tokenizer_for(tokenizer)
    assert found is not None
    text = "<|im_start|>" + " ".join(
        f"{letter}{'x' * (at % 9)}<think>" for at, letter in enumerate(string.ascii_letters)
    )
    for _ in range(2):
        assert found.ids(text) == array("I", tokenizer.encode(text, add_special_tokens=False).ids)
        assert 0 < len(found._words) <= 12
        assert 0 < len(found._stretches) <= 12
