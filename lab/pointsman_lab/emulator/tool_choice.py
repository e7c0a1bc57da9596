"""Chooses the answer to a chat with tools: a scripted one, a generated tool call, or random words. Pure.

- `required`, or a named function: a call, from the script if it has a suitable one.
- `auto`, also the default with tools: the script's answer if there is a script. Otherwise a call while no tool has answered since
  the assistant's last message, and then words. So an agent's loop is: a task, a call, its result, a text.
  A load generator that fixes the answer's length (`ignore_eos`) gets words.
- `none`: never a call.

A generated call is of one of the tools, with arguments that its schema allows. Tool and arguments depend only on the prompt and
the engine's seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pointsman_lab.emulator.schema_values import SchemaSampler
from pointsman_lab.emulator.scripted_answers import ScriptedAnswer, ScriptedCall, scripted_answer


@dataclass(frozen=True)
class ToolChoice:
    """The tool choice of a request; `name` is the named function, if any."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")

    def allows(self, answer: ScriptedAnswer) -> bool:
        """Return whether this choice allows an answer."""
        if not self.forced:
            return self.mode == "auto" or not answer.tool_calls
        return bool(answer.tool_calls) and all(self.name in ("", call.name) for call in answer.tool_calls)


def prepared_answer(
    script: Sequence[ScriptedAnswer], chat: Mapping[str, Any], choice: ToolChoice, seed: str, words: Sequence[str]
) -> ScriptedAnswer | None:
    """Return the answer to a chat completions body whose tools were checked; None for random words. Texts consist of `words`."""
    scripted = scripted_answer(script, chat)
    if scripted is not None:
        if choice.allows(scripted):
            return scripted
        if choice.mode == "none":
            silent = msgspec.structs.replace(scripted, tool_calls=())
            return silent if silent.parts() else None
    calls = choice.forced or (choice.mode == "auto" and _awaits_call(chat))
    return ScriptedAnswer(tool_calls=(_made_up_call(chat["tools"], choice, seed, words),)) if calls else None


def _awaits_call(chat: Mapping[str, Any]) -> bool:
    """Return whether no tool has answered since the assistant's last message. An agent may add messages after a tool's result, as
    Claude Code does with its reminders, so the last message alone is not sufficient."""
    if chat.get("ignore_eos") is True:
        return False
    for message in reversed(chat["messages"]):
        if message["role"] in ("assistant", "tool"):
            return bool(message["role"] == "assistant" and message is not chat["messages"][-1])
    return True


def _made_up_call(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, seed: str, words: Sequence[str]
) -> ScriptedCall:
    functions = [tool["function"] for tool in tools]
    named = [function for function in functions if function["name"] == choice.name]
    draw = random.Random(seed)
    function = draw.choice(named or functions)
    return ScriptedCall(function["name"], SchemaSampler(function.get("parameters"), draw, words).arguments())
