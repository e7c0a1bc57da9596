"""The message that an engine with the connector package pushes at its steps: a msgpack map. Pure."""

from __future__ import annotations

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb


class StepTotals(msgspec.Struct, frozen=True):
    """Sums over all steps since the engine's start; the fields are those of the message that routers receive."""

    steps: int
    seconds: float
    decode_tokens: int
    prefill_tokens: int
    prefill_pairs: int
    prefills: int
    prefill_seconds: float


class StepLoad(msgspec.Struct, frozen=True):
    """Load of one data-parallel rank of an engine. `run` is the engine's id as in its pointsman_engine_info."""

    run: str
    rank: int
    running: int
    waiting: int
    kv_usage: float
    prefill_tokens_left: int
    totals: StepTotals

    def to_wire(self, scraped: pb.Load | None) -> pb.Load:
        """Return the load in the form that routers receive. What a step does not say is that of `scraped`, the last load from
        /metrics: counters of tokens and caches, whether the engine is suspended, and the agent's samples of GPUs."""
        load = pb.Load()
        if scraped is not None:
            load.CopyFrom(scraped)
        load.running, load.waiting, load.kv_usage = self.running, self.waiting, self.kv_usage
        load.healthy = True
        load.prefill_tokens_left = self.prefill_tokens_left
        load.steps.CopyFrom(pb.StepTotals(**msgspec.structs.asdict(self.totals)))
        return load
