"""The cells in which a policy must be no worse than `unified` to become the default. Pure.

A cell is a kind of traffic at a load on a fleet. Clients wait for an answer before they think and send the next turn, so that a
session's time depends on the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.trials import Cell, Workload
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Arrivals, Session, draw_sessions
from pointsman_lab.workload.synthetic_trace import AGENTIC, SessionShape, generate, shape_with
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.trace_formats import ANSWER_MS, ANSWER_TOKEN_MS
from pointsman_lab.workload.traces import TraceRequest, first_sessions
from studies.findings.cells import CHAT as CHAT_TRACE
from studies.findings.cells import FILES, PLACEMENT_S, REAL, THRESHOLD, TOKENISE_TOKEN_S

BASELINE = "unified"
# Distance between the block ids of two parts of mixed traffic; traces have fewer ids.
_PART_IDS = 10**9

ONE_TURN = shape_with(
    AGENTIC,
    {
        "mean_turns": 1.0,
        "subagent_chance": 0.0,
        "system_tokens": 1_500,
        "context_tokens": 700,
        "output_tokens": 250,
        "output_spread": 0.8,
        "block_size": 64,
    },
)
LONG = shape_with(AGENTIC, {"context_tokens": 70_000, "context_spread": 0.4, "mean_turns": 3.0, "max_tokens": 131_072})


class Source(Protocol):
    """What a cell's requests come from."""

    @property
    def name(self) -> str:
        """Name of the source in a trial's key."""

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""


@dataclass(frozen=True)
class Generated:
    """A source of `sessions` sessions of a shape that start within `span_s`, drawn anew for each seed."""

    sessions: int
    shape: SessionShape
    span_s: float = 600.0

    @property
    def name(self) -> str:
        """Name of the source in a trial's key."""
        return repr(self)

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""
        return generate(self.sessions, self.span_s, seed, self.shape)


@dataclass(frozen=True)
class Recorded:
    """A source of a trace file's first sessions (0: all), their starts moved anew for each seed and divided by `rate`."""

    file: Path
    sessions: int = 0
    rate: float = 1.0

    @property
    def name(self) -> str:
        """Name of the source in a trial's key, without the file's folder."""
        return f"{self.file.name} {self.sessions} {self.rate}"

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""
        requests = first_sessions(_loaded(self.file), self.sessions)
        drawn = draw_sessions(requests, Arrivals("jitter", rate=self.rate), seed)
        return [turn for turns in drawn for turn in _with_pauses(turns)]


@lru_cache(maxsize=4)
def _loaded(file: Path) -> list[TraceRequest]:
    return load_trace(file)


def _with_pauses(turns: Session) -> Iterator[TraceRequest]:
    """Yield a session's turns. The pause before a turn for which the trace has none is the time since the turn before, less the
    time that an answer of that length takes."""
    before: TraceRequest | None = None
    for turn in turns:
        pause_ms = turn.think_ms
        if pause_ms is None and before is not None:
            answer_ms = ANSWER_MS + ANSWER_TOKEN_MS * before.output_length
            pause_ms = max(turn.timestamp_ms - before.timestamp_ms - answer_ms, 0.0)
        yield replace(turn, think_ms=pause_ms or 0.0)
        before = turn


@dataclass(frozen=True)
class Mixed:
    """A source of the requests of several sources together. Their sessions and blocks have nothing in common."""

    parts: tuple[Source, ...]

    @property
    def name(self) -> str:
        """Name of the source in a trial's key."""
        return " and ".join(part.name for part in self.parts)

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""
        return [
            replace(
                turn,
                session_id=f"{number}/{turn.session}",
                hash_ids=tuple(number * _PART_IDS + hash_id for hash_id in turn.hash_ids),
            )
            for number, part in enumerate(self.parts)
            for turn in part(seed)
        ]


@dataclass(frozen=True)
class DefaultCell:
    """Traffic at a load, and the fleet that it goes to. `rate`: factor on the rate of session starts. `changes`: fields of
    SimulationConfig. `kv_blocks`, `step_tokens` and `threshold` are of each engine; `slow` multiplies the time of its steps."""

    name: str  # in the table, and for the setting `cells`; not in the key
    source: Source  # called with a seed, returns its requests
    rate: float
    instances: int = 8  # of the fleet; fixed during a run
    kv_blocks: int = 31_250
    step_tokens: int = 8_192
    threshold: int = 0
    slow: float = 1.0
    transfers: bool = False  # whether engines send KV to each other, so that prefixes can be fetched
    changes: Mapping[str, object] = field(default_factory=dict)

    def cell(self, policy: str) -> Cell:
        """Return the cell under `policy`."""
        return Cell(
            policy=policy,
            load=self.name,
            workload=Workload(self.source, Arrivals("trace", rate=self.rate)),
            simulation=SimulationConfig(
                policy=policy,
                timing="think",
                instances=self.instances,
                placement_s=PLACEMENT_S,
                tokenise_token_s=TOKENISE_TOKEN_S,
                engine=EngineConfig(
                    max_model_len=200_000,
                    kv_blocks=self.kv_blocks,
                    max_num_batched_tokens=self.step_tokens,
                    long_prefill_token_threshold=self.threshold,
                ),
                profile=Profile().slowed(self.slow),
                kv_transfers=self.transfers,
                **self.changes,  # type: ignore[arg-type]
            ),
        )

    def key(self, policy: str) -> str:
        """Return JSON of everything that a trial under `policy` depends on, except its seed and the code."""
        depends_on = {
            "cell": {name: value for name, value in asdict(self).items() if name not in ("name", "source")},
            "source": self.source.name,
            "policy": policy,
            "settings": dict(make_policy(policy).ref().settings),
        }
        return msgspec.json.encode(depends_on, order="sorted").decode()


def default_cells(traces: Path) -> list[DefaultCell]:
    """Return all cells, the largest fleet last; `traces` is the folder of the trace files, and cells of missing files are
    left out."""
    agentic, chat = Recorded(traces / FILES[REAL], 137), Recorded(traces / FILES[CHAT_TRACE], 300)
    generated, one_turn = Generated(115, AGENTIC, 300.0), Generated(2_000, ONE_TURN, 50.0)
    cells = [
        DefaultCell("one-turn chat, light", one_turn, 0.4),
        DefaultCell("one-turn chat, knee", one_turn, 1.0),
        DefaultCell("one-turn chat, over the knee", one_turn, 1.3),
        DefaultCell("long prompts", Generated(60, LONG, 300.0), 1.0),
        DefaultCell("P/D, 2 of 8 only prefill", generated, 0.75, transfers=True, changes={"producers": 2}),
        DefaultCell("approximate prefixes", generated, 0.75, changes={"exact_prefixes": False}),
        DefaultCell("2 instances", Generated(58, AGENTIC), 0.84, instances=2),
        DefaultCell("cold, 40 sessions", Generated(40, AGENTIC, 100.0), 1.0),
        DefaultCell("cold, engines 2.5 times as slow", Generated(40, AGENTIC, 250.0), 1.0, slow=2.5),
        DefaultCell("engines that cut prompts", generated, 1.0, threshold=THRESHOLD),
        DefaultCell("engines that cut prompts, KV transfers", generated, 1.0, threshold=THRESHOLD, transfers=True),
    ]
    loads = {"light": 0.5, "knee": 1.0, "over the knee": 1.25}
    if agentic.file.exists():
        cells = [DefaultCell(f"agentic, {name}", agentic, rate) for name, rate in loads.items()] + cells
        cells.append(DefaultCell("agentic, knee, KV transfers", agentic, loads["knee"], transfers=True))
    if chat.file.exists():
        cells += [DefaultCell(f"chat, {name}", chat, rate) for name, rate in loads.items()]
    if agentic.file.exists() and chat.file.exists():
        mixed = Mixed((agentic, Recorded(chat.file, 75, rate=0.35), Generated(700, ONE_TURN, 400.0)))
        cells += [DefaultCell(f"mixed, {name}", mixed, rate) for name, rate in {"light": 0.4, "knee": 0.7}.items()]
    cells.append(DefaultCell("64 instances", Generated(460, AGENTIC, 150.0), 1.0, instances=64))
    return cells
