"""The message that an engine pushes to its agent at its steps: a msgpack map with these field names."""

from __future__ import annotations

import msgspec


class StepTotals(msgspec.Struct):
    """Sums over all steps since the engine's start, so that a lost message loses nothing.

    `seconds` is the time of all steps without the pauses between them, `prefill_seconds` that of the steps with prefill tokens.
    `prefill_pairs` counts, for each prefill token, the tokens that it attends to, each twice: n * (2c + n) for n tokens after c.
    `prefills` is the number of prompts whose last token was computed."""

    steps: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefills: int = 0
    prefill_seconds: float = 0.0


class StepLoad(msgspec.Struct):
    """Load of one data-parallel rank of an engine. `run` is the engine's id as in its pointsman_engine_info, `kv_usage` is the
    used share of its KV blocks, 0 to 1, `prefill_tokens_left` the tokens still to schedule of the prompts in its batch."""

    run: str
    rank: int
    running: int
    waiting: int
    kv_usage: float
    prefill_tokens_left: int
    totals: StepTotals
