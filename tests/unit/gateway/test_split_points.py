"""Pieces of a text have the whole text's tokens, or the text is not cut."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.request.prepare import set_keys
from pointsman_gateway.core.tokens import model_tokenizer
from pointsman_gateway.core.tokens.encoders import FastEncoder, LibraryEncoder
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer, Prompt
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.split_points import SplitPoints, split_points_for
from pointsman_gateway.core.tokens.token_cache import ENTRY_BYTES, RUN_TOKENS, ByteBoundedLru, TokenCache
from tests.support import tokenizer_families
from tests.support.tokenizer_families import SPECIALS

LIMIT = 8 << 20


@pytest.fixture(scope="module", autouse=True)
def _short_pieces() -> Any:
    """Set the minimum lengths of pieces to a character, so that small texts are cut at every allowed place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LibraryEncoder, "least_chars", 1)
        patch.setattr(FastEncoder, "least_chars", 1)
        yield


@pytest.fixture(scope="module", params=["fastokens", "tokenizers"])
def models_by_family(request: pytest.FixtureRequest) -> dict[str, tuple[ModelTokenizer, Any]]:
    """Each family's tokenizer; with `fastokens` only where it is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tokenizers":
            patch.setattr(model_tokenizer, "fast_encoder_for", lambda *_: None)
        return {family: tokenizer_families.model(family, TokenCache(LIMIT)) for family in tokenizer_families.FAMILIES}


@pytest.fixture
def _by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tokenizer, "fast_encoder_for", lambda *_: None)


EDGES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\u00a0",
    "\u2003",
    "\u2028",
    "\x0b",
    "\x85",
    "\x00",
    "▁",
    "▁▁a",
    "<|im_start|>user\n",
)
NEWLINE_PIECE_CHARS = (
    "\n/",
    "//\n",
    "/\n/",
    "\n\u0301",
    "\na",
    "\n1",
    "\n'",
    "\n'll",
    "...\n",
    "=\n\n=",
    "a //\n/",
    " the",
    "the points",
    "track.",
    "'s",
    "n't ",
    "I'd \"",
    "e =\u0338",
    "s \u0301",
    'key":"',
    "camelCase(x)",
    "a1b.c\\n",
)
LETTERS = (
    "e\u0301",
    "\u0301",
    "\u1100\u1161",
    "\u212b",
    "你好",
    "🚂",
    "🛤️",
    "Übersee",
    "ǅ",
    "ʼn",
    "ﬁ",
    "a",
    "B",
    "1",
    "1234",
)
FRAGMENTS = st.sampled_from((*SPECIALS, *EDGES, *NEWLINE_PIECE_CHARS, *LETTERS))
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=14).map("".join)
CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS), min_size=1, max_size=6)


def chat(turns: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize("family", tokenizer_families.FAMILIES)
@settings(max_examples=300)
@given(turns=CHATS)
@example(turns=[("user", "")])
@example(turns=[("user", " "), ("assistant", "\n"), ("user", "\n\n")])
def test_a_conversation_has_its_whole_prompts_tokens_at_every_turn(
    models_by_family: dict[str, tuple[ModelTokenizer, Any]], family: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer, template = models_by_family[family]
    for length in range(1, len(turns) + 1):
        body = chat(turns[:length])
        assert tokenizer.chat(body) == tokenizer.whole(template.render(body)).tolist()


@pytest.mark.parametrize("family", tokenizer_families.FAMILIES)
@settings(max_examples=300)
@given(text=TEXTS, more=TEXTS, special=st.booleans())
@example(text="abcd//\n/x", more="//\n/", special=False)
def test_a_text_and_its_continuation_have_their_own_tokens(
    models_by_family: dict[str, tuple[ModelTokenizer, Any]], family: str, text: str, more: str, special: bool
) -> None:
    tokenizer, _ = models_by_family[family]
    reference = tokenizer._tokenizer
    for prompt in (text, text + more):
        assert (
            tokenizer.text(prompt, add_special_tokens=special)
            == reference.encode(prompt, add_special_tokens=special).ids
        )


@settings(max_examples=300)
@given(text=TEXTS, more=TEXTS)
def test_a_text_that_grows_keeps_its_pieces(text: str, more: str) -> None:
    places = SplitPoints(("<|im_start|>", "</s>"))
    short, long = places.pieces(text, 1), places.pieces(text + more, 1)
    assert "".join(long) == text + more
    # Only the last piece of the shorter text may change.
    assert long[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("qwen", {"<|im_start|>", "<|im_end|>"}),
        ("llama3", {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"}),
        ("tekken", {"[INST]", "[/INST]", "<s>", "</s>"}),
        ("mistral", {"<s>", "</s>"}),
        ("llama2", {"<s>", "</s>"}),
    ],
)
def test_each_family_is_cut_where_it_can_be(
    models_by_family: dict[str, tuple[ModelTokenizer, Any]], family: str, tokens: set[str]
) -> None:
    assert set(models_by_family[family][0].split_points.tokens) == tokens


def one_by_one(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]


def with_added(*tokens: AddedToken) -> Tokenizer:
    tokenizer = tokenizer_families.qwen()
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", lstrip=True, normalized=False),
        AddedToken("<x>", single_word=True, normalized=False),
        AddedToken("<x>", normalized=True),
        AddedToken("x>", normalized=False),
        AddedToken(" <x>", normalized=False),
    ],
    ids=["takes blanks on its left", "stands alone only", "normalised", "begins as a word", "begins with a blank"],
)
def test_no_cut_is_made_before_a_token_that_may_reach_across(token: AddedToken) -> None:
    assert token.content not in split_points_for(with_added(token), [token.content * 3]).tokens


@pytest.mark.parametrize(
    "rival", ["a<x>", "a<", "<x>b", "x>b<"], ids=["holds it", "eats its head", "is longer", "overlaps"]
)
def test_no_cut_is_made_before_a_token_that_another_may_swallow(rival: str) -> None:
    tokenizer = with_added(AddedToken("<x>", normalized=False), AddedToken(rival, normalized=False))
    assert "<x>" not in split_points_for(tokenizer, ["<x>" * 3]).tokens


def test_a_cut_before_a_swallowed_token_would_have_been_wrong() -> None:
    tokenizer = with_added(AddedToken("<x>", normalized=False), AddedToken("a<", normalized=False))
    whole = tokenizer.encode("ba<x>", add_special_tokens=False).ids
    assert whole != one_by_one(tokenizer, ["ba", "<x>"])


def test_random_and_unsplit_tokens_are_not_cut() -> None:
    tokenizer = tokenizer_families.qwen()
    tokenizer.encode_special_tokens = True
    assert split_points_for(tokenizer, ["<|im_start|>"]) == SplitPoints()
    tokenizer = tokenizer_families.qwen()
    tokenizer.model.dropout = 0.5
    assert split_points_for(tokenizer, ["<|im_start|>"]) == SplitPoints()


def test_cuts_that_prove_wrong_on_the_probes_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second check, independent of the tokenizer's analysis, compares the tokens of probe texts."""
    monkeypatch.setattr(
        "pointsman_gateway.core.tokens.model_tokenizer.split_points_for", lambda *_: SplitPoints(("r",))
    )
    tokenizer, template = tokenizer_families.model("qwen", TokenCache(LIMIT))
    assert tokenizer.split_points == SplitPoints()
    body = chat([("user", "the right track")])
    assert tokenizer.chat(body) == tokenizer.whole(template.render(body)).tolist()


@pytest.mark.usefixtures("_by_library")
def test_a_known_conversation_costs_only_what_is_new() -> None:
    cache = TokenCache(LIMIT)
    tokenizer, _ = tokenizer_families.model("qwen", cache)
    turns = [("system", "S" * 400), ("user", "U" * 400), ("assistant", "A" * 400)]

    def missing(turns: list[tuple[str, str]]) -> int:
        call, before = parse(Endpoint.CHAT, json.dumps({"model": "m", **chat(turns)}).encode()), cache.misses
        tokenizer.prepare(call).tokenize()
        return cache.misses - before

    assert missing(turns[:2]) > 800
    assert missing(turns[:2]) == 0
    assert 400 <= missing(turns) < 500
    assert 60 <= missing([turns[0], ("user", "V" * 60)]) < 150
    assert cache.hits > 1_200


@pytest.mark.usefixtures("_by_library")
async def test_many_known_pieces_are_put_together_in_a_thread() -> None:
    """The event loop serves others meanwhile: putting 20,000 messages' tokens together takes milliseconds."""
    tokenizer, _ = tokenizer_families.model("qwen", TokenCache(LIMIT))
    in_thread: list[int] = []

    async def tokens(messages: int, context: int) -> Prompt:
        call = parse(Endpoint.CHAT, json.dumps({"model": "m", **chat([("user", "a")] * messages)}).encode())
        pending = tokenizer.prepare(call, context)

        async def run(work: Callable[[], Prompt]) -> Prompt:
            in_thread.append(messages)
            return work()

        return await pending.tokenize_by(run)

    assert (await tokens(1, 0)).lengths[0] < 30
    assert (await tokens(100, 0)).lengths[0] > 100 * 4
    assert in_thread == []
    assert (await tokens(20_000, 0)).lengths[0] > 20_000 * 4
    # A prompt that is too long is given up as soon as that is seen, though each of its pieces is known.
    too_long = await tokens(20_000, 50_000)
    assert 50_000 < len(too_long.ids) < 50_100
    assert in_thread == [20_000, 20_000]


def test_half_a_surrogate_pair_cannot_be_rendered(
    models_by_family: dict[str, tuple[ModelTokenizer, Any]],
) -> None:
    tokenizer, _ = models_by_family["qwen"]
    with pytest.raises(Unrenderable, match="surrogate"):
        tokenizer.text("a\ud800", add_special_tokens=False)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 3), st.sampled_from(["", "red"]))
def test_remembered_keys_are_the_prompts_keys(tail: list[int], runs: int, salt: str) -> None:
    cache = TokenCache(LIMIT)
    ids = array("I", [*range(runs * RUN_TOKENS), *tail])
    for prompt in (ids, ids[:-1], ids + ids, ids):
        assert cache.keys(prompt, "m", "lora", salt).tolist() == prompt_keys(prompt, "m", "lora", salt)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60), st.integers(0, 3_000))
def test_what_is_remembered_is_bounded(puts: list[tuple[int, int]], limit: int) -> None:
    kept = ByteBoundedLru(limit)
    sizes: dict[int, int] = {}
    for key, length in puts:
        sizes.setdefault(key, length)
        kept.put(key, array("I", [key] * sizes[key]), 10)
        assert kept.bytes <= limit
        found = kept.get(key)
        assert found is None or found.tolist() == [key] * sizes[key]
        assert (found is not None) == (ENTRY_BYTES + 10 + 4 * sizes[key] <= limit)
    for key in range(10):
        kept.get(key)
    assert kept.bytes == sum(ENTRY_BYTES + 10 + 4 * sizes[key] for key in sizes if kept.get(key) is not None)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=300))
def test_keys_reach_the_wire_as_they_are(keys: list[int]) -> None:
    request = placement_pb2.PlacementRequest(request_id="r", input_tokens=3)
    set_keys(request, array("Q", keys))
    assert request == placement_pb2.PlacementRequest(request_id="r", input_tokens=3, keys=keys)


def cut_everywhere(text: str, tokens: tuple[str, ...], least: int) -> list[str]:
    """The pieces by the rule itself: each occurrence of each token is visited."""
    ends = sorted(at for token in tokens for at in range(len(text)) if text.startswith(token, at))
    pieces, start = [], 0
    for end in ends:
        if end - start >= least:
            pieces.append(text[start:end])
            start = end
    return [*pieces, text[start:]]


@given(
    st.lists(st.sampled_from(["<a>", "<b>", "x", "yz", "\n", " ", "long text "]), max_size=60).map("".join),
    st.integers(1, 12),
)
def test_pieces_are_those_that_a_visit_of_each_token_gives(text: str, least: int) -> None:
    pieces = SplitPoints(("<a>", "<b>")).pieces(text, least)
    assert pieces == cut_everywhere(text, ("<a>", "<b>"), least)
