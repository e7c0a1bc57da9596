"""Reads a model's tokenizer, special tokens and chat templates from a folder, as transformers would."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import jinja2
from tokenizers import Tokenizer

from pointsman.gateway.core.api.anthropic_messages import system_only_first
from pointsman.gateway.core.tokens.chat_template import ChatTemplate
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.core.tokens.token_cache import TokenCache

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerNotFound(Exception):
    """No usable tokenizer at the place named."""


def load_tokenizer(folder: Path, cache: TokenCache | None = None) -> ModelTokenizer:
    """The tokenizer in `folder`; its tokens are remembered in `cache`. Raises TokenizerNotFound, saying what is missing
    or broken."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerNotFound(f"no tokenizer.json in {folder}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise TokenizerNotFound(f"{file}: {error}") from error
    try:
        config = _json(folder / "tokenizer_config.json")
        specials = _special_tokens(_json(folder / "special_tokens_map.json") | config)
        templates = _templates(folder, config)
        compiled = {name: ChatTemplate(source, specials, datetime.now) for name, source in templates.items()}
    except (ValueError, jinja2.TemplateError) as error:
        raise TokenizerNotFound(f"{folder}: {error}") from error
    used = [templates[name] for name in ("default", "tool_use") if name in templates]
    merges_system = any(map(system_only_first, used))
    return ModelTokenizer(tokenizer, compiled.get("default"), compiled.get("tool_use"), merges_system, cache)


def find_tokenizer(place: str) -> Path:
    """The folder for a path, or for a hub id that the local cache holds (nothing is downloaded). Raises TokenizerNotFound."""
    folder = Path(place)
    # Path("") is the working directory, which nobody meant.
    if place and folder.is_dir():
        return folder
    if not place or folder.is_absolute() or place.count("/") > 1:
        raise TokenizerNotFound(f"no folder {place!r}")
    try:
        found = [huggingface_hub.try_to_load_from_cache(place, name) for name in _FILES]
    except huggingface_hub.errors.HFValidationError as error:
        raise TokenizerNotFound(f"{place!r} is neither a folder nor a hub id") from error
    if not isinstance(found[0], str):
        raise TokenizerNotFound(f"{place!r} is no folder, and the local hub cache has no tokenizer.json of it")
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
