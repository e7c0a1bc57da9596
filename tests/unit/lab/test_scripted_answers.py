"""Scripted answers: how an answer is read does not depend on how its tokens are split into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.emulator.scripted_answers import (
    PieceReader,
    ScriptedAnswer,
    ScriptedCall,
    collected,
    parse_script,
    scripted_answer,
)
from pointsman_lab.workload.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer()
JSON = st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers() | st.none(), max_size=3)
CALLS = st.builds(ScriptedCall, st.sampled_from(["shell", "read_file"]), JSON)
TEXTS = st.text(max_size=30)
ANSWERS = st.builds(ScriptedAnswer, TEXTS, st.lists(CALLS, max_size=3).map(tuple), TEXTS)


@given(ANSWERS, st.lists(st.integers(1, 5), max_size=400))
def test_any_division_into_steps_shows_the_same(answer: ScriptedAnswer, steps: list[int]) -> None:
    reader = PieceReader(answer, TOKENIZER)
    pieces = [piece for step in steps for piece in reader.read(step)] + reader.read(len(reader.ids) + 1)
    read = collected(pieces, answer)
    assert (read.reasoning, read.text) == (answer.reasoning, answer.text)
    assert [(name, json.loads(given)) for name, given in read.calls] == [
        (call.name, call.arguments) for call in answer.tool_calls
    ]


def test_an_answer_is_what_the_template_writes_back() -> None:
    """So the next turn's prompt begins with this one and its answer."""
    answer = ScriptedAnswer("Well.", (ScriptedCall("shell", {"cmd": "é"}), ScriptedCall("look")))
    calls = [{"function": {"name": call.name, "arguments": call.written}} for call in answer.tool_calls]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
    ]
    written = TOKENIZER.render(turns[:1]) + "".join(text for text, _ in answer.parts())
    assert TOKENIZER.render(turns, add_generation_prompt=False).startswith(written + "<|im_end|>")


def test_the_calls_so_far_say_which_answer_is_next() -> None:
    script = parse_script(b'[{"text": "a", "tool_calls": [{"name": "x"}]}, {"text": "b"}]')
    called = {"role": "assistant", "tool_calls": [{}, {}]}
    chats = [{"messages": [called] * turns, "tools": [{}]} for turns in range(4)]
    assert [scripted_answer(script, chat) for chat in chats] == [script[0], *[script[1]] * 3]
    assert scripted_answer(script, {"messages": []}) is None
    for wrong in (b"[]", b"{}", b'[{"say": "a"}]', b"["):
        with pytest.raises(ValueError, match=r".+"):
            parse_script(wrong)
