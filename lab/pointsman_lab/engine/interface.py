"""Configuration, requests, events and results of an engine model. Pure values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pointsman_lab.engine.block_cache import AllCleared, BlocksRemoved, BlocksStored
from pointsman_lab.engine.host_tier import OffloadedRemoved, OffloadedStored
from pointsman_lab.engine.prompt_content import NamedPrompt


@dataclass(frozen=True)
class EngineConfig:
    """The engine's settings, named as vLLM's flags are."""

    block_size: int = 16  # tokens per block, a multiple of 16
    # Number of blocks that can hold KV; vLLM's num_gpu_blocks counts one more, which it never fills.
    kv_blocks: int = 20_000
    host_blocks: int = 0  # number of blocks that fit into host memory; 0: there is no host tier
    max_model_len: int = 131_072  # maximum tokens of prompt and answer together
    max_num_batched_tokens: int = 8_192  # maximum tokens per step, of prefill and decode together
    max_num_seqs: int = 256  # maximum number of running requests
    # Maximum tokens of one request per step while the engine has others; 0: unlimited.
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False  # raise it to at least an equal share of a step's tokens
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # order of waiting requests, and of preemption
    watermark: float = 0.0  # share of the blocks that admitting a request must leave free while others run
    vocabulary: Sequence[int] = range(1_000, 2_000)  # the tokens that the engine generates
    eos_token_id: int | None = None  # last token of an answer that stops by itself; None: no answer does
    # Range of the answer length, in tokens, of a request that may stop by itself. The length is derived from its prompt.
    natural_length: tuple[int, int] = (16, 96)
    seed: int = 0  # changes its answers
    hash_seed: int = 0  # seed of the block hashes: engines of different seeds have no hash in common

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size {self.block_size} is no multiple of 16")
        if self.kv_blocks * self.block_size < self.max_model_len:
            # vLLM refuses to start for the same reason: a lone request could wait for ever.
            raise ValueError(
                f"{self.kv_blocks} blocks of {self.block_size} hold less than max_model_len {self.max_model_len}"
            )
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len) < 1:
            raise ValueError("max_num_batched_tokens, max_num_seqs and max_model_len must be at least 1")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks {self.host_blocks} is negative")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark {self.watermark} is not in 0 to below 1")
        if not len(self.vocabulary):
            raise ValueError("vocabulary is empty")

    def answer_tokens(self, prompt: int, asked: int) -> int:
        """Return the length of an answer of `asked` tokens to a prompt of `prompt` tokens: it ends at the context."""
        return min(asked, self.max_model_len - prompt)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine."""

    request_id: str  # differs from those of all other open requests of the engine
    # The answer to a NamedPrompt always has `max_tokens` tokens; no event reports them.
    prompt: Sequence[int] | NamedPrompt
    max_tokens: int  # maximum length of what is generated, `begun` tokens not included; at least 1
    ignore_eos: bool = False  # the answer does not stop before max_tokens
    session_id: str = ""  # only reported, with the blocks; empty: none
    cache_salt: str = ""  # part of the block hashes of a prompt of token ids; empty: none
    remote_tokens: int = 0  # the KV of so many first prompt tokens is delivered from another instance
    priority: int = 0  # smaller is more urgent; it has an effect only under the scheduling policy "priority"
    # The tokens that the engine generates, before the end-of-sequence token, if it has one; empty: its own choice.
    answer: Sequence[int] = ()
    begun: int = 0  # number of last tokens of the prompt that begin its answer, which another engine has generated


class WaitingForRemoteKv(msgspec.Struct, frozen=True, gc=False):
    """The request holds blocks for the KV of `tokens` prompt tokens, which can now be sent; receive() reports its arrival."""

    request_id: str
    tokens: int


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The prompt is computed."""

    request_id: str  # as in EngineRequest
    cached_tokens: int  # of the prompt, from the local cache
    remote_tokens: int  # from another instance
    host_tokens: int = 0  # from host memory
    storage_tokens: int = 0  # from shared storage


class TokenGenerated(msgspec.Struct, frozen=True, gc=False):
    """Token number `index` (from 0) of an answer."""

    request_id: str
    index: int
    token_id: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete: "length", or "stop" when its last token is the end-of-sequence token."""

    request_id: str
    reason: str


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """The request lost its blocks and waits to be recomputed."""

    request_id: str


BlockEvent = BlocksStored | BlocksRemoved | AllCleared | OffloadedStored | OffloadedRemoved
Event = FirstToken | TokenGenerated | Finished | Preempted | BlockEvent


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """One step: it takes `duration_s` from its `now`, and its events become visible to others at its end.

    Requests in `awaited` wait for KV from the step's beginning. A step that schedules nothing takes no time.
    """

    duration_s: float
    events: list[Event]
    scheduled: dict[str, int]
    awaited: tuple[WaitingForRemoteKv, ...] = ()


class DecodeSteps(msgspec.Struct, frozen=True, gc=False):
    """The next `steps` steps, in which every running request decodes one token and nothing else happens. The first takes
    `first_s`, each later one `growth_s` more than the one before. `evicts`: cached blocks have to be evicted for them."""

    steps: int
    evicts: bool
    first_s: float
    growth_s: float

    def seconds(self, steps: int) -> float:
        """Return the duration of the first `steps` steps."""
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_by(self, seconds: float) -> int:
        """Return how many steps have begun, or ended, `seconds` after the first one's beginning; at least 1, at most `steps`."""
        if self.seconds(self.steps) <= seconds:
            return self.steps
        # The result is between the number of steps if all were as long as the last one, and if all were as long as the first one.
        # Steps grow little, so this range is small.
        most = min(int(seconds / self.first_s) + 1, self.steps - 1)
        least = max(int(seconds / (self.first_s + self.growth_s * self.steps)) - 1, 0)
        return bisect_left(range(1, self.steps), seconds, min(least, most), most, key=self.seconds) + 1


@dataclass
class Counters:
    """Totals since the start, under the names of vLLM's metrics."""

    prefix_cache_queries: int = 0  # prompt tokens looked up in the own cache, when a request is first admitted
    prefix_cache_hits: int = 0  # those of them that were found
    # Prompt tokens beyond these hits, looked up elsewhere: of requests with remote_tokens, and of all with a host tier.
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0  # tokens found by these: on another instance, in host memory or in storage
    num_preemptions: int = 0  # times that a request lost its blocks
    prompt_tokens: int = 0  # of requests whose first token was generated; the sum of the last three fields
    generation_tokens: int = 0  # end-of-sequence tokens included
    local_compute: int = 0  # prompt tokens that this engine computed
    local_cache_hit: int = 0  # prompt tokens from the engine's own cache
    external_kv_transfer: int = 0  # prompt tokens from another instance, host memory or storage
