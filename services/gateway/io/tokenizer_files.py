"""Gets a model's tokenizer, special tokens and chat templates, from a folder or the hub, and reads them as transformers would."""

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
_PATTERNS = [*_FILES, "additional_chat_templates/*.jinja"]
TOO_MANY_REQUESTS = 429
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerNotFound(Exception):
    """No usable tokenizer at the place named."""


class HubUnreachable(TokenizerNotFound):
    """The hub did not answer, or not now."""


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
    """The folder of `place`, a folder of this machine or a hub id with or without @REVISION: from the local hub cache (HF_HOME),
    where an engine may have put it, else downloaded there (HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY). Blocks. Raises
    TokenizerNotFound; HubUnreachable where another try may find it."""
    folder = Path(place)
    # Path("") is the working directory, which nobody meant.
    if place and folder.is_dir():
        return folder
    repository, _, revision = place.partition("@")
    if not place or folder.is_absolute() or repository.count("/") > 1:
        raise TokenizerNotFound(f"no folder {place!r} here: mount it, or name the model's tokenizer by --tokenizers")
    try:
        return _cached(repository, revision or None) or Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_PATTERNS)
        )
    except huggingface_hub.errors.HFValidationError as error:
        raise TokenizerNotFound(f"{place!r} is neither a folder nor a hub id") from error
    except huggingface_hub.errors.HfHubHTTPError as error:
        # GatedRepoError, RepositoryNotFoundError and RevisionNotFoundError among them.
        status = error.response.status_code
        message = f"the hub answers {status} for {place!r}"
        if status >= 500 or status == TOO_MANY_REQUESTS:
            raise HubUnreachable(message) from error
        raise TokenizerNotFound(f"{message}; does HF_TOKEN allow to read it?") from error
    except Exception as error:
        # No network, no room, a proxy that refuses: errors of the hub library and of whichever HTTP library its version has.
        hint = "mount the model's folder and name it by --tokenizers"
        raise HubUnreachable(f"{place!r} does not come from the hub ({_causes(error)}): {hint}") from error


def _causes(error: BaseException) -> str:
    """The kinds of an error and of what led to it: their texts have addresses."""
    kinds = [type(error).__name__]
    while (cause := error.__cause__ or error.__context__) is not None and len(kinds) < 4:
        error = cause
        kinds.append(type(error).__name__)
    return " of ".join(dict.fromkeys(kinds))


def _cached(repository: str, revision: str | None) -> Path | None:
    """The folder where the local cache has all of the files; None where some of them are missing."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=_PATTERNS, local_files_only=True
            )
        )
    except FileNotFoundError:  # LocalEntryNotFoundError and IncompleteSnapshotError
        return None
    return folder if (folder / "tokenizer.json").is_file() else None


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
