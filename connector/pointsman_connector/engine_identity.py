"""Announcement on an engine's own /metrics of what makes it interchangeable with others: weights, types, overrides, tokenizer.

Types are those in use: an engine that got "auto" announces what it took. Files are compared by digests, so that copies of a model
in different folders are equal, and another model in a folder of the same name is not. A hub's model may lie there as a whole, or
only with what vLLM has downloaded, so only files that every engine loads count. What this vLLM does not tell is announced as
empty, which contradicts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge

from pointsman_connector.model_places import place_of, revision_of
from pointsman_connector.vllm_version import warn_without

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NONE = "none"

LABELS = (
    "weights",
    "revision",
    "weights_digest",
    "dtype",
    "quantization",
    "overrides",
    "tokenizer_digest",
    "kv_dtype",
    "kv_layout",
)

# Bytes that are read of each file of weights, at its begin, middle and end: 1,000 files cost as little as one of 100 MB.
_SAMPLE_BYTES = 16_384
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_WEIGHTS_INDEX = "model.safetensors.index.json"
# A tokenizer.json has what vocabularies, merges and added tokens say; which of these lie beside it depends on the downloader.
_FAST_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template*")
_TOKENIZER = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "tekken.json",
)
# What config.json says of the file's writer, and of the type, which the engine announces as it took it.
_NOT_THE_MODELS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
# Flags that change the model's configuration. Older vLLMs have those of the rotary embedding beside hf_overrides.
_OVERRIDES = ("hf_overrides", "rope_scaling", "rope_theta")

# "mostrecent": several API server processes set the same labels.
_INFO = Gauge(
    "pointsman_engine_identity_info",
    "What makes this engine interchangeable with others; always 1",
    LABELS,
    multiprocess_mode="mostrecent",
)


def announce_identity(vllm_config: VllmConfig) -> None:
    """Set the series on /metrics."""
    _INFO.clear()
    _INFO.labels(**engine_identity(vllm_config)).set(1)


def engine_identity(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the labels of pointsman_engine_identity_info. Logs a line for each that cannot be read from this vLLM."""
    labels = dict.fromkeys(LABELS, "")
    parts: tuple[Callable[[VllmConfig], Mapping[str, str]], ...] = (_weights, _types, _overrides, _tokenizer, _layout)
    for part in parts:
        try:
            labels |= part(vllm_config)
        except Exception as error:
            warn_without(f"the announcement of its {part.__name__.strip('_')}", error)
    return labels


def _weights(vllm_config: VllmConfig) -> Mapping[str, str]:
    config = vllm_config.model_config
    # Of a model from an object store, `model` is the folder of its copy.
    place, revision = place_of(str(getattr(config, "model_weights", "") or config.model), config.revision)
    folder = _folder(str(config.model), config.revision)
    return {"weights": place, "revision": revision, "weights_digest": weights_digest(folder) if folder else ""}


def _types(vllm_config: VllmConfig) -> Mapping[str, str]:
    config = vllm_config.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "quantization": str(config.quantization or NONE),
        "kv_dtype": _kv_dtype(vllm_config.cache_config.cache_dtype, config, dtype),
    }


def _kv_dtype(cache_dtype: str, model_config: Any, dtype: str) -> str:
    """Return the type of the cache's elements: the flag's, else the checkpoint's, else the weights'."""
    if cache_dtype == "auto":
        try:
            from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

            cache_dtype = resolve_kv_cache_dtype_string(cache_dtype, model_config)
        except ImportError:
            return ""
    return dtype if cache_dtype == "auto" else str(cache_dtype)


def _overrides(vllm_config: VllmConfig) -> Mapping[str, str]:
    config = vllm_config.model_config
    given = {name: value for name in _OVERRIDES if (value := getattr(config, name, None))}
    if not given:
        return {"overrides": NONE}
    # A function is known by its name only.
    text = json.dumps(given, sort_keys=True, default=lambda value: getattr(value, "__qualname__", repr(value)))
    return {"overrides": _digest([text.encode()])}


def _tokenizer(vllm_config: VllmConfig) -> Mapping[str, str]:
    config = vllm_config.model_config
    folder = _folder(str(config.tokenizer), config.tokenizer_revision)
    return {"tokenizer_digest": tokenizer_digest(folder) if folder else ""}


def _layout(vllm_config: VllmConfig) -> Mapping[str, str]:
    from vllm import envs

    if layout := envs.VLLM_KV_CACHE_LAYOUT:
        return {"kv_layout": str(layout)}
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return {}
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    kind = KVConnectorFactory.get_connector_class(transfer)
    wanted = getattr(kind, "get_required_kvcache_layout", None)
    return {"kv_layout": str(wanted(vllm_config) or "")} if wanted is not None else {}


def weights_digest(folder: Path) -> str:
    """Return a digest of a model's configuration and of samples of its weights; "" without files of weights."""
    files = _weight_files(folder)
    if not files:
        return ""
    parts: list[bytes] = []
    if (config := folder / "config.json").exists():
        model = {name: value for name, value in json.loads(config.read_bytes()).items() if name not in _NOT_THE_MODELS}
        parts.append(json.dumps(model, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        parts.append(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for start in sorted({0, size // 2, max(size - _SAMPLE_BYTES, 0)}):
                content.seek(start)
                parts.append(content.read(_SAMPLE_BYTES))
    return _digest(parts)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that vLLM loads: all of the first kind that there is, or those of them that the index names."""
    files = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    if not (index := folder / _WEIGHTS_INDEX).exists():
        return files
    named = set(json.loads(index.read_bytes())["weight_map"].values())
    return [file for file in files if file.name in named] or files


def tokenizer_digest(folder: Path) -> str:
    """Return a digest of the files of a tokenizer and its chat template; "" without any."""
    kinds = _FAST_TOKENIZER if (folder / "tokenizer.json").exists() else _TOKENIZER
    files = sorted({file for kind in kinds for file in folder.glob(kind) if file.is_file()})
    return _digest([part for file in files for part in (file.name.encode(), file.read_bytes())]) if files else ""


def _folder(place: str, revision: object) -> Path | None:
    """Return the folder of a model's files; None if it is not on this machine."""
    if (folder := Path(place)).is_dir():
        return folder
    if place.startswith(("/", ".")) or "://" in place:
        return None
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "tokenizer_config.json"):
        found = try_to_load_from_cache(place, name, revision=revision_of(revision) or None)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode() + part)
    return digest.hexdigest()[:16]
