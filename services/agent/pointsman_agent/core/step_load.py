"""The message that an engine with the connector package pushes at its steps: a msgpack map. Pure."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_metrics import FIGURES

# What the fields of the protocol's Load can hold, so that each load that is decoded can be sent on. A decoder can check 63 bits.
_Count32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Count64 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


class StepTotals(msgspec.Struct, frozen=True):
    """Sums over all steps since the engine's start; the fields are those of the message that routers receive."""

    steps: _Count64  # number of steps with tokens
    seconds: _Seconds  # time of all steps, without the pauses between them
    decode_tokens: _Count64  # tokens of requests whose prompts are complete
    prefill_tokens: _Count64  # prompt tokens that were computed
    # For each prefill token, the tokens that it attends to, each twice: n * (2c + n) for n tokens after c.
    prefill_pairs: _Count64
    prefills: _Count64  # number of prompts whose last token was computed
    prefill_seconds: _Seconds  # time of the steps with prefill tokens


class StepLoad(msgspec.Struct, frozen=True):
    """Load of one data-parallel rank of an engine."""

    run: str  # the engine's id as in its pointsman_engine_info
    rank: _Count32  # the data-parallel rank
    running: _Count32  # requests in its batch
    waiting: _Count32  # requests in its queue
    kv_usage: _Share  # used share of its KV blocks, 0 to 1
    prefill_tokens_left: _Count64  # tokens still to schedule of the prompts in its batch
    totals: StepTotals  # of all computed steps of the rank, so that a lost message loses nothing

    def to_wire(self, scraped: pb.Load | None) -> pb.Load:
        """Return the load in the form that routers receive. What a step does not say is that of `scraped`, the last load from
        /metrics: counters of tokens and caches, whether the engine is suspended, and the agent's samples of GPUs."""
        load = pb.Load()
        if scraped is not None:
            load.CopyFrom(scraped)
        load.running, load.waiting, load.kv_usage = self.running, self.waiting, self.kv_usage
        known = {"running", "waiting", "kv_usage"}
        load.unknown[:] = [name for name in (load.unknown if scraped is not None else FIGURES) if name not in known]
        load.healthy = True
        load.prefill_tokens_left = self.prefill_tokens_left
        load.steps.CopyFrom(pb.StepTotals(**msgspec.structs.asdict(self.totals)))
        return load
