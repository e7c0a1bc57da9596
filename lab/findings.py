"""`pointsman findings`: the trials behind docs/findings.md, kept as they end, and the document made from what is there.

Loads are sessions' starts per time; the trace's own distances within a session stay. What a trial came to is a line of a file, so
that an interrupted run goes on where it was, and the document can be made again without running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from lab.bundle import git_commit
from lab.calibration import Comparison, from_plain
from lab.console import make_console, make_progress
from lab.draws import Arrivals
from lab.engine_events import EngineConfig
from lab.experiments import Cell, Trial, Workload, run_cells
from lab.findings_elsewhere import ELSEWHERE, ELSEWHERE_POLICIES, ELSEWHERE_TRIALS
from lab.findings_figures import BASE, OURS
from lab.findings_text import render
from lab.floor import BOUNDS
from lab.generate import AGENTIC, shape_with
from lab.measures import Measures
from lab.profile import Profile
from lab.simulate import MADE_UP_SESSIONS, made_up
from lab.simulation import Simulation
from lab.traces import TraceRequest
from services.router.policy.registry import POLICIES, make_policy

REAL = "agentic"
GENERATED = "generated"
CHAT = "chat"
FILES = {REAL: "agentic_coding_1214.jsonl.gz", CHAT: "mooncake_conversation.jsonl.gz"}
# Beside the repository where the project is developed.
TRACES = Path(__file__).parents[2] / "shared" / "traces"
THRESHOLD = 4_096
# As an API server's round trip and a fast tokenizer take them.
PLACEMENT_S, TOKENISE_TOKEN_S = 0.002, 1e-6


@dataclass(frozen=True)
class Load:
    """How hard the fleet works: sessions' starts come `rate` times as fast as recorded; steps take `slow` times as long."""

    rate: float
    slow: float = 1.0
    kv_blocks: int = 31_250


LOADS = {
    "light": Load(0.5),
    "knee": Load(1.0),
    "saturated": Load(1.25),
    "slow": Load(0.35, slow=2.5, kv_blocks=17_500),
    "overloaded": Load(2.5),
}
MAIN = ("light", "knee", "saturated")
OVERLOADED = "overloaded"
CHAT_SESSIONS = 1_000
# Those that were best somewhere, and those that are widely used: run everywhere; all others under the main loads only.
CONTENDERS = ("unified", "foresight", "lpwl", "lmetric1", "additive", "elastic", "dynamo_kv", "preble")
# Other settings of policies that the claims speak of.
VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "unified (of 2.0, dw 0)": ("unified", {"overload_factor": 2.0, "decode_weight": 0.0}),
    "elastic (heuristic)": ("elastic", {"decider": "heuristic"}),
    "migrate (cache_rich)": ("migrate", {"picker": "cache_rich"}),
}
ABLATIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "without slices": ("foresight", {"slice_u": 0.0}),
    "without holding": ("foresight", {"start_u": 1e6, "express_u": 1e6}),
    "without the express lane": ("foresight", {"light_u": 0.0}),
    "without a price on leaving a cache": ("foresight", {"leave": 0.0}),
    "without a price on answers beside slices": ("foresight", {"beside": 0.0}),
    "without a price on harm to decodes": ("foresight", {"harm": 0.0, "crowd": 0.0}),
    "without a price on full KV": ("foresight", {"overflow_u": 0.0}),
    "slices five times as long": ("foresight", {"slice_u": 1.5, "slice_min_tokens": 4096.0}),
}


class FindingsSettings(BaseSettings):
    """The document and what it is made from."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_FINDINGS_")

    traces: Path = Field(TRACES, description="folder of the shared traces; those that are not there are left out")
    trials: int = Field(5, ge=1, description="trials of each cell")
    first_seed: int = Field(100, ge=0, description="the first trial's seed; the policies were tuned on others")
    quick: bool = Field(
        False, description="a tenth of each trace and few policies: shows that all works, proves nothing"
    )
    render_only: bool = Field(False, description="run nothing, make the document from what is there")
    processes: int = Field(0, ge=0, description="processes to run trials on; 0 is one for each core")
    results: Path = Field(Path("runs/findings.jsonl"), description="file of the trials; those in it are not run again")
    calibration: Path = Field(
        Path("runs/calibration/calibration.json"),
        description="what `pointsman calibrate` has left; where it is not there, the document says nothing of it",
    )
    out: Path = Field(Path("docs/findings.md"), description="the document")


class Kept(msgspec.Struct, frozen=True):
    """A line of the file of trials. `cell` has everything that the trial depends on, but its seed."""

    trace: str
    load: str
    threshold: int
    policy: str
    seed: int
    cell: str
    commit: str
    measures: Measures


@dataclass(frozen=True)
class Planned:
    """A cell of the study: where it stands in the tables, how it is run, from what `source` and under how many seeds."""

    trace: str
    load: str
    threshold: int
    policy: str
    cell: Cell
    source: str
    trials: int

    @property
    def tier(self) -> int:
        """What is run first: the goals' own policies, then others where there are most of them, then others, then elsewhere."""
        if self.trace in ELSEWHERE:
            return 3
        own = self.policy in (*BOUNDS, BASE, OURS) and self.load != OVERLOADED
        return 0 if own else 1 if self.trace == REAL and self.load in MAIN and not self.threshold else 2

    @property
    def key(self) -> str:
        """Everything that a trial depends on, but its seed."""
        asked = self.cell.simulation
        workload = self.cell.workload
        told = {
            "source": self.source,
            "arrivals": asdict(workload.arrivals),
            "sessions": workload.sessions,
            "policy": asked.policy,
            # All of them: a default that changes makes another policy.
            "settings": {} if asked.policy in BOUNDS else dict(self._settings()),
            "engine": {**asdict(asked.engine), "vocabulary": ""},
            "profile": asked.profile.nonzero,
        }
        return msgspec.json.encode(told, order="sorted").decode()

    def _settings(self) -> Mapping[str, object]:
        policy, settings = self.cell.simulation.policy, self.cell.simulation.policy_settings
        return (make_policy(policy, settings) if isinstance(policy, str) else policy).ref().settings


def run(settings: FindingsSettings) -> None:
    """Run what is missing, tier by tier, trial by trial, and write the document. Ctrl-C: of what there is."""
    cells = planned(settings)
    kept = read_kept(settings.results)
    seeds = range(settings.first_seed, settings.first_seed + settings.trials)
    if not settings.render_only:
        _run_missing(cells, kept, seeds, settings)
        kept = read_kept(settings.results)
    wanted = {(one.key, seed): one for one in cells for seed in seeds[: one.trials]}
    # Two runs into one file may both have run a trial: it is one all the same.
    trials = {(one.cell, one.seed): one for one in kept}
    found = [(wanted[at], one) for at, one in trials.items() if at in wanted]
    missing = len(wanted) - len(found)
    if not found:
        typer.echo(f"pointsman findings: no trials in {settings.results}", err=True)
        raise typer.Exit(2)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    # Where it stands is for the plan to say: names of loads and policies may have changed since, what they stand for has not.
    place = {one.key: number for number, one in enumerate(cells)}
    told = [
        msgspec.structs.replace(one, trace=cell.trace, load=cell.load, threshold=cell.threshold, policy=cell.policy)
        for cell, one in sorted(found, key=lambda pair: place[pair[0].key])
    ]
    loads = {name: asdict(load) for name, load in LOADS.items()}
    settings.out.write_text(render(told, loads, missing, settings.quick, _calibrated(settings.calibration)))
    typer.echo(f"{settings.out}: of {len(found)} trials, {missing} of those planned are missing")


def _calibrated(file: Path) -> list[tuple[str, list[Comparison]]]:
    return from_plain(msgspec.json.decode(file.read_bytes())["loads"]) if file.exists() else []


def planned(settings: FindingsSettings) -> list[Planned]:
    """All cells of the study, the most telling ones first."""
    return list(_planned(settings))


def _planned(settings: FindingsSettings) -> Iterator[Planned]:
    sources = _sources(settings)
    simple: dict[str, tuple[str, Mapping[str, object]]] = {name: (name, {}) for name in POLICIES}
    contenders = {**{name: (name, {}) for name in BOUNDS}, **{name: simple[name] for name in CONTENDERS}}
    every = {**contenders, **simple, **VARIANTS}
    if settings.quick:
        every = contenders = {name: contenders[name] for name in (*BOUNDS, "unified", "lpwl", "foresight")}
    for trace, source in sources.items():
        for name, policy in (every if trace == REAL or REAL not in sources else contenders).items():
            for load in MAIN:
                yield _cell(settings, trace, source, load, 0, name, policy)
    extra = [("slow", 0), *((load, THRESHOLD) for load in LOADS if load != OVERLOADED)]
    for name in () if settings.quick or CHAT not in sources else (*BOUNDS, BASE, OURS):
        yield _cell(settings, CHAT, sources[CHAT], OVERLOADED, 0, name, every[name])
    for trace, source in sources.items():
        if trace == CHAT:
            continue
        for load, threshold in extra[: 1 if settings.quick else None]:
            for name, policy in contenders.items():
                yield _cell(settings, trace, source, load, threshold, name, policy)
    first = next(iter(sources))
    for load in () if settings.quick else ("knee", "saturated"):
        for name, policy in ABLATIONS.items():
            yield _cell(settings, first, sources[first], load, 0, f"foresight {name}", policy)
    if not settings.quick:
        yield from _elsewhere(settings, every)


def _elsewhere(
    settings: FindingsSettings, policies: Mapping[str, tuple[str, Mapping[str, object]]]
) -> Iterator[Planned]:
    for trace, one in ELSEWHERE.items():
        shape = shape_with(one.base, one.changes)
        source = partial(made_up, one.sessions, shape)
        for load, threshold, name in product(MAIN, (0, THRESHOLD), ELSEWHERE_POLICIES):
            planned = _cell(settings, trace, source, load, threshold, name, policies[name])
            workload, simulation = planned.cell.workload, planned.cell.simulation
            arrivals = replace(workload.arrivals, rate=workload.arrivals.rate * one.rate)
            kv_blocks = int(simulation.engine.kv_blocks * one.kv)
            engine = replace(simulation.engine, kv_blocks=kv_blocks, max_num_batched_tokens=one.step_tokens)
            cell = replace(
                planned.cell,
                workload=replace(workload, arrivals=arrivals),
                simulation=replace(simulation, instances=one.instances, engine=engine),
            )
            told = f"{GENERATED} {one.sessions} {asdict(shape)}"
            yield replace(planned, cell=cell, source=told, trials=min(settings.trials, ELSEWHERE_TRIALS))


def _sources(settings: FindingsSettings) -> dict[str, Path | Callable[[int], Sequence[TraceRequest]]]:
    found: dict[str, Path | Callable[[int], Sequence[TraceRequest]]] = {}
    for trace, file in FILES.items():
        if (settings.traces / file).exists():
            found[trace] = settings.traces / file
    found[GENERATED] = partial(made_up, MADE_UP_SESSIONS, AGENTIC)
    return {name: found[name] for name in (REAL, GENERATED, CHAT) if name in found}


def _cell(
    settings: FindingsSettings,
    trace: str,
    source: Path | Callable[[int], Sequence[TraceRequest]],
    load: str,
    threshold: int,
    name: str,
    policy: tuple[str, Mapping[str, object]],
) -> Planned:
    asked = LOADS[load]
    sessions = CHAT_SESSIONS if trace == CHAT else 0
    arrivals = Arrivals("jitter" if isinstance(source, Path) else "trace", rate=asked.rate)
    cell = Cell(
        policy=name,
        load=f"{trace} {load} {threshold}",
        workload=Workload(source, arrivals, sessions=30 if settings.quick else sessions),
        simulation=Simulation(
            policy=policy[0],
            policy_settings=policy[1],
            instances=2 if settings.quick else 8,
            placement_s=PLACEMENT_S,
            tokenise_token_s=TOKENISE_TOKEN_S,
            engine=EngineConfig(
                max_model_len=200_000, kv_blocks=asked.kv_blocks, long_prefill_token_threshold=threshold
            ),
            profile=Profile().slowed(asked.slow),
        ),
    )
    told = source.name if isinstance(source, Path) else GENERATED
    return Planned(trace, load, threshold, name, cell, told, settings.trials)


def _run_missing(
    cells: Sequence[Planned], kept: Iterable[Kept], seeds: Sequence[int], settings: FindingsSettings
) -> None:
    have = {(one.cell, one.seed) for one in kept}
    commit = git_commit()
    # Trials of what matters most before fewer trials of everything, should the time not do.
    rounds = {
        (tier, seed): [
            one for one in cells if one.tier == tier and seed in seeds[: one.trials] and (one.key, seed) not in have
        ]
        for tier in sorted({one.tier for one in cells})
        for seed in seeds
    }
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    with settings.results.open("ab") as file, make_progress(make_console()) as progress:
        task = progress.add_task("trials", total=sum(map(len, rounds.values())))
        for (_, seed), missing in rounds.items():
            by_name = {(one.cell.load, one.cell.policy): one for one in missing}

            def ended(trial: Trial, by_name: Mapping[tuple[str, str], Planned] = by_name) -> None:
                one = by_name[trial.load, trial.policy]
                line = Kept(one.trace, one.load, one.threshold, one.policy, trial.seed, one.key, commit, trial.measures)
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                progress.advance(task)

            if missing and len(run_cells([one.cell for one in missing], [seed], settings.processes, ended)) < len(
                missing
            ):
                return  # Ctrl-C


def read_kept(file: Path) -> list[Kept]:
    """The trials in a file; a torn last line, as a kill leaves it, is none. Raises msgspec.DecodeError for any other."""
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Kept)
    return [decoder.decode(line) for line in lines[:-1] if line]
