"""Scripted answers, and the parts of an answer that a client has seen while it is generated. Pure.

A script is a JSON list of answers. Each has one or more of `reasoning`, `text` and `tool_calls` (with `name` and `arguments`). A
chat with tools in which the assistant has called tools in k messages gets answer k, counted from 0, or the last answer if there
are fewer. Its tool choice must allow the answer (`tool_choice.py`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pointsman_lab.workload.tokenizer import ChatTokenizer

# Value of Piece.call for reasoning.
REASONING = -1


class Piece(NamedTuple):
    """A part of an answer while it is generated: of its text (`call` is None), of its reasoning (REASONING), or of the arguments
    of the tool call with that number."""

    call: int | None
    text: str


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call, with the `arguments` that the tool gets."""

    name: str
    arguments: dict[str, Any] = {}

    @property
    def written(self) -> str:
        """The arguments as JSON, as the model and the chat template write them."""
        return json.dumps(self.arguments, ensure_ascii=False)


class ScriptedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer: reasoning, a text, then tool calls; each may be empty."""

    text: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    reasoning: str = ""

    def parts(self) -> list[tuple[str, Piece | None]]:
        """Return the answer in parts: the text that the model writes, and what a client sees of it (None: nothing).

        Calls are written as in the lab's chat template (Hermes). The template has no reasoning, so reasoning is written as most
        models write it.
        """
        parts: list[tuple[str, Piece | None]] = []
        if self.reasoning:
            parts += [("<think>\n", None), (self.reasoning, Piece(REASONING, self.reasoning)), ("\n</think>\n\n", None)]
        if self.text:
            parts.append((self.text, Piece(None, self.text)))
        for number, call in enumerate(self.tool_calls):
            head = f'<tool_call>\n{{"name": "{call.name}", "arguments": '
            parts.append(("\n" + head if parts else head, Piece(number, "")))
            parts += [(call.written, Piece(number, call.written)), ("}\n</tool_call>", None)]
        return parts


def parse_script(raw: bytes) -> list[ScriptedAnswer]:
    """Return the answers of a script. Raises ValueError."""
    answers = msgspec.json.decode(raw, type=list[ScriptedAnswer])
    if not answers:
        raise ValueError("a script needs at least one answer")
    return answers


def scripted_answer(script: Sequence[ScriptedAnswer], chat: Mapping[str, Any]) -> ScriptedAnswer | None:
    """Return the answer of `script` to a chat completions body; None without a script or tools."""
    if not script or not chat.get("tools"):
        return None
    turns = sum(1 for message in chat["messages"] if message.get("role") == "assistant" and message.get("tool_calls"))
    return script[min(turns, len(script) - 1)]


class PieceReader:
    """Converts an answer's tokens, while they are generated, to what a client sees of them."""

    def __init__(self, answer: ScriptedAnswer, tokenizer: ChatTokenizer) -> None:
        self._parts = answer.parts()
        self.ids, self._ends = tokenizer.encode_with_ends("".join(text for text, _ in self._parts))
        self._starts = [0]
        for text, _ in self._parts:
            self._starts.append(self._starts[-1] + len(text))
        self._tokens = 0
        self._seen = 0  # characters

    def read(self, tokens: int) -> list[Piece]:
        """Return what a client sees of the next `tokens` tokens. Mutates."""
        self._tokens = min(self._tokens + tokens, len(self.ids))
        end = self._ends[self._tokens - 1] if self._tokens else 0
        pieces = []
        for at in range(max(bisect_left(self._starts, self._seen + 1) - 1, 0), len(self._parts)):
            start, stop = self._starts[at], self._starts[at + 1]
            if start >= end:
                break
            piece = self._parts[at][1]
            if piece is None:
                continue
            if not piece.text:  # the head of a call, which is reported when it is complete
                if self._seen < stop <= end:
                    pieces.append(piece)
            elif shown := piece.text[max(self._seen - start, 0) : end - start]:
                pieces.append(Piece(piece.call, shown))
        self._seen = end
        return pieces


class ReadAnswer(NamedTuple):
    """An answer as far as it was generated: its text, the name and arguments of each call, and its reasoning."""

    text: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def collected(pieces: Sequence[Piece], answer: ScriptedAnswer | None) -> ReadAnswer:
    """Join pieces to an answer."""
    texts: dict[int | None, str] = {}
    for number, text in pieces:
        texts[number] = texts.get(number, "") + text
    said, reasoning = texts.pop(None, ""), texts.pop(REASONING, "")
    named = [(answer.tool_calls[number or 0].name, arguments) for number, arguments in texts.items()] if answer else []
    return ReadAnswer(said, named, reasoning)
