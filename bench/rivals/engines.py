"""Running engines that a router is started in front of, and what they count themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman_common.io.direct_http import open_directly


@dataclass(frozen=True)
class EngineAddress:
    """One engine: its base URL and the ZMQ endpoints of its KV events and of their replay."""

    url: str
    events: str
    replay: str


@dataclass(frozen=True)
class Fleet:
    """Running engines. `tokenizer`: folder of their tokenizer. `words`: texts of one token each. `pids`: their processes."""

    engines: Sequence[EngineAddress]  # one for each server, in the order of `pids`
    model: str  # name that they serve
    tokenizer: Path
    words: Sequence[str]
    block_size: int  # tokens of a KV block
    kv_blocks: int  # KV blocks of each engine
    context: int  # maximum tokens of a prompt with its answer
    pids: Sequence[int]

    def cached_and_asked(self) -> tuple[float, float]:
        """Return the prompt tokens that the engines found cached and those that they looked up, by their own counters."""
        texts = [get_text(f"{engine.url}/metrics") for engine in self.engines]

        def counted(name: str) -> float:
            sample = re.compile(rf"^vllm:prefix_cache_{name}_total(?:{{.*}})? (\S+)$", re.MULTILINE)
            return sum(float(value) for text in texts for value in sample.findall(text))

        return counted("hits"), counted("queries")


def get_text(url: str) -> str:
    """Return the text that a URL answers. Raises OSError."""
    with open_directly(url, 30) as response:
        return str(response.read().decode())


def address_of(url: str) -> EngineAddress:
    """Return the address of an engine that tells where its KV events are. Raises OSError."""
    endpoints = json.loads(get_text(f"{url}/kv_event_sources"))["0"]
    return EngineAddress(
        url, *(str(endpoints[name]).replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint"))
    )
