"""Answers that are known before they are generated: a script's, and what a client sees of one as it is. Pure.

A script is a JSON list of answers, each with `reasoning`, `text`, `tool_calls` (of `name` and `arguments`), or several of them. A
chat with tools in which the assistant has called tools k times gets answer k, counted from 0, or the last one where there are
fewer, if its tool choice allows it (`tool_choice.py`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pointsman.lab.workload.tokenizer import ChatTokenizer

REASONING = -1


class Piece(NamedTuple):
    """A part of an answer as it is written: of its text (`call` is None), its reasoning (REASONING), or of the arguments of a
    tool call."""

    call: int | None
    text: str


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call; `arguments` as the tool gets them."""

    name: str
    arguments: dict[str, Any] = {}

    @property
    def written(self) -> str:
        """The arguments as the model writes them, and a template writes them back."""
        return json.dumps(self.arguments, ensure_ascii=False)


class ScriptedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer: reasoning, a text, then tool calls."""

    text: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    reasoning: str = ""

    def parts(self) -> list[tuple[str, Piece | None]]:
        """The answer as the model writes it, in parts; what a client sees of each. As the lab's template (Hermes) shows calls;
        reasoning, which it leaves out, as most models write it."""
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
    """The answers of a script. Raises ValueError."""
    answers = msgspec.json.decode(raw, type=list[ScriptedAnswer])
    if not answers:
        raise ValueError("a script needs an answer at least")
    return answers


def scripted_answer(script: Sequence[ScriptedAnswer], chat: Mapping[str, Any]) -> ScriptedAnswer | None:
    """Which answer of `script` is a chat completions body's; None where there is none for it."""
    if not script or not chat.get("tools"):
        return None
    turns = sum(1 for message in chat["messages"] if message.get("role") == "assistant" and message.get("tool_calls"))
    return script[min(turns, len(script) - 1)]


class PieceReader:
    """Turns an answer's tokens into what a client sees of them, as they are generated."""

    def __init__(self, answer: ScriptedAnswer, tokenizer: ChatTokenizer) -> None:
        self._parts = answer.parts()
        self.ids, self._ends = tokenizer.encode_with_ends("".join(text for text, _ in self._parts))
        self._starts = [0]
        for text, _ in self._parts:
            self._starts.append(self._starts[-1] + len(text))
        self._tokens = 0
        self._seen = 0  # characters

    def read(self, tokens: int) -> list[Piece]:
        """What `tokens` more tokens show. Mutates."""
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
            if not piece.text:  # the head of a call, which is known when all of it is
                if self._seen < stop <= end:
                    pieces.append(piece)
            elif shown := piece.text[max(self._seen - start, 0) : end - start]:
                pieces.append(Piece(piece.call, shown))
        self._seen = end
        return pieces


class ReadAnswer(NamedTuple):
    """An answer as far as it was generated: its text, of each call the name and the arguments, and its reasoning."""

    text: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def collected(pieces: Sequence[Piece], answer: ScriptedAnswer | None) -> ReadAnswer:
    """Pieces put together."""
    texts: dict[int | None, str] = {}
    for number, text in pieces:
        texts[number] = texts.get(number, "") + text
    said, reasoning = texts.pop(None, ""), texts.pop(REASONING, "")
    named = [(answer.tool_calls[number or 0].name, arguments) for number, arguments in texts.items()] if answer else []
    return ReadAnswer(said, named, reasoning)
