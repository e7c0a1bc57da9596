"""Parsing of an engine's Prometheus page: only the series that the agent reports, by data-parallel rank. Pure.

The page is about 55 KB. One compiled pattern over the bytes finds the dozen lines that are needed in well under a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pointsman_agent.core.wire_numbers import finite, moment, share, uint32, uint64
from pointsman_common.core.engine_identity import EngineIdentity

# Series -> the field of Sample and of the protocol's Load, and what a number of it is. Some have a second, older name.
_GAUGES_AND_COUNTERS: Mapping[str, tuple[str, Callable[[object], float]]] = {
    "vllm:num_requests_running": ("running", uint32),
    "vllm:num_requests_waiting": ("waiting", uint32),
    "vllm:kv_cache_usage_perc": ("kv_usage", share),
    "vllm:generation_tokens_total": ("generation_tokens", uint64),
    "vllm:prefix_cache_queries_total": ("prefix_cache_queries", uint64),
    "vllm:prefix_cache_hits_total": ("prefix_cache_hits", uint64),
    "vllm:external_prefix_cache_queries_total": ("external_prefix_cache_queries", uint64),
    "vllm:external_prefix_cache_hits_total": ("external_prefix_cache_hits", uint64),
    "vllm:num_preemptions_total": ("preemptions", uint64),
    "vllm:gpu_cache_usage_perc": ("kv_usage", share),
    "vllm:gpu_prefix_cache_queries_total": ("prefix_cache_queries", uint64),
    "vllm:gpu_prefix_cache_hits_total": ("prefix_cache_hits", uint64),
}
FIGURES = tuple(dict.fromkeys(field_name for field_name, _ in _GAUGES_AND_COUNTERS.values()))
"""The fields of Sample that are unknown (None) if the page has no number for them."""
EXTERNAL_FIGURES = frozenset(name for name in FIGURES if name.startswith("external_"))
"""Those that engines without a KV connector need not have."""
_CACHE_CONFIG = "vllm:cache_config_info"
_SLEEP_STATE = "vllm:engine_sleep_state"
_SLEEP_STATES = frozenset({"awake", "weights_offloaded", "discard_all"})
# Sleep and weight operations. vLLM prints them for the process, from the first operation on.
_COMPLETED = (
    "vllm:sleep_mode_operation_duration_seconds_count",
    "vllm:rl_weight_update_operation_duration_seconds_count",
)
_IN_PROGRESS = ("vllm:sleep_mode_operations_in_flight", "vllm:rl_weight_update_operations_in_flight")
_KV_TRANSFER = "pointsman_kv_transfer_info"
_TOKENIZER = "pointsman_tokenizer_info"
_ENGINE = "pointsman_engine_info"
_IDENTITY = "pointsman_engine_identity_info"
_WRONG_KV = "pointsman_kv_wrong_requests_total"
_PROCESS_START = "process_start_time_seconds"
# An engine has this counter only if it decodes speculatively.
_DRAFTS = "vllm:spec_decode_num_drafts_total"

NAMES = (
    *_GAUGES_AND_COUNTERS,
    _CACHE_CONFIG,
    _SLEEP_STATE,
    *_COMPLETED,
    *_IN_PROGRESS,
    _KV_TRANSFER,
    _TOKENIZER,
    _ENGINE,
    _IDENTITY,
    _WRONG_KV,
    _PROCESS_START,
    _DRAFTS,
)
"""The series that `parse_metrics` reads. A server can be requested to return only these."""

_LINE = re.compile(
    rb"^(" + b"|".join(re.escape(name.encode()) for name in NAMES) + rb")(?:\{(.*)\})? (\S+)", re.MULTILINE
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
# Path of a model in huggingface_hub's cache.
_KEPT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([^/]+)/?")

N = TypeVar("N")


@dataclass(slots=True)
class Sample:
    """Metrics of one rank. Counters count from the engine's start. None: the page has no number for it."""

    running: int | None = None  # requests
    waiting: int | None = None  # requests
    kv_usage: float | None = None  # share of KV blocks in use, 0 to 1
    generation_tokens: int | None = None  # counter
    prefix_cache_queries: int | None = None  # counter, tokens
    prefix_cache_hits: int | None = None  # counter, tokens
    external_prefix_cache_queries: int | None = None  # counter, tokens
    external_prefix_cache_hits: int | None = None  # counter, tokens
    preemptions: int | None = None  # counter
    speculative: bool = False  # the engine decodes speculatively
    awake: float = 1  # 0 or 1
    weights_offloaded: float = 0  # 1 in sleep level 1, else 0
    discard_all: float = 0  # 1 in sleep level 2, else 0
    cache_config: dict[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info; empty: no series

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of the FIGURES that the page has no number for."""
        return tuple(name for name in FIGURES if getattr(self, name) is None)

    @property
    def block_size(self) -> int:
        """Tokens per KV block; 0 if the engine does not report it."""
        return _integer(self.cache_config.get("block_size"))

    @property
    def kv_blocks(self) -> int:
        """KV blocks of the engine's own cache; 0 if the engine does not report it."""
        return _integer(self.cache_config.get("num_gpu_blocks"))

    @property
    def kv_capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens; 0 if the engine does not report it."""
        return _integer(self.cache_config.get("kv_cache_size_tokens"), uint64) or self.kv_blocks * self.block_size


class WrongSender(NamedTuple):
    """An engine whose KV was wrong: its bootstrap server's URL, its id (empty if unknown), and the data-parallel rank that
    received the KV and refuses the engine (the `engine` label; None: an older connector package, which names no rank)."""

    bootstrap_url: str
    engine_id: str = ""
    receiver: int | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One parsed page. The labels that the connector package announces are empty for an engine without the package."""

    # S of the engine's wall clock; None if the process does not report it (several API server processes), or no number.
    process_start: float | None
    ranks: Mapping[int, Sample]  # by the `engine` label
    kv_transfer: Mapping[str, str] = field(default_factory=dict)  # announced labels
    tokenizer: Mapping[str, str] = field(default_factory=dict)  # announced labels
    engine: Mapping[str, str] = field(default_factory=dict)  # announced labels
    announced_identity: Mapping[str, str] = field(default_factory=dict)  # announced labels
    # Sending engine -> number of requests whose KV differed from its checksums.
    wrong_kv: Mapping[WrongSender, int] = field(default_factory=dict)
    # Name of a sleep or weight operation -> number of completed ones since the engine's start.
    completed: Mapping[str, int] = field(default_factory=dict)
    in_progress: frozenset[str] = frozenset()  # names of the operations that have not ended
    # Series -> why its value is no number of its field. The value counts as missing.
    bad: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The id of the engine's run, which all of its processes share; empty without the connector package."""
        return self.engine.get("run", "")

    @property
    def hardware(self) -> str:
        """One word for the devices of each rank, "2x-nvidia-h200" (with pipeline parallelism "4x-nvidia-h200-pp2"); empty if the
        engine does not announce its device."""
        device = hardware_word(self.engine.get("device", ""))
        if not device:
            return ""
        stages = max(_integer(self.engine.get("pipeline_parallel_size")), 1)
        devices = max(_integer(self.engine.get("tensor_parallel_size")), 1) * stages
        return f"{devices}x-{device}" + (f"-pp{stages}" if stages > 1 else "")

    @property
    def long_prefill_token_threshold(self) -> int:
        """The maximum number of tokens of one prompt in a step, if that leaves a part of the step to other prompts; else 0."""
        threshold = _integer(self.engine.get("long_prefill_token_threshold"))
        return threshold if threshold < _integer(self.engine.get("max_num_batched_tokens")) else 0

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests in the engine's batch; 0 if the engine does not announce it."""
        return _integer(self.engine.get("max_num_seqs"))

    def identity(self, root: str, rank: int) -> EngineIdentity:
        """Return what is known of what makes a rank interchangeable with others. `root`: the model's root in /v1/models."""
        announced = self.announced_identity
        kept = _KEPT.fullmatch(root)
        root, revision = (kept[1].replace("--", "/"), kept[2]) if kept is not None else (root, "")
        cache = self.ranks[rank].cache_config.get("cache_dtype", "") if rank in self.ranks else ""
        # Labels of a newer connector package are ignored.
        known = {name: announced[name] for name in EngineIdentity.__struct_fields__ if announced.get(name)}
        return EngineIdentity(
            **{
                "weights": root,
                "revision": revision,
                "kv_dtype": cache,
                "tokenizer": self.tokenizer.get("tokenizer", ""),
            }
            | known
        )

    @property
    def kv_token_bytes(self) -> int:
        """Size of the KV of one token on each device, in bytes; 0 if the engine does not announce it."""
        return _integer(self.engine.get("kv_token_bytes"), uint64)

    def tokenizer_place(self, root: str) -> str:
        """Return where the engine's tokenizer is from: a folder, or a hub id with or without @REVISION.

        `root` is the model's root in /v1/models. It is returned if the engine has no connector package, and if `root` is a hub
        id but the tokenizer is in a folder of the engine's machine."""
        place, revision = self.tokenizer.get("tokenizer") or root, self.tokenizer.get("revision", "")
        if place.startswith("/") and not root.startswith("/"):
            return root
        return f"{place}@{revision}" if revision else place


def parse_metrics(page: bytes) -> Scrape:
    """Parse a page. Ranks without a `vllm:` series are absent. A value that is no number of the field that it is sent in is
    unknown; `Scrape.bad` names its series."""
    process_start: float | None = None
    ranks: dict[int, Sample] = {}
    announced: dict[str, dict[str, str]] = {}
    wrong_kv: dict[WrongSender, int] = {}
    completed: dict[str, int] = {}
    in_progress: set[str] = set()
    bad: dict[str, str] = {}

    def number(name: str, value: object, parse: Callable[[object], N]) -> N | None:
        try:
            return parse(value)
        except ValueError as error:
            bad[name] = str(error)
            return None

    for match in _LINE.finditer(page):
        name = match[1].decode()
        if name == _PROCESS_START:
            process_start = number(name, match[3], moment)
            continue
        labels = _labels(match[2])
        if name in (_KV_TRANSFER, _TOKENIZER, _ENGINE, _IDENTITY):
            announced[name] = labels
            continue
        if name == _WRONG_KV:
            receiver = _integer(labels["engine"]) if "engine" in labels else None
            sender = WrongSender(labels.get("sender", ""), labels.get("engine_id", ""), receiver)
            before, here = wrong_kv.get(sender, 0), number(name, match[3], uint64)
            # A sender that is named is refused, whatever its number.
            total = None if here is None else number(name, before + here, uint64)
            wrong_kv[sender] = max(before, 1) if total is None else total
            continue
        if name in _COMPLETED:
            if (ended := number(name, match[3], uint64)) is not None:
                completed[labels.get("operation", "")] = ended
            continue
        if name in _IN_PROGRESS:
            if (number(name, match[3], finite) or 0) > 0:
                in_progress.add(labels.get("operation", ""))
            continue
        sample = ranks.setdefault(_integer(labels.get("engine")), Sample())
        if name == _CACHE_CONFIG:
            sample.cache_config = labels
        elif name == _DRAFTS:
            sample.speculative = True
        elif name == _SLEEP_STATE:
            state, flag = labels.get("sleep_state"), number(name, match[3], finite)
            if state in _SLEEP_STATES and flag is not None:
                setattr(sample, state, flag)
        else:
            attribute, parse = _GAUGES_AND_COUNTERS[name]
            if (figure := number(name, match[3], parse)) is not None:
                setattr(sample, attribute, figure)
    return Scrape(
        process_start,
        ranks,
        kv_transfer=announced.get(_KV_TRANSFER, {}),
        tokenizer=announced.get(_TOKENIZER, {}),
        engine=announced.get(_ENGINE, {}),
        announced_identity=announced.get(_IDENTITY, {}),
        wrong_kv=wrong_kv,
        completed=completed,
        in_progress=frozenset(in_progress),
        bad=bad,
    )


def hardware_word(name: str) -> str:
    """Return a device's name as one word: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _labels(text: bytes | None) -> dict[str, str]:
    if not text:
        return {}
    return {name: _ESCAPE.sub(_unescape, value) for name, value in _LABEL.findall(text.decode(errors="replace"))}


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _integer(text: str | None, parse: Callable[[object], int] = uint32) -> int:
    """Return a label as an integer; 0 if it is absent or none, such as "None", which vLLM prints for unknown values, or too
    large."""
    try:
        return parse(text)
    except ValueError:
        return 0
