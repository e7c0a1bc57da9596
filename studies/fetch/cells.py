"""The cells of the study of fetches: many requests that share a prefix, and fleets that change. Pure but for traces."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.experiments.trials import Cell, drawn
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.forks import MARK, Forks
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.subagents import Subagents
from pointsman_lab.workload.synthetic_trace import AGENTIC
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev
from studies.autoscaling.resizable_simulator import ResizableSimulator
from studies.default.cells import DefaultCell, Generated, Mixed, Recorded
from studies.findings.cells import FILES, REAL, THRESHOLD

# What the names of sessions begin with that read a document.
READER = "reader"
# Fitted to llm-d's table of gpt-oss-120b on one H200: 0.205, 0.426, 0.983 and 1.695 s to compute 8k, 16k, 32k and 48k tokens
# (this gives 0.205, 0.442, 1.007 and 1.695), and 0.120, 0.196, 0.376 and 0.551 s to fetch them (0.114, 0.201, 0.376 and 0.550).
GPT_OSS = Profile(prefill_token_s=2.318e-5, prefill_pair_s=2.3e-10, transfer_s=0.027, transfer_token_s=1.065e-5)


class _NamedBySettings:
    @property
    def name(self) -> str:
        """Name of the source in a trial's key."""
        return repr(self)


@dataclass(frozen=True)
class Documents(_NamedBySettings):
    """A source of sessions that ask about documents. Each of `number` documents, of `tokens`, is opened by one session at a
    random time in `span_s`, and `opened_s` later read by `readers` sessions of `turns` turns that start within `burst_s`. A
    question has `question_tokens` in the median."""

    number: int = 8
    tokens: int = 64_000
    readers: int = 40
    turns: int = 2
    question_tokens: float = 500.0
    opened_s: float = 30.0
    burst_s: float = 10.0
    span_s: float = 600.0

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""
        rng, size, found, ids = random.Random(f"documents {seed}"), 64, [], iter(range(1, 10**9))
        for number in range(self.number):
            document = [next(ids) for _ in range(self.tokens // size)]
            opened_at_s = rng.uniform(0.0, self.span_s)
            for reader in range(-1, self.readers):
                blocks, length = list(document), self.tokens
                waits_s = self.opened_s + rng.uniform(0.0, self.burst_s) if reader >= 0 else 0.0
                start_ms = 1e3 * (opened_at_s + waits_s)
                for turn in range(1, self.turns + 1 if reader >= 0 else 2):
                    length += 1 + int(self.question_tokens * math.exp(rng.gauss(0.0, 0.7)))
                    blocks += [next(ids) for _ in range(length // size - len(blocks))]
                    output = 1 + int(200.0 * math.exp(rng.gauss(0.0, 0.7)))
                    found.append(
                        TraceRequest(
                            timestamp_ms=start_ms + 1e-3 * turn,
                            session_id=f"{READER}{number}-{reader}" if reader >= 0 else f"opens{number}",
                            turn=turn,
                            input_length=length,
                            output_length=output,
                            hash_ids=tuple(blocks),
                            block_size=size,
                            think_ms=0.0 if turn == 1 else 1e3 * rng.expovariate(0.1),
                        )
                    )
                    length += output
        return found


@dataclass(frozen=True)
class Parents(_NamedBySettings):
    """A source of `number` sessions of two turns, `apart_s` apart, with prompts of `tokens`, whose second turn can wait for
    sub-agents."""

    number: int = 20
    tokens: int = 49_152
    apart_s: float = 60.0

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests under `seed`."""
        rng, size = random.Random(f"parents {seed}"), 64
        found = []
        for number in range(self.number):
            begin_ms = 1e3 * self.apart_s * (number + rng.uniform(0.0, 0.2))
            length = self.tokens
            blocks = [number * 10**6 + at for at in range(1, 2 * length // size)]
            for turn in (1, 2):
                found.append(
                    TraceRequest(
                        timestamp_ms=begin_ms + turn,
                        session_id=f"parent{number}",
                        turn=turn,
                        input_length=length,
                        output_length=200,
                        hash_ids=tuple(blocks[: length // size]),
                        block_size=size,
                        think_ms=0.0,
                    )
                )
                length += 2_000
        return found


@dataclass(frozen=True)
class FetchCell:
    """Traffic at a load, and the fleet that it goes to."""

    cell: DefaultCell  # the traffic and the fleet; its name does not count
    forks: Forks = field(default_factory=Forks)  # default: none
    subagents: Subagents = field(default_factory=Subagents)  # default: none
    host_blocks: int = 0  # of each engine's host tier
    profile: Profile | None = None  # of every engine; None: the cell's
    one_transfer_at_a_time: bool = False  # whether an engine's transfers to others share its link
    joins_at_s: float | None = None  # when a further instance joins
    drains_at_s: float | None = None  # when the instance with most sessions gets no more requests, and stays
    policy: str = "auto"  # of the router

    def made(self, *, transfers: bool) -> Cell:
        """Return the cell with engines that transfer KV or not."""
        asked = self.cell.cell(self.policy)
        simulation = replace(
            asked.simulation,
            kv_transfers=transfers,
            one_transfer_at_a_time=self.one_transfer_at_a_time,
            profile=self.profile or asked.simulation.profile,
            engine=replace(asked.simulation.engine, host_blocks=self.host_blocks),
        )
        workload = replace(asked.workload, forks=self.forks, subagents=self.subagents)
        return replace(asked, workload=workload, simulation=simulation)


@dataclass(frozen=True)
class Run:
    """What a trial of a cell recorded."""

    records: list[RequestRecord]  # in the order in which requests ended
    busy_s: dict[str, float]  # by instance
    sharing: list[RequestRecord]  # those whose prefix is shared, or whose session was moved by a drain
    # Time from an instance's joining until it has answered its share of all requests since; 0: none joined.
    filled_s: float = 0.0


def run_cell(cell: FetchCell, seed: int, *, transfers: bool) -> Run:
    """Run a cell under a seed."""
    asked = cell.made(transfers=transfers)
    simulator = ChangingFleet(drawn(asked.workload, seed), replace(asked.simulation, seed=seed), cell)
    records = simulator.run()
    if cell.drains_at_s is not None:
        sharing = _moved(records, simulator.changed, cell.drains_at_s)
    else:
        sharing = [record for record in records if MARK in record.session or READER in record.session]
    filled_s = 0.0
    if cell.joins_at_s is not None:
        filled_s = _filled_s(records, simulator.changed, cell.joins_at_s, cell.cell.instances + 1)
    return Run(records, simulator.busy_s, sharing, filled_s)


class ChangingFleet(ResizableSimulator):
    """A simulation in which an instance joins, or is drained. `changed` is its name."""

    def __init__(self, sessions: Sequence[Session], config: SimulationConfig, cell: FetchCell) -> None:
        super().__init__(iter(sessions), config, config.instances + (cell.joins_at_s is not None))
        self.changed = ""
        if cell.joins_at_s is not None:
            self._event_queue.schedule(cell.joins_at_s, self._join)
        if cell.drains_at_s is not None:
            self._event_queue.schedule(cell.drains_at_s, self._drain)

    def _join(self, now: float) -> None:
        self.changed = "joined"
        self.join(self.changed, now)

    def _drain(self, now: float) -> None:
        self.changed = max(self._fleet.instances, key=self.router.affinity.sessions_of)
        self.routers.deliver_to_all(ev.DrainsChanged({self.changed: self._fleet.incarnation(self.changed)}), now)


def _moved(records: Sequence[RequestRecord], drained: str, at_s: float) -> list[RequestRecord]:
    """Return the first requests after a drain of the sessions whose last requests before it the drained instance answered."""
    last: dict[str, RequestRecord] = {}
    found: list[RequestRecord] = []
    for record in sorted(records, key=lambda record: record.t_send):
        before = last.get(record.session)
        if before is not None and before.t_send < at_s <= record.t_send and before.instance == drained:
            found.append(record)
        last[record.session] = record
    return found


def _filled_s(records: Sequence[RequestRecord], joined: str, at_s: float, instances: int) -> float:
    """Return the time from an instance's joining until it has answered its share of the requests that were sent since then; to
    the last of them if it never has."""
    sent = sorted(
        (record.t_send + record.ttft_s, record.instance == joined)
        for record in records
        if record.t_send >= at_s and record.ttft_s is not None
    )
    own = 0
    for number, (answered_at, there) in enumerate(sent, 1):
        own += there
        if number >= instances and own * instances >= number:
            return answered_at - at_s
    return sent[-1][0] - at_s if sent else 0.0


def cells(traces: Path) -> dict[str, FetchCell]:
    """Return the cells by name; those of missing traces are left out."""
    some, wide, agentic = Forks(0.3), Forks(0.15, least=20, most=40), Generated(60, AGENTIC)
    documents = Mixed((Generated(60, AGENTIC), Documents()))
    # A branch's length is not published. With this one, 43 of them that all wait for one instance take the 11.2 s that were.
    branches = Forks(1.0, least=43, most=43, mean_turns=1.0, task_tokens=6_000.0, spread=0.3)
    found = {
        "generated, forks": FetchCell(DefaultCell("", agentic, 0.5), some),
        "generated, forks, transfers share links": FetchCell(
            DefaultCell("", agentic, 0.5), some, one_transfer_at_a_time=True
        ),
        "a fan-out of 43 on 32 instances": FetchCell(
            DefaultCell("", Parents(), 1.0, instances=32, kv_blocks=76_000),
            branches,
            profile=GPT_OSS,
            policy="foresight",
        ),
        "documents of 64k tokens": FetchCell(DefaultCell("", documents, 0.5)),
        "sub-agents that share 8k tokens": FetchCell(DefaultCell("", agentic, 0.5), subagents=Subagents(0.5)),
    }
    recorded = Recorded(traces / FILES[REAL], 137)
    if not recorded.file.exists():
        return found
    full = DefaultCell("", recorded, 1.0)
    return {
        "recorded, light": FetchCell(DefaultCell("", recorded, 0.5)),
        "recorded, full": FetchCell(full),
        "recorded, saturated": FetchCell(DefaultCell("", recorded, 1.25)),
        "recorded, full, threshold": FetchCell(DefaultCell("", recorded, 1.0, threshold=THRESHOLD)),
        "recorded, full, host memory": FetchCell(full, host_blocks=62_500),
        "recorded, an instance joins": FetchCell(DefaultCell("", recorded, 1.25), joins_at_s=120.0),
        "recorded, an instance is drained": FetchCell(full, drains_at_s=150.0),
        "recorded, a third forks to 2 to 40": FetchCell(DefaultCell("", recorded, 0.4), some),
        "recorded, 15 % fork to 20 to 40": FetchCell(DefaultCell("", recorded, 0.3), wide),
        **found,
    }
