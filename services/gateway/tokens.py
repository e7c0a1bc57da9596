"""A model's tokens as its engine counts them: tokenizer.json, special tokens and chat template from one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import jinja2
from tokenizers import Tokenizer

from services.gateway.chat_template import ChatTemplate, Unrenderable
from services.gateway.dialects import Call, Kind
from services.gateway.dialects.messages import DISABLED, disabled_effort, merged_system, system_only_first

# Encoding this much text holds the event loop for about a millisecond; more of it goes to a thread.
INLINE_BYTES = 16 << 10
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerMissing(Exception):
    """No usable tokenizer at the place named."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a request's prompt (of its first, when it brings several) and the length of its longest."""

    ids: Sequence[int]
    longest: int


class ModelTokenizer:
    """Tokenizer and chat template of one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        merges_system: bool = False,
    ) -> None:
        """`merges_system`: the engine moves an Anthropic request's late system messages to the front."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template or template
        self._merges_system = merges_system

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read `folder` as transformers would. Raises TokenizerMissing, saying what is missing or broken."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissing(f"no tokenizer.json in {folder}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
            raise TokenizerMissing(f"{file}: {error}") from error
        try:
            config = _json(folder / "tokenizer_config.json")
            specials = _special_tokens(_json(folder / "special_tokens_map.json") | config)
            templates = _templates(folder, config)
            compiled = {name: ChatTemplate(source, specials, datetime.now) for name, source in templates.items()}
        except (ValueError, jinja2.TemplateError) as error:
            raise TokenizerMissing(f"{folder}: {error}") from error
        used = [templates[name] for name in ("default", "tool_use") if name in templates]
        return cls(tokenizer, compiled.get("default"), compiled.get("tool_use"), any(map(system_only_first, used)))

    def prompt(self, call: Call) -> Prompt:
        """Tokens of `call`'s prompt as the engine will see them. Raises Unrenderable when they cannot be told."""
        if call.opaque:
            raise Unrenderable(call.opaque)
        if call.chat is not None:
            ids = self.chat(self._anthropic(call.chat) if call.kind is Kind.MESSAGES else call.chat)
            return Prompt(ids, len(ids))
        add = call.body.get("add_special_tokens") is not False
        given = call.body["prompt"]
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        every = [self.text(one, add_special_tokens=add) if isinstance(one, str) else one for one in given]
        return Prompt(every[0], max(map(len, every)))

    def _anthropic(self, chat: dict[str, Any]) -> dict[str, Any]:
        """What vLLM changes in a converted chat by what the template does."""
        if self._merges_system:
            chat = merged_system(chat)
        if chat.get("reasoning_effort") == DISABLED:
            chat = {**chat, "reasoning_effort": self._disabled_effort}
        return chat

    @cached_property
    def _disabled_effort(self) -> str:
        def render(chat: dict[str, Any]) -> str | None:
            try:
                return self._template.render(chat) if self._template is not None else None
            except Unrenderable:
                return None

        return disabled_effort(render)

    def chat(self, body: dict[str, Any]) -> list[int]:
        """Ids of a chat completions body. Special tokens come from the template unless the body asks for more."""
        template = self._tool_template if body.get("tools") is not None else self._template
        if template is None:
            raise Unrenderable("the model has no chat template")
        return self.text(template.render(body), add_special_tokens=body.get("add_special_tokens") is True)

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def locate(place: str) -> Path:
    """The folder for a path, or for a hub id that the local cache holds (nothing is downloaded). Raises TokenizerMissing."""
    folder = Path(place)
    # Path("") is the working directory, which nobody meant.
    if place and folder.is_dir():
        return folder
    if not place or folder.is_absolute() or place.count("/") > 1:
        raise TokenizerMissing(f"no folder {place!r}")
    try:
        found = [huggingface_hub.try_to_load_from_cache(place, name) for name in _FILES]
    except huggingface_hub.errors.HFValidationError as error:
        raise TokenizerMissing(f"{place!r} is neither a folder nor a hub id") from error
    if not isinstance(found[0], str):
        raise TokenizerMissing(f"{place!r} is no folder, and the local hub cache has no tokenizer.json of it")
    return Path(found[0]).parent


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    read = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise ValueError(f"{file.name} is no object")
    return read


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens, each written as text or as {"content": text}."""
    named = {name: config.get(name) for name in _NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template name -> source. Files win over tokenizer_config.json, as in transformers."""
    files = {}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file.read_text(encoding="utf-8")
    if files:
        return files
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {}
