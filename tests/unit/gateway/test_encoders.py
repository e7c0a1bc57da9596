"""`fastokens` encodes where it has the tokens of `tokenizers`, and no longer than that."""

from __future__ import annotations

import builtins
import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from pointsman_gateway.core.tokens.encoders import FastEncoder, FastEncoderError, LibraryEncoder
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.core.tokens.tokenizer_probes import drawn_texts, more_texts
from pointsman_gateway.io.routing.tokenizer_proof import prove
from tests.support import tokenizer_families

LIMIT = 8 << 20
MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def model(tokenizer: Tokenizer, cache: TokenCache | None = None) -> ModelTokenizer:
    return ModelTokenizer(tokenizer, None, None, cache=cache or TokenCache(LIMIT))


def changed(change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = tokenizer_families.qwen()
    change(tokenizer)
    return tokenizer


def added(*tokens: AddedToken) -> Tokenizer:
    return changed(lambda tokenizer: tokenizer.add_special_tokens(list(tokens)))


ACCEPTED: dict[str, Callable[[], Tokenizer]] = {
    "qwen": tokenizer_families.qwen,
    "llama3": tokenizer_families.llama3,
    "tekken": tokenizer_families.tekken,
    "takes blanks on its left": lambda: added(AddedToken("<x>", lstrip=True, normalized=False)),
    "takes blanks on its right": lambda: added(AddedToken("<x>", rstrip=True, normalized=False)),
    "stands alone only": lambda: added(AddedToken("<x>", single_word=True, normalized=False)),
    "normalised": lambda: added(AddedToken("<x>", normalized=True)),
    "overlaps": lambda: added(AddedToken("<x>", normalized=False), AddedToken("a<", normalized=False)),
    "contains a line's end": lambda: added(AddedToken("a\nb", normalized=False)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_fast_encoder_has_the_librarys_tokens(name: str) -> None:
    tokenizer = model(ACCEPTED[name]())
    assert tokenizer.encoder.name == "fastokens"
    for text in drawn_texts(tokenizer.added_tokens(), 2_000, seed=7):
        assert tokenizer.text(text, add_special_tokens=False) == tokenizer.whole(text).tolist()
    assert tokenizer.is_fast


def _split_by(pattern: str) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return changed(lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Sequence([split, bytes_])))


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_families.mistral(),
        tokenizer_families.llama2(),
        changed(lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFKC())),
        changed(lambda tokenizer: setattr(tokenizer, "encode_special_tokens", True)),
        changed(lambda tokenizer: setattr(tokenizer.model, "dropout", 0.1)),
    ],
    ids=["refused", "has other tokens", "refused normaliser", "splits special tokens", "random"],
)
def test_the_library_encodes_what_the_fast_encoder_does_not(tokenizer: Tokenizer) -> None:
    assert model(tokenizer).encoder.name == "tokenizers"


def test_one_character_of_another_class_is_a_difference() -> None:
    """The libraries' tables of characters are of different versions of Unicode."""
    tokenizer = model(_split_by(MARKS))
    fast = FastEncoder(_fast_of(tokenizer), TokenCache(0))
    assert fast.encode("a \u180e") != tokenizer.whole("a \u180e") or tokenizer.is_fast
    assert all(
        tokenizer.text(text, add_special_tokens=False) == tokenizer.whole(text).tolist() for text in ["a\u180eb"]
    )


def _fast_of(tokenizer: ModelTokenizer) -> Any:
    import fastokens

    return fastokens.Tokenizer.from_json_str(tokenizer._tokenizer.to_str())


def test_without_the_fast_library_the_other_one_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "fastokens":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    tokenizer = model(tokenizer_families.qwen())
    assert tokenizer.encoder.name == "tokenizers"
    assert tokenizer.text("the points", add_special_tokens=False) == tokenizer.whole("the points").tolist()


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> ModelTokenizer:
    """A tokenizer whose fast encoder has other tokens for texts with "points"."""
    tokenizer = model(tokenizer_families.qwen())
    fast = tokenizer.encoder
    assert isinstance(fast, FastEncoder)
    encode = fast.encode

    def encoded(piece: str, **kwargs: bool) -> Any:
        return array("I", [1]) if "points" in piece else encode(piece, **kwargs)

    monkeypatch.setattr(fast, "encode", encoded)
    return tokenizer


def test_one_difference_switches_back(wrong: ModelTokenizer) -> None:
    assert wrong.prove(["a", "b"])
    assert wrong.encoder.name == "fastokens"
    assert not wrong.prove(["a", "the points", "b"])
    assert (wrong.encoder.name, wrong.is_fast) == ("tokenizers", False)
    assert wrong.text("the points", add_special_tokens=False) == wrong.whole("the points").tolist()


def test_the_background_compares_texts_and_then_prompts(wrong: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_gateway.io.routing.tokenizer_proof.more_texts", lambda _: iter(["first", "second"]))
    pauses: list[float] = []

    def wait(pause: float) -> bool:
        pauses.append(pause)
        if len(pauses) == 4:
            wrong.text("the points", add_special_tokens=False)
        return False

    ended = threading.Event()
    monkeypatch.setattr(ended, "wait", wait)
    assert prove(ref(wrong), ended) is False
    assert not wrong.is_fast
    assert pauses[2:] == [60.0, 60.0]


@pytest.mark.parametrize(
    ("busy", "pause_s"), [(0.0, 1.0), (0.05, 1.0), (0.5, 0.2), (1.0, 0.1), (3.0, 0.1)], ids=lambda value: f"{value:g}"
)
def test_the_background_takes_a_share_of_what_the_process_takes(
    wrong: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, busy: float, pause_s: float
) -> None:
    """Each text takes 2 ms, and the process is `busy` with that many cores."""
    clock = 0.0
    pauses: list[float] = []

    def take_2_ms(texts: list[str]) -> bool:
        nonlocal clock
        clock += 0.002
        return True

    def wait(pause: float) -> bool:
        nonlocal clock
        pauses.append(pause)
        clock += pause
        return len(pauses) == 3

    module = "pointsman_gateway.io.routing.tokenizer_proof"
    times = SimpleNamespace(monotonic=lambda: clock, process_time=lambda: clock * busy, thread_time=lambda: clock)
    monkeypatch.setattr(f"{module}.time", times)
    monkeypatch.setattr(f"{module}.more_texts", lambda _: iter(["first", "second", "third"]))
    monkeypatch.setattr(wrong, "prove", take_2_ms)
    ended = threading.Event()
    monkeypatch.setattr(ended, "wait", wait)
    assert prove(ref(wrong), ended)
    assert pauses == pytest.approx([pause_s] * 3)


def test_the_background_ends_with_its_tokenizer() -> None:
    loaded = ref(model(tokenizer_families.qwen()))
    assert prove(loaded, threading.Event())


def test_the_background_ends_when_it_is_told() -> None:
    tokenizer, ended = model(tokenizer_families.qwen()), threading.Event()
    ended.set()
    assert prove(ref(tokenizer), ended)


def test_a_failure_of_the_fast_library_switches_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = model(tokenizer_families.qwen())

    class PanicException(BaseException):
        pass

    class Broken:
        segment_cache_stats = enable_segment_cache = lambda *_: None

        def encode_batch_flat(self, texts: list[str]) -> Any:
            raise PanicException

    monkeypatch.setattr(tokenizer.encoder, "_tokenizer", Broken())
    with pytest.raises(FastEncoderError):
        tokenizer.encoder.encode("a")
    assert tokenizer.text("the points", add_special_tokens=False) == tokenizer.whole("the points").tolist()
    assert not tokenizer.is_fast


def test_the_texts_have_many_scripts_code_long_lines_and_added_tokens() -> None:
    texts = list(more_texts(["<|im_start|>"]))
    assert max(map(len, texts)) == 1 << 20
    assert any("import " in text for text in texts)
    assert sum("<|im_start|>" in text for text in texts) > 500
    assert {*map(chr, range(0xD800))} <= set("".join(texts))


def test_a_conversation_is_known_by_its_messages() -> None:
    cache = TokenCache(LIMIT)
    tokenizer = model(tokenizer_families.qwen(), cache)
    first = "<|im_start|>user\n" + "points " * 50 + "<|im_end|>\n"
    tokenizer.text(first, add_special_tokens=False)
    size = len(first) - len("<|im_start|><|im_end|>")
    # The proof has left a few short texts.
    assert (cache.hits < 10, cache.hits + cache.misses) == (True, size)
    tokenizer.text(first + "<|im_start|>assistant\nyes", add_special_tokens=False)
    assert size <= cache.hits < size + 10
    assert 0 < cache.bytes < LIMIT


def test_tokenizers_share_the_cache() -> None:
    cache = TokenCache(LIMIT)
    fast, library = model(tokenizer_families.qwen(), cache), model(tokenizer_families.mistral(), cache)
    assert isinstance(fast.encoder, FastEncoder)
    assert isinstance(library.encoder, LibraryEncoder)
    half = LIMIT * 7 // 16
    assert fast.encoder._tokenizer.segment_cache_stats()["max_bytes"] == library.encoder._kept._limit == half
    for at in range(40):
        for each in (fast, library):
            each.text("".join(f"<s>{at} {more} points<|im_start|>" for more in range(4_000)), add_special_tokens=False)
        assert cache.bytes <= LIMIT
