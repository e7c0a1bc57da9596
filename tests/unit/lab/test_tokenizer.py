"""The project's tokenizer and template, and chats made of block ids."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pointsman_lab.workload.build_tokenizer import make
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.encoded_segments import EncodedSegments
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatError, ChatTokenizer, words_of
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TINY_TRACE, TraceRequest, shared_prefix

TOKENIZER = ChatTokenizer()
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    if any(special in text for special in SPECIALS):
        return
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, len(TOKENIZER.words) - 1), max_size=50))
def test_words_are_one_token_each_wherever_they_stand(numbers: list[int]) -> None:
    text = "".join(TOKENIZER.words[number] for number in numbers)
    assert TOKENIZER.encode(text) == [TOKENIZER.word_ids[number] for number in numbers]


@given(
    st.lists(st.sampled_from([*SPECIALS, " word", "\n", "é世", " ", "<|im", "end|>"]), max_size=12), st.integers(0, 8)
)
def test_pieces_at_special_tokens_have_the_tokens_of_the_whole(parts: list[str], capacity: int) -> None:
    text = "".join(parts)
    whole = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
    segments = EncodedSegments(whole, capacity)
    wanted = whole.encode(text, add_special_tokens=False).ids
    assert [segments.encode(text) for _ in range(2)] == [wanted, wanted]
    assert segments.remembered <= capacity


def test_the_shipped_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER_DIR / name).read_bytes()
    assert sum(path.stat().st_size for path in TOKENIZER_DIR.iterdir()) < 300_000
    assert len(TOKENIZER.words) > 1000


def test_words_of_a_seed_are_the_same_and_shorter_ones_a_prefix() -> None:
    assert words_of("a", 50, TOKENIZER.words).startswith(words_of("a", 20, TOKENIZER.words))
    assert words_of("a", 20, TOKENIZER.words) != words_of("b", 20, TOKENIZER.words)
    assert words_of("a", 0, TOKENIZER.words) == ""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_the_template_is_chatml() -> None:
    chat = [{"role": "system", "content": "S"}, user("U"), {"role": "assistant", "content": "A"}, user("V")]
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    text = "".join(turn.format(message["role"], message["content"]) for message in chat)
    assert TOKENIZER.render(chat) == text + "<|im_start|>assistant\n"
    assert TOKENIZER.render(chat, add_generation_prompt=False) == text
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert TOKENIZER.render([user(parts)]) == turn.format("user", "a\nb") + "<|im_start|>assistant\n"
    begun = [user("U"), {"role": "assistant", "content": "Once"}]
    assert TOKENIZER.render(begun, add_generation_prompt=False, continue_final_message=True).endswith("assistant\nOnce")


def test_tools_and_their_calls_are_shown() -> None:
    tool = {"type": "function", "function": {"parameters": {}, "name": "read", "description": "Reads."}}
    call = {"type": "function", "function": {"name": "read", "arguments": '{"path": "é"}'}}
    chat = [user("U"), {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "T"}]
    text = TOKENIZER.render(chat, [tool])
    assert '{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {}}}' in text
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "x"}],
        ["x"],
        [user(5)],
        [user([{"type": "image_url", "image_url": {}}])],
        [{"role": "assistant", "tool_calls": [{}]}],
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: list[Any]) -> None:
    with pytest.raises(ChatError, match=r"\w"):
        TOKENIZER.render(messages)


def request(session: str, turn: int, ids: list[int], length: int, output: int = 512) -> TraceRequest:
    return TraceRequest(
        timestamp_ms=turn,
        session_id=session,
        turn=turn,
        input_length=length,
        output_length=output,
        hash_ids=tuple(ids),
        block_size=512,
    )


def test_turns_become_a_growing_chat() -> None:
    requests = [
        request("a", 1, [0, 1, 2], 3 * 512 + 100),
        request("a", 2, [0, 1, 2, 3, 4, 5], 6 * 512),
        request("b", 1, [0, 1, 7], 3 * 512),
        request("c", 1, [], 40),
    ]
    chats = ChatMaker(requests, TOKENIZER.words, 1 / 64)
    first, second, other, short = (chats.messages(request) for request in requests)
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert [message["role"] for message in other] == ["system", "user"]
    assert [message["role"] for message in short] == ["user"]
    assert [len(TOKENIZER.encode(message["content"])) for message in second] == [16, 8, 8, 16]
    assert [len(TOKENIZER.encode(message["content"])) for message in first] == [16, 8 + 2]
    assert first[0] == second[0] == other[0]
    assert first[1]["content"].startswith(second[1]["content"])


@pytest.mark.parametrize("scale", [1 / 64, 1 / 8])
def test_prompts_share_tokens_exactly_where_the_trace_says_so(scale: float) -> None:
    requests = load_trace(TINY_TRACE)[:40]
    chats = ChatMaker(requests, TOKENIZER.words, scale)
    tokens = [TOKENIZER.encode(TOKENIZER.render(chats.messages(request))) for request in requests]
    for (one, first), (other, second) in combinations(list(zip(requests, tokens, strict=True)), 2):
        blocks = shared_prefix(one.hash_ids, other.hash_ids)
        shared = shared_prefix(first, second) - blocks * chats.tokens(512)
        # Beyond the blocks, a few tokens of the template for each message.
        assert 0 <= shared <= 5 * (one.turn + other.turn + 2)


def test_a_scale_must_be_positive() -> None:
    with pytest.raises(ValueError, match="token_scale"):
        ChatMaker([request("a", 1, [], 1)], TOKENIZER.words, 0.0)
