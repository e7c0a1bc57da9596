"""Which answer a chat with tools gets."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_lab.emulator.scripted_answers import ScriptedAnswer, ScriptedCall
from pointsman_lab.emulator.tool_choice import ToolChoice, prepared_answer

WORDS = (" left", " right")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "turn", "wait")]
SPEAK = ScriptedAnswer("Well.")
LOOK = ScriptedAnswer("So.", (ScriptedCall("look"),))
AUTO, REQUIRED, NONE = ToolChoice("auto"), ToolChoice("required"), ToolChoice("none")
USER, CALL, SAID, RESULT = (
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "tool_calls": [{}]},
    {"role": "assistant", "content": "Well."},
    {"role": "tool", "content": "done"},
)


def answer(
    choice: ToolChoice, *messages: dict[str, Any], script: tuple[ScriptedAnswer, ...] = (), seed: str = "1", **more: Any
) -> ScriptedAnswer | None:
    chat = {"messages": [*messages] or [USER], "tools": TOOLS, **more}
    return prepared_answer(script, chat, choice, seed, WORDS)


def names(given: ScriptedAnswer | None) -> list[str]:
    return [call.name for call in given.tool_calls] if given is not None else []


@pytest.mark.parametrize(
    ("messages", "calls"),
    [
        ([USER], True),
        ([USER, CALL, RESULT], False),
        ([USER, CALL, RESULT, RESULT], False),
        ([USER, CALL, RESULT, USER], False),  # a reminder behind the result
        ([USER, CALL, RESULT, SAID, USER], True),
        ([USER, SAID], False),  # a text that is to be continued
    ],
)
def test_a_free_choice_is_a_call_until_a_tool_has_answered(messages: list[dict[str, Any]], calls: bool) -> None:
    assert (answer(AUTO, *messages) is not None) == calls
    assert answer(NONE, *messages) is None
    assert len(names(answer(REQUIRED, *messages))) == 1
    assert names(answer(ToolChoice("named", "turn"), *messages)) == ["turn"]


def test_an_answer_of_fixed_length_is_words_unless_a_call_is_wanted() -> None:
    assert answer(AUTO, ignore_eos=True) is None
    assert names(answer(REQUIRED, ignore_eos=True))


def test_every_tool_is_called_by_some_seed_and_the_same_by_the_same() -> None:
    called = [names(answer(AUTO, seed=str(seed)))[0] for seed in range(30)]
    assert set(called) == {"look", "turn", "wait"}
    assert called == [names(answer(REQUIRED, seed=str(seed)))[0] for seed in range(30)]


def test_a_script_goes_first_where_the_choice_lets_it() -> None:
    assert answer(AUTO, script=(SPEAK,)) is SPEAK
    assert answer(AUTO, script=(LOOK,)) is LOOK
    assert answer(REQUIRED, script=(LOOK,)) is LOOK
    assert answer(ToolChoice("named", "look"), script=(LOOK,)) is LOOK
    assert names(answer(ToolChoice("named", "turn"), script=(LOOK,))) == ["turn"]
    assert len(names(answer(REQUIRED, script=(SPEAK,)))) == 1
    assert answer(NONE, script=(LOOK,)) == ScriptedAnswer("So.")
    assert answer(NONE, script=(ScriptedAnswer(tool_calls=LOOK.tool_calls),)) is None
