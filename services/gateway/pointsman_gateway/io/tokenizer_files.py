"""Finds a model's tokenizer, special tokens and chat templates in a folder or on the hub, and reads them as transformers does."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import huggingface_hub.file_download
import jinja2
from huggingface_hub.utils.tqdm import disable_progress_bars
from tokenizers import Tokenizer

from pointsman_gateway.core.api.anthropic_messages import system_only_first
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PATTERNS = [*_FILES, "additional_chat_templates/*.jinja"]
TOO_MANY_REQUESTS = 429
# Timeout of a request to the hub, s.
HUB_S = 10.0
_MAX_REVISION = 200  # maximum length of a revision's name, characters
# Maximum size of all files of a tokenizer together, bytes. The largest tokenizers have 35 MB.
MAX_DOWNLOAD_BYTES = 256 << 20
# The function of the C library that returns freed memory to the system, where it has one (glibc). Loading a tokenizer of 150,000
# tokens leaves 60 to 250 MB that nothing uses again.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerNotFound(Exception):
    """Raised if there is no usable tokenizer at the named place."""


class HubUnreachable(TokenizerNotFound):
    """Raised if the hub did not answer or failed; a later try may succeed."""


def load_tokenizer(folder: Path, cache: TokenCache | None = None) -> ModelTokenizer:
    """Return the tokenizer in `folder`; it keeps tokens in `cache`. Raises TokenizerNotFound with what is missing or broken."""
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
    except (ValueError, TypeError, KeyError, OSError, RecursionError, jinja2.TemplateError) as error:
        raise TokenizerNotFound(f"{folder}: {error}") from error
    used = [templates[name] for name in ("default", "tool_use") if name in templates]
    merges_system = any(map(system_only_first, used))
    loaded = ModelTokenizer(tokenizer, compiled.get("default"), compiled.get("tool_use"), merges_system, cache)
    if _trim is not None:
        _trim(0)
    return loaded


@dataclass(frozen=True)
class HubRules:
    """Rules for tokenizers of a hub.

    `owners`: owners, or OWNER/NAME, that may be downloaded from; empty: all. `engine_cache`: the HF_HOME of engines, only read.
    `other_revision`: if the named revision is not available, use another cached revision or the hub's main. This is safe because
    tokens are compared with the engine's.
    """

    owners: tuple[str, ...] = ()
    engine_cache: Path | None = None
    other_revision: bool = False


def follows_hub(place: str, *, pinned: bool) -> bool:
    """Return whether the hub may have another version of the tokenizer of `place` than the local one. `pinned`: only the revision
    in `place`, if there is one, may be used."""
    return bool(place) and not (pinned and "@" in place) and not Path(place).is_absolute() and not os.path.isdir(place)


def find_tokenizer(place: str, rules: HubRules = HubRules(), *, newest: bool = False) -> Path:
    """Return the folder of `place`, which is a local folder or a hub id with or without @REVISION. Blocks.

    A hub id is looked up in the local hub cache (HF_HOME) and in that of the engines, else downloaded into HF_HOME
    (HF_ENDPOINT, HF_TOKEN and HTTPS_PROXY apply). `newest`: skip the caches and query the hub for its current revision. Raises
    TokenizerNotFound; HubUnreachable if another try may find it.
    """
    folder = Path(place)
    # Path("") is the working directory, which is never intended.
    if place and os.path.isdir(folder):
        return folder
    repository, _, revision = place.partition("@")
    if not place or folder.is_absolute() or repository.count("/") > 1:
        raise TokenizerNotFound(f"no folder {place!r} here: mount it, or name the model's tokenizer by --tokenizers")
    if revision and not _is_revision(revision):
        raise TokenizerNotFound(f"{place!r} names no revision")
    try:
        return _from_hub(place, repository, revision or None, rules, newest)
    except TokenizerNotFound as missing:
        if not (revision and rules.other_revision) or newest:
            raise
        if (kept := _any_kept(repository, rules)) is not None:
            return kept
        if isinstance(missing.__cause__, huggingface_hub.errors.RevisionNotFoundError):
            return _from_hub(place, repository, None, rules, newest)
        raise


def _is_revision(text: str) -> bool:
    """Return whether `text` may name a branch, a tag, a reference or a commit, and does not lead out of a cache's folder."""
    parts = text.split("/")
    return len(text) <= _MAX_REVISION and text.isprintable() and " " not in text and not {"", ".", ".."} & {*parts}


def _from_hub(place: str, repository: str, revision: str | None, rules: HubRules, newest: bool) -> Path:
    """Return the folder of a hub repository, from a cache or downloaded. Raises as find_tokenizer() does."""
    try:
        if not newest and (kept := _kept(repository, revision, rules)) is not None:
            return kept
        if rules.owners and not {repository, repository.partition("/")[0]} & {*rules.owners}:
            raise TokenizerNotFound(f"{place!r} is no folder here, and hub_owners does not allow its download")
        return _downloaded(repository, revision)
    except TokenizerNotFound:
        raise
    except huggingface_hub.errors.HFValidationError as error:
        raise TokenizerNotFound(f"{place!r} is neither a folder nor a hub id") from error
    except huggingface_hub.errors.HfHubHTTPError as error:
        # Includes GatedRepoError, RepositoryNotFoundError and RevisionNotFoundError.
        status = error.response.status_code
        message = f"the hub answered status {status} for {place!r}"
        if status >= 500 or status == TOO_MANY_REQUESTS:
            raise HubUnreachable(message) from error
        raise TokenizerNotFound(f"{message}; check that HF_TOKEN may read it") from error
    except Exception as error:
        # No network, a full disk, a proxy that refuses: errors of the hub library and of its HTTP library, which depends on its
        # version.
        hint = "mount the model's folder and name it by --tokenizers"
        raise HubUnreachable(f"{place!r} cannot be downloaded from the hub ({_causes(error)}): {hint}") from error


def _causes(error: BaseException) -> str:
    """Return the type names of an error and its causes. Their texts are omitted, because they contain addresses."""
    kinds = [type(error).__name__]
    while (cause := error.__cause__ or error.__context__) is not None and len(kinds) < 4:
        error = cause
        kinds.append(type(error).__name__)
    return " of ".join(dict.fromkeys(kinds))


def _kept(repository: str, revision: str | None, rules: HubRules) -> Path | None:
    """Return the cached folder in HF_HOME or in the engines' HF_HOME; None if there is none."""
    caches = (None, rules.engine_cache / "hub") if rules.engine_cache else (None,)
    return next((found for cache in caches if (found := _cached(repository, revision, cache)) is not None), None)


def _any_kept(repository: str, rules: HubRules) -> Path | None:
    """Return the cached folder of main or, without one, of the most recent revision in a cache; None if there is none."""
    if (kept := _kept(repository, None, rules)) is not None:
        return kept
    hubs = [Path(huggingface_hub.constants.HF_HUB_CACHE), *([rules.engine_cache / "hub"] if rules.engine_cache else [])]
    name = huggingface_hub.file_download.repo_folder_name(repo_id=repository, repo_type="model")
    found = [folder for hub in hubs for folder in (hub / name / "snapshots").glob("*") if _is_whole(folder)]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES[:2])


def _cached(repository: str, revision: str | None, cache: Path | None) -> Path | None:
    """Return the folder in a local cache (None: in HF_HOME) if the required files are in it, else None.

    Engines fetch files one by one, so a cache may hold tokenizer.json without the chat template and has no list of the other
    files.
    """
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=_PATTERNS, cache_dir=cache, local_files_only=True
            )
        )
    except FileNotFoundError:  # LocalEntryNotFoundError and IncompleteSnapshotError
        return None
    return folder if _is_whole(folder) else None


def _downloaded(repository: str, revision: str | None) -> Path:
    """Download the hub's current files and return their folder. Raises TokenizerNotFound, and the hub library's errors."""
    # The library's progress bars would mix with the JSON lines of the log.
    disable_progress_bars()
    # Raises if the hub is unreachable. snapshot_download() alone would silently use whatever files are cached.
    huggingface_hub.HfApi().model_info(repository, revision=revision or "main", timeout=HUB_S)
    planned = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS, dry_run=True)
    size = sum(file.file_size or 0 for file in planned)
    if size > MAX_DOWNLOAD_BYTES:
        raise TokenizerNotFound(f"the tokenizer of {repository!r} has {size} bytes, more than {MAX_DOWNLOAD_BYTES}")
    return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    read = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return read


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name. The config has each as text or as {"content": text}."""
    named = {name: config.get(name) for name in _NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return a map from template name to source. Files take precedence over tokenizer_config.json, as in transformers."""
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
