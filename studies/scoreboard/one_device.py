"""Part c of `python -m bench gpu`: routers in front of several small engines that share one device, in paired rounds.

Each trial has a router of its own and empty caches; the engines run on. Trials are stored, and a run that is ended for want of
time goes on with those that are missing. The engines share the device's time, so that a router which balances their load gains
less here than on a device for each: what can be compared is how often they find a prompt's prefix, and what follows from that.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path

import msgspec

from bench.figures import Figure
from bench.gpu.device import CPU, CUDA, SMALLEST, fleet_of, make_shape
from bench.gpu.part import PartRun, run_part
from bench.gpu.shapes import QWEN3
from bench.rivals.contenders import OWN, Contender, contenders
from bench.rivals.engines import Fleet
from bench.rivals.environments import NotRunnable
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.synthetic_trace import SMALL, generate, shape_with
from pointsman_lab.workload.traces import TraceRequest, by_session
from studies.scoreboard.board import Cell, StoredTrial
from studies.scoreboard.comparison import HITS, SESSION, TTFT, Column, Comparison
from studies.scoreboard.fleet import reset_caches
from studies.scoreboard.traffic import Draw, Load, PreparedChats, Target, send
from studies.scoreboard.trial import run_trial
from studies.stored_trials import append_trial, read_trials
from tests.support.engines.servers import running_engines

NAMES = (
    *("pointsman auto", "pointsman foresight", "pointsman unified", "vllm-router kv_aware", "vllm-router cache_aware"),
    *("sglang-router cache_aware", "nginx least_conn"),
)
# In the form that tests run: no program of others but nginx, which may be absent.
FEW = ("pointsman auto", "nginx least_conn")
AGENTIC, FAN_OUT = "agentic", "fan-out"
COLUMNS = (*TTFT[:2], SESSION, HITS)
CONTEXT = {CUDA: 16_384, CPU: 4_096}
KV_TOKENS = {CUDA: (65_536, 32_768, 20_480), CPU: (24_576,)}
BLOCK = {CUDA: 16, CPU: 32}
SHAPES = {
    CUDA: shape_with(SMALL, {"system_tokens": 1_024, "context_tokens": 4_000, "growth_tokens": 700, "output_tokens": 80,
                             "tool_s": 1.5, "max_tokens": 15_000}),
    CPU: shape_with(SMALL, {"system_tokens": 512, "context_tokens": 600, "growth_tokens": 120, "output_tokens": 16,
                            "mean_turns": 3.0, "tool_s": 0.5, "max_tokens": 3_500, "block_size": 64}),
}  # fmt: skip
# Sessions of an agentic draw for each engine, and s in which they start.
SESSIONS, SPAN_S = {CUDA: 8, CPU: 3}, {CUDA: 15.0, CPU: 5.0}
# A fan-out: so many parents for each engine, each with so many children that share its prompt of so many tokens.
PARENTS, CHILDREN, SHARED = {CUDA: 3, CPU: 1}, {CUDA: 8, CPU: 4}, {CUDA: 6_144, CPU: 1_024}
# A parent has this time before its children are sent, s.
LEAD_S = {CUDA: 1.0, CPU: 2.0}
ROUNDS = {CUDA: 5, CPU: 1}
TRIAL_S = 90.0


def one_device(run: PartRun) -> bool:
    """Run the trials that are missing; return whether all were run."""
    if not run.vllm:
        raise SystemExit("this part needs vLLM")
    kind, trials = run.device.kind, run.state / "trials.jsonl"
    plan = run.device.plan(run.device.sizes.fleet, KV_TOKENS[kind], QWEN3[:1])
    model = make_shape(run.folder / "model", plan.shape)
    specs = [
        run.device.spec(
            f"vllm-{number}", plan, CONTEXT[kind], block_size=BLOCK[kind], extra_args=("--enable-scale-out",),
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for number in range(plan.engines)
    ]  # fmt: skip
    names = FEW if run.device.sizes is SMALLEST else NAMES
    among = sorted((it for it in contenders() if it.name in names), key=lambda it: names.index(it.name))
    complete = False
    with run.device.ready(run.folder), running_engines(specs, model, run.folder) as engines:
        run.add(
            Figure("engines", len(engines), "", None, f"{plan.shape.name}, KV cache for {plan.kv_tokens:,} tokens each")
        )
        complete = _rounds(run, fleet_of(engines), trials, among)
    for cell in _cells(kind, plan.engines):
        run.add(*figures(Comparison(cell, read_trials(trials, StoredTrial))))
    return complete


def _cells(kind: str, engines: int) -> list[Cell]:
    agentic = Load(AGENTIC, SPAN_S[kind], SESSIONS[kind] * engines)
    fan_out = Load(FAN_OUT, SPAN_S[kind], PARENTS[kind] * engines)
    return [
        Cell(AGENTIC, "coding agents", agentic, count=engines),
        Cell(FAN_OUT, "prompts that fork", fan_out, count=engines),
    ]


def _rounds(run: PartRun, fleet: Fleet, trials: Path, among: Sequence[Contender]) -> bool:
    kind = run.device.kind
    for number in range(1, ROUNDS[kind] + 1):
        for cell in _cells(kind, len(fleet.engines)):
            have = {
                (it.contender, it.round)
                for it in read_trials(trials, StoredTrial)
                if it.cell == cell.name and not it.problem
            }
            unable = {it.contender for it in read_trials(trials, StoredTrial) if it.problem}
            # Each round begins with another one.
            turn = number % len(among)
            missing = [
                it for it in (*among[turn:], *among[:turn]) if (it.name, number) not in have and it.name not in unable
            ]
            drawn = fan_out(kind, cell.load, number) if cell.name == FAN_OUT else agentic(kind, cell.load, number)
            chats = PreparedChats(drawn.sessions, fleet.words)
            for contender in missing:
                if run.left_s() < TRIAL_S:
                    return False
                append_trial(trials, _trial(run, fleet, contender, cell, number, drawn, chats))
    return True


def _trial(
    run: PartRun, fleet: Fleet, contender: Contender, cell: Cell, number: int, drawn: Draw, chats: PreparedChats
) -> StoredTrial:
    made = partial(StoredTrial, cell=cell.name, contender=contender.name, version=contender.version, round=number)
    timing = "trace" if cell.name == FAN_OUT else "think"

    def send_all(url: str) -> list[RequestRecord]:
        target = Target(url, fleet.model, timing, 1.0)
        return asyncio.run(send(drawn, chats, target, min(TRIAL_S, run.left_s())))

    try:
        contender.check()
        reset_caches(fleet)
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            measures = run_trial(contender, fleet, Path(folder), send_all)
    except NotRunnable as error:
        return made(problem=str(error))
    print(f"{cell.name} {number} {contender.name}: {measures.requests} requests, {measures.failed} failed", flush=True)
    return made(source=drawn.source, measures=measures)


def agentic(kind: str, load: Load, number: int) -> Draw:
    """Return the sessions of a round: turns of coding agents, which start evenly drawn over the span."""
    rng = random.Random(f"{kind} {number}")
    sessions = list(by_session(generate(load.sessions, 1.0, seed=4_600 + number, shape=SHAPES[kind])).values())[
        : load.sessions
    ]
    starts = sorted(rng.uniform(0, load.span_s) for _ in sessions)
    return Draw([_moved(turns, start * 1e3) for turns, start in zip(sessions, starts, strict=True)], "generated")


def _moved(turns: Sequence[TraceRequest], start_ms: float) -> list[TraceRequest]:
    shift = start_ms - turns[0].timestamp_ms
    return [msgspec.structs.replace(turn, timestamp_ms=turn.timestamp_ms + shift) for turn in turns]


def fan_out(kind: str, load: Load, number: int) -> Draw:
    """Return the requests of a round: parents, and LEAD_S later the children of each all at once, whose prompts begin with its
    whole prompt. Each is a session of one turn."""
    rng = random.Random(f"fan-out {kind} {number}")
    block, ids = SHAPES[kind].block_size, count(number * 1_000_000)
    sessions = []
    for parent in range(load.sessions):
        shared = tuple(next(ids) for _ in range(SHARED[kind] // block))
        begin_ms = 1e3 * rng.uniform(0, load.span_s)
        for child in range(CHILDREN[kind] + 1):
            own = tuple(next(ids) for _ in range(rng.randint(1, 3))) if child else ()
            sessions.append(
                [
                    TraceRequest(
                        timestamp_ms=begin_ms + (1e3 * LEAD_S[kind] if child else 0.0),
                        session_id=f"{number}-{parent}-{child}",
                        turn=1,
                        input_length=block * len(shared + own),
                        output_length=16,
                        hash_ids=shared + own,
                        block_size=block,
                    )
                ]
            )
    return Draw(sorted(sessions, key=lambda turns: turns[0].timestamp_ms), "generated")


def figures(compared: Comparison) -> list[Figure]:
    """Return the figures of a cell: each measure of each router beside that of OWN in the same rounds."""
    names = sorted(compared.trials, key=NAMES.index)
    measured = [_figure(compared, column, name) for name in names for column in COLUMNS]
    measured += [
        Figure(f"{compared.cell.name} / {name} / {what}", value, unit)
        for name in names
        for what, value, unit in (
            ("rounds", len(compared.trials[name]), ""),
            ("failed", 100 * compared.failed_share(name), "%"),
        )
    ]
    absent = (
        Figure(f"{compared.cell.name}, {name}", 0.0, "trials", None, f"it did not run: {problem}")
        for name, problem in compared.problems.items()
    )
    return [*filter(None, measured), *absent]


def _figure(compared: Comparison, column: Column, name: str) -> Figure | None:
    # A fan-out's sessions are single requests.
    if column is SESSION and compared.cell.name == FAN_OUT:
        return None
    entry = compared.entry(name, column)
    if entry.mean is None:
        return None
    metric = f"{compared.cell.name} / {name} / {column.name}"
    if name == OWN or entry.ratio is None:
        return Figure(metric, entry.mean, column.unit)
    interval = f"{entry.low:.2f} to {entry.high:.2f}" if isfinite(entry.high) else ""
    # The ratio is that of the pairs of rounds, not of the means.
    return Figure(metric, entry.mean, column.unit, entry.mean / entry.ratio, interval)


if __name__ == "__main__":
    run_part(one_device)
