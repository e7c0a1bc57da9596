"""Forks: sub-agents that begin with the whole context of their parent. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec import structs

from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.subagents import SubagentRequest
from pointsman_lab.workload.traces import TraceRequest

# Ids of the blocks that forks add to their parents' start here; traces have fewer ids.
FIRST_ID = 10**12
# What a fork's name has after its parent's.
MARK = "/fork"


@dataclass(frozen=True)
class Forks:
    """How many sessions fork. A `share` of the sessions of two turns or more, chosen at random, has `least` to `most`
    sub-agents at one of its turns, whose number is drawn uniformly on a logarithmic scale. All start when that turn has been
    answered, with its prompt and a task of their own, and name their parent.

    `task_tokens`, `growth_tokens` and `output_tokens` are the medians of log-normal lengths: of a task, of what each further turn
    adds, and of an answer. `mean_turns`: mean of a geometric number of turns.
    """

    share: float = 0.0
    least: int = 2
    most: int = 40
    task_tokens: float = 1_000.0
    growth_tokens: float = 1_500.0
    output_tokens: float = 150.0
    mean_turns: float = 3.0
    tool_s: float = 5.0  # median of the log-normal pause between two turns, s
    spread: float = 0.7  # standard deviation of the logarithm of each length and pause

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share:g} is not in 0 to 1")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least: {self.least} is not in 1 to {self.most}, the value of most")
        if self.mean_turns < 1:
            raise ValueError(f"mean_turns: {self.mean_turns:g} is below 1")


def with_forks(sessions: Sequence[Session], forks: Forks, seed: int) -> list[Session]:
    """Return the same sessions in the same order, some of them followed by their forks. Mutates nothing."""
    if not forks.share:
        return list(sessions)
    rng, ids = random.Random(f"forks {seed}"), count(FIRST_ID)
    found: list[Session] = []
    for turns in sessions:
        found.append(turns)
        if len(turns) > 1 and rng.random() < forks.share:
            parent = turns[rng.randrange(len(turns) - 1)]
            number = round(math.exp(rng.uniform(math.log(forks.least), math.log(forks.most))))
            found += [list(_fork(parent, f"{parent.session}{MARK}{at}", forks, rng, ids)) for at in range(number)]
    return found


def _fork(
    parent: TraceRequest, name: str, forks: Forks, rng: random.Random, ids: Iterator[int]
) -> Iterator[TraceRequest]:
    def drawn(median: float) -> float:
        return median * math.exp(rng.gauss(0.0, forks.spread))

    size, blocks = parent.block_size, list(parent.whole_blocks)
    length, pause_ms, turn = len(blocks) * size + 1 + int(drawn(forks.task_tokens)), 0.0, 1
    while True:
        blocks += [next(ids) for _ in range(length // size - len(blocks))]
        output = 1 + int(drawn(forks.output_tokens))
        request = TraceRequest(
            timestamp_ms=parent.timestamp_ms,
            session_id=name,
            turn=turn,
            input_length=length,
            output_length=output,
            hash_ids=tuple(blocks),
            block_size=size,
            think_ms=pause_ms,
        )
        yield (
            request
            if turn > 1
            else SubagentRequest(**structs.asdict(request), parent=parent.session, parent_turn=parent.turn)
        )
        if rng.random() < 1.0 / forks.mean_turns:
            return
        turn, pause_ms = turn + 1, drawn(forks.tool_s) * 1e3
        length += output + int(drawn(forks.growth_tokens))
