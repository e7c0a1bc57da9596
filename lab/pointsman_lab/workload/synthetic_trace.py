"""Synthetic agentic sessions, for users without data. Pure: equal arguments give equal traces, and every seed is a fresh draw.

A fleet serves a few kinds of agents. All sessions of a kind share its system prompt (instructions and tools); popular kinds have
more sessions. A session opens with its own context (files, a task) and grows turn by turn by its answers and by the results of
tools. Between turns a tool runs or a person thinks. Sometimes a session is reset to a short summary, so that all but the system
prompt is new. A session that would exceed its model's length is always reset. A turn may hand a task to a sub-agent: a short
session with its own kind, for whose end the parent waits.

`AGENTIC` approximates the workload that Pointsman is made for: 20k to 40k tokens of input at the median, 90k at p90, up
to 130k, answers of 80 to 220 tokens at the median, 75 to 95 % of a later turn's input cached, 93 % of all reuse within a session.
Its parameters are round numbers chosen to match those figures; they are not fitted to any trace. That workload was 36 % LIGHT,
44 % MEDIUM and 20 % HEAVY when it was placed. An unlimited cache cannot reproduce this split: a later turn with 75 % cached is
LIGHT, and of 1,214 requests in 274 sessions 77 % are later turns. `pointsman trace stats` shows the split with limited caches.
`SMALL` has a size for laptops.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Annotated

import msgspec

from pointsman_lab.workload.trace_formats import ANSWER_MS, ANSWER_TOKEN_MS
from pointsman_lab.workload.traces import TraceRequest

# Maximum length of a tool's answer, tokens. Every agent truncates longer ones.
GROWTH_LIMIT_TOKENS = 50_000
# Maximum length of an answer, tokens.
OUTPUT_LIMIT_TOKENS = 8_192
# Sigma of the logarithm of a summary's length.
SUMMARY_SPREAD = 0.5
# Maximum pause of a person, s. Whoever is away for longer starts a new session.
PAUSE_LIMIT_S = 600.0


Amount = Annotated[float, msgspec.Meta(gt=0)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=3)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Turns = Annotated[float, msgspec.Meta(ge=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class ShapeError(ValueError):
    """Sessions that cannot be generated; the message names the parameter."""


@dataclass(frozen=True)
class SessionShape:
    """Parameters of the draws. A number and its spread are the median of a log-normal distribution and its logarithm's sigma.

    Lengths in tokens, times in s; *_share and *_chance are probabilities (0 to 1).
    """

    # Number of kinds of agents; the k-th is used in proportion to 1/k. system_tokens is the length of their system prompts.
    agents: Positive = 6
    system_tokens: Amount = 9_000  # one draw for each kind
    system_spread: Spread = 0.3  # over the kinds
    # A session's own context at its first turn.
    context_tokens: Amount = 28_000
    context_spread: Spread = 1.0  # of sub-agents' contexts, too
    # Tokens that a turn adds in addition to the last answer.
    growth_tokens: Amount = 1_600
    growth_spread: Spread = 1.4  # draws above GROWTH_LIMIT_TOKENS are repeated
    output_tokens: Amount = 150  # of one answer
    output_spread: Spread = 1.0  # draws above OUTPUT_LIMIT_TOKENS are repeated
    # Mean number of turns of a session. Geometric: the chance that a turn is the last one is the same after each.
    mean_turns: Turns = 4.5
    # Pauses: a tool runs, or (with probability human_share) a person thinks.
    tool_s: Amount = 5.0
    tool_spread: Spread = 0.8  # no limit to the length
    human_share: Share = 0.2  # of the pauses; 0: all are tools'
    human_s: Amount = 40.0  # longer pauses are cut to PAUSE_LIMIT_S
    human_spread: Spread = 1.0  # before the cut
    # Chance, before a later turn, that a summary replaces everything but the system prompt. Certain beyond max_tokens.
    reset_chance: Share = 0.03
    summary_tokens: Amount = 5_000  # with SUMMARY_SPREAD; the system prompt is not included
    max_tokens: Positive = 131_072  # maximum input of one request; at least twice a system prompt
    # Chance, after a turn, of a sub-agent with its own context and number of turns.
    subagent_chance: Share = 0.06
    subagent_context_tokens: Amount = 4_000  # with context_spread; the system prompt is not included
    subagent_mean_turns: Turns = 4.0  # geometric, as mean_turns
    block_size: Positive = 512  # tokens per block of the trace's hash_ids


AGENTIC = SessionShape()
SMALL = SessionShape(
    agents=4,
    system_tokens=3_072,
    system_spread=0.0,
    context_tokens=5_000,
    context_spread=0.7,
    growth_tokens=1_500,
    growth_spread=0.7,
    output_tokens=120,
    output_spread=0.7,
    mean_turns=5.0,
    tool_s=4.0,
    tool_spread=0.7,
    human_share=0.0,
    reset_chance=0.0,
    max_tokens=60_000,
    subagent_chance=0.0,
)


SHAPES = {"agentic": AGENTIC, "small": SMALL}


def shape_with(base: SessionShape, changes: Mapping[str, object]) -> SessionShape:
    """Return `base` with other values, which may be text. Raises ShapeError for an unknown parameter or one out of bounds."""
    known = asdict(base)
    if unknown := changes.keys() - known.keys():
        raise ShapeError(f"{min(unknown)}: no such parameter; the parameters are {', '.join(known)}")
    try:
        return msgspec.convert(known | dict(changes), SessionShape, strict=False)
    except msgspec.ValidationError as error:
        raise ShapeError(str(error)) from error


def generate(sessions: int, span_s: float, seed: int, shape: SessionShape = SMALL) -> list[TraceRequest]:
    """Return the requests of `sessions` sessions that start within `span_s` (s), and of their sub-agents, ordered by time.

    Raises ShapeError if a system prompt is longer than half of max_tokens.
    """
    return sorted(_SessionGenerator(seed, shape).requests(sessions, span_s), key=lambda request: request.timestamp_ms)


class _SessionGenerator:
    """Generates sessions. Holds the kinds of agents and the ids that are not yet used."""

    def __init__(self, seed: int, shape: SessionShape) -> None:
        self._seed = seed
        self._shape = shape
        self._free = count()
        rng = random.Random(f"{seed} agents")
        self._systems = [
            self._ids(_draw(rng, shape.system_tokens, shape.system_spread) // shape.block_size)
            for _ in range(shape.agents)
        ]
        if (longest := max(map(len, self._systems)) * shape.block_size) * 2 > shape.max_tokens:
            raise ShapeError(f"max_tokens: {shape.max_tokens} is less than twice a system prompt of {longest} tokens")
        self._popularity = [1 / rank for rank in range(1, shape.agents + 1)]

    def requests(self, sessions: int, span_s: float) -> Iterator[TraceRequest]:
        """Yield requests session by session. Each session has its own random stream, so it does not depend on how many follow."""
        for number in range(sessions):
            rng = random.Random(f"{self._seed} session {number}")
            yield from self._session(rng, f"s{number:03d}", rng.uniform(0, span_s), parent=True)[0]

    def _session(
        self, rng: random.Random, name: str, clock_s: float, *, parent: bool
    ) -> tuple[list[TraceRequest], float]:
        """Return a session's requests with those of its sub-agents, and the time of its end, s."""
        shape = self._shape
        system = rng.choices(self._systems, self._popularity)[0]
        ids = list(system)
        base = len(system) * shape.block_size
        context = shape.context_tokens if parent else shape.subagent_context_tokens
        length = base + _draw(rng, context, shape.context_spread, shape.max_tokens - base)
        turns = _geometric(rng, shape.mean_turns if parent else shape.subagent_mean_turns)
        made: list[TraceRequest] = []
        subagents = 0
        think_s = 0.0
        for turn in range(1, turns + 1):
            ids += self._ids(length // shape.block_size - len(ids))
            output = _draw(rng, shape.output_tokens, shape.output_spread, OUTPUT_LIMIT_TOKENS)
            made.append(
                TraceRequest(
                    timestamp_ms=round(clock_s * 1e3),
                    session_id=name,
                    turn=turn,
                    input_length=length,
                    output_length=output,
                    hash_ids=tuple(ids),
                    block_size=shape.block_size,
                    think_ms=round(think_s * 1e3),
                )
            )
            answered_s = clock_s = clock_s + (ANSWER_MS + ANSWER_TOKEN_MS * output) / 1e3
            if turn == turns:
                break
            if parent and rng.random() < shape.subagent_chance:
                subagents += 1
                below, clock_s = self._session(rng, f"{name}/a{subagents}", clock_s, parent=False)
                made += below
            clock_s += _pause(rng, shape)
            think_s = clock_s - answered_s
            growth = output + _draw(rng, shape.growth_tokens, shape.growth_spread, GROWTH_LIMIT_TOKENS)
            if rng.random() < shape.reset_chance or length + growth > shape.max_tokens:
                ids = list(system)
                length = base + _draw(rng, shape.summary_tokens, SUMMARY_SPREAD, shape.max_tokens - base)
            else:
                length += growth
        return made, clock_s

    def _ids(self, amount: int) -> list[int]:
        return [next(self._free) for _ in range(amount)]


def _draw(rng: random.Random, median: float, spread: float, limit: float = math.inf) -> int:
    """Return a drawn length. A length above `limit` is drawn again, so that `limit` is no more common than smaller lengths. After
    100 draws returns `limit`."""
    for _ in range(100):
        length = max(1, round(median * math.exp(rng.gauss(0, spread))))
        if length <= limit:
            return length
    return int(limit)


def _geometric(rng: random.Random, mean: float) -> int:
    """Return a geometrically distributed number from 1 on, with mean `mean`."""
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)) if mean > 1 else 1


def _pause(rng: random.Random, shape: SessionShape) -> float:
    if rng.random() >= shape.human_share:
        return shape.tool_s * math.exp(rng.gauss(0, shape.tool_spread))
    return min(shape.human_s * math.exp(rng.gauss(0, shape.human_spread)), PAUSE_LIMIT_S)
