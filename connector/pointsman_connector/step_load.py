"""The message that an engine pushes to its agent at its steps: a msgpack map with these field names."""

from __future__ import annotations

import msgspec


class StepTotals(msgspec.Struct):
    """Sums over all steps since the engine's start, so that a lost message loses nothing."""

    steps: int = 0  # steps with tokens; others are not counted
    seconds: float = 0.0  # time of all steps, without the pauses between them
    decode_tokens: int = 0  # tokens of requests whose prompts are complete
    prefill_tokens: int = 0  # prompt tokens that were computed
    # For each prefill token, the tokens that it attends to, each twice: n * (2c + n) for n tokens after c.
    prefill_pairs: int = 0
    prefills: int = 0  # number of prompts whose last token was computed
    prefill_seconds: float = 0.0  # time of the steps with prefill tokens


class StepLoad(msgspec.Struct):
    """Load of one data-parallel rank of an engine."""

    run: str  # the engine's id as in its pointsman_engine_info
    rank: int  # the data-parallel rank
    running: int  # requests in its batch
    waiting: int  # requests in its queue
    kv_usage: float  # used share of its KV blocks, 0 to 1
    prefill_tokens_left: int  # tokens still to schedule of the prompts in its batch
    totals: StepTotals  # up to this message
