"""Small agentic sessions, made up: `python -m lab.generate` writes the tiny trace that the demo replays. Pure but for that.

Shapes follow the workload that Pointsman is made for: a system prompt shared by all sessions of an agent, a first context of
thousands of tokens, turns that append tool output and answers, short outputs, thinking pauses. The figures are of a small
session, not fitted.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from lab.traces import TINY_TRACE, TraceRequest, save_trace


@dataclass(frozen=True)
class SessionShape:
    """Medians of what is drawn, log-normally with `spread` (sigma of the logarithm); tokens, seconds."""

    agents: int = 2
    system_tokens: int = 3_072
    context_tokens: float = 5_000
    growth_tokens: float = 1_500
    output_tokens: float = 120
    think_s: float = 4.0
    mean_turns: float = 5.0
    max_tokens: int = 60_000
    spread: float = 0.7
    block_size: int = 512


def generate(sessions: int, span_s: float, seed: int, shape: SessionShape | None = None) -> list[TraceRequest]:
    """`sessions` sessions that start within `span_s` (s), ordered by time. Equal arguments give equal traces."""
    shape = shape or SessionShape()
    rng = random.Random(seed)
    next_id = 0
    systems: list[list[int]] = []
    for _ in range(shape.agents):
        systems.append(list(range(next_id, next_id + shape.system_tokens // shape.block_size)))
        next_id = systems[-1][-1] + 1
    requests: list[TraceRequest] = []
    for number in range(sessions):
        clock_s = rng.uniform(0, span_s)
        ids = list(systems[number % shape.agents])
        length = len(ids) * shape.block_size + _draw(rng, shape.context_tokens, shape)
        # Geometric: the chance that a turn is the last one is the same after each.
        turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / shape.mean_turns))
        think_s = 0.0
        for turn in range(1, turns + 1):
            while len(ids) < length // shape.block_size:
                ids.append(next_id)
                next_id += 1
            output = _draw(rng, shape.output_tokens, shape)
            requests.append(
                TraceRequest(
                    timestamp_ms=round(clock_s * 1e3),
                    session_id=f"s{number:03d}",
                    turn=turn,
                    input_length=length,
                    output_length=output,
                    hash_ids=tuple(ids),
                    block_size=shape.block_size,
                    think_ms=round(think_s * 1e3),
                )
            )
            length += output + _draw(rng, shape.growth_tokens, shape)
            if length > shape.max_tokens:
                break
            think_s = shape.think_s * math.exp(rng.gauss(0, shape.spread))
            # Roughly when an unloaded engine would have answered; replays wait for the real answer in any case.
            clock_s += think_s + 0.5 + 0.01 * output
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _draw(rng: random.Random, median: float, shape: SessionShape) -> int:
    return max(1, round(median * math.exp(rng.gauss(0, shape.spread))))


def make_tiny(path: Path = TINY_TRACE) -> None:
    """Write the trace that ships with the lab."""
    save_trace(path, generate(sessions=16, span_s=30.0, seed=7, shape=SessionShape(agents=4)))


if __name__ == "__main__":
    make_tiny()
