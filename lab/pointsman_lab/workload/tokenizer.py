"""The lab's tokenizer with its chat template, and words that are one token each."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pointsman_lab.workload.encoded_segments import EncodedSegments

DATA_DIR = Path(__file__).parents[1] / "data"
TOKENIZER_DIR = DATA_DIR / "tokenizer"

# Types of content parts that hold text.
TEXT_PARTS = ("text", "input_text", "output_text")
# Marks the place where transformers' apply_chat_template cuts a prompt whose last message is to be continued.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatError(ValueError):
    """A chat that the template cannot render; the message can be shown to the client."""


class ChatTokenizer:
    """The tokenizer of tokenizer.json and the chat template of tokenizer_config.json in `folder`, used as an engine uses them."""

    def __init__(self, folder: Path = TOKENIZER_DIR) -> None:
        self.folder = folder
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._segments = EncodedSegments(self._tokenizer)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        # The same environment as that of transformers.apply_chat_template, so that a template gives the same text.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        self._knows_developers = any(f"{quote}developer{quote}" in config["chat_template"] for quote in "'\"")
        self._template = environment.from_string(config["chat_template"])
        eos = config.get("eos_token")
        self.eos_token_id: int | None = self._tokenizer.token_to_id(eos) if eos else None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. Special tokens that are written out in the text are recognised."""
        return self._segments.encode(text)

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of `text`, and for each id the number of characters of `text` up to its end."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, [end for _, end in encoded.offsets]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    @cached_property
    def size(self) -> int:
        """Number of token ids: each below it is one."""
        return self._tokenizer.get_vocab_size()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Return the prompt's text. Text parts are joined by newlines, as vLLM does for templates of plain strings.

        Raises ChatError for a message without a role, a part that is not text, and for messages that the template rejects.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatError("add_generation_prompt and continue_final_message cannot both be set")
        plain = [_flatten(message) for message in messages]
        if not self._knows_developers and any(message["role"] == "developer" for message in plain):
            plain = _merged_system(plain)
        if continue_final_message:
            plain[-1]["content"] += CONTINUE_TAG
        shown = [_flatten_tool(tool) for tool in tools] if tools is not None else None
        try:
            text = self._template.render(
                messages=plain, tools=shown, add_generation_prompt=add_generation_prompt, **extra
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(f"the chat template refused the messages: {error}") from error
        return text[: text.rindex(CONTINUE_TAG)] if continue_final_message else text

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Return the words (with their leading space) that are one token each, also in sequence; sorted."""
        marked = (token for token in self._tokenizer.get_vocab() if token.startswith("Ġ"))
        texts = sorted(
            " " + token[1:] for token in marked if len(token) > 2 and token[1:].isascii() and token[1:].isalpha()
        )
        return tuple(text for text in texts if len(self.encode(text)) == 1)

    @cached_property
    def word_ids(self) -> tuple[int, ...]:
        """Return the token ids of `words`. The engine model generates only these, so that encoding an answer's text gives the
        answer's tokens."""
        return tuple(self.encode(word)[0] for word in self.words)


def words_of(seed: str, count: int, words: Sequence[str]) -> str:
    """Return `count` words drawn from `words` by `seed`, the same everywhere. A smaller `count` gives a prefix of that text."""
    return "".join(random.Random(seed).choices(words, k=count)) if count else ""


def _raise(message: str) -> None:
    raise ChatError(message)


def _flatten(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError("every message needs a role")
    flat = dict(message)
    content = flat.get("content")
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type") not in TEXT_PARTS
                or not isinstance(part.get("text"), str)
            ):
                raise ChatError("only content parts of type text are supported")
        flat["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        flat["content"] = ""
    elif not isinstance(content, str):
        raise ChatError("content must be a string or a list of parts")
    if calls := flat.pop("tool_calls", None):
        flat["tool_calls"] = [_flatten_call(call) for call in calls]
    return flat


def _merged_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all system and developer messages joined to one system message in front, as vLLM does for
    templates without a developer role."""
    own = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(text for text in own if text)}, *others]


def _flatten_call(call: Any) -> dict[str, Any]:
    """Return the call with its arguments as an object. vLLM parses them for the template, and uses an empty object for arguments
    that it cannot parse."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ChatError("only tool calls of type function are supported")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def _flatten_tool(tool: Any) -> dict[str, Any]:
    """Return the tool with the fields, and in the order, that vLLM's request model has."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError("only tools of type function are supported")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    more = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": known | more}
