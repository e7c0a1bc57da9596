"""`pointsman agree`: serves the same draws of sessions under several policies live and simulated, and compares the differences.

It starts a fleet on this machine: emulated engines, or the given engines, which must be idle and alike, and a control plane, with
a new router for each run, which has learned as little as a simulated one. Each run is stored when it ends. A command that was
interrupted, or that is given more policies or rounds, makes the missing runs. A run is simulated with the costs that were
measured right before and after its round; the step costs of emulated engines are known.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.io.settings import Entries, Numbers
from pointsman_lab.engine.cost_fit import FitError
from pointsman_lab.engine.cost_profile import ProfileError, load_profile
from pointsman_lab.live.agreement import LIVE, SIMULATED, Case, StoredRun, page, rounds, run_measures
from pointsman_lab.live.engine_client import EngineError
from pointsman_lab.live.fleet_costs import (
    FleetCosts,
    MeasureSettings,
    costs_of,
    engine_config,
    measure_fleet,
    together,
    with_overhead,
)
from pointsman_lab.live.local_fleet import ChildProcesses, LocalFleetError, LocalPlane, start_engines
from pointsman_lab.live.paired_runs import WITH_ADMISSION, Draws, Scale, Variant, run_live, simulate
from pointsman_lab.live.profile_command import SHORTEST, Measurements
from pointsman_lab.live.replay_command import ReplayError
from pointsman_lab.report.terminal import make_console
from pointsman_lab.workload.traces import TraceError

# Number of times that a disturbed run is made again before it is stored.
MAX_REPETITIONS = 3
# Fields that may differ between two commands that store their runs in one folder.
FREE_FIELDS = {"policies", "rates", "rounds", "first_seed", "engines", "admission_bound_s", "max_wake_delay_s", "out"}


class AgreeSettings(MeasureSettings):
    """Settings of one comparison. The defaults of the emulated engines make them slow, so that the machine's speed has little
    effect on the runs."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_AGREE_")

    engines: Entries = Field([], description="base URL of each engine (repeat); default: emulated engines are started")
    emulated: int = Field(4, ge=1, le=64, description="number of emulated engines")
    profile: Path = Field(Path("reference"), description="cost profile of the emulated engines")
    speedup: float = Field(0.12, gt=0, description="factor on the speed of the emulated engines")
    kv_blocks: int = Field(520, ge=1, description="KV blocks of 16 tokens of an emulated engine")
    max_model_len: int = Field(
        8_320, ge=2, description="maximum tokens of prompt and answer together on an emulated engine"
    )
    # A machine that others use, too, delays some of the probes.
    profile_repeats: int = Field(4, ge=1, description="number of repetitions of each probe per measurement")
    policies: Entries = Field(
        ["unified", "foresight", f"foresight{WITH_ADMISSION}"],
        description=f"compared policies (repeat); NAME{WITH_ADMISSION}: with session admission",
    )
    admission_bound_s: float = Field(
        30.0, gt=0, description="maximum time that a new session is parked, in s, with session admission"
    )
    rates: Numbers = Field([0.4, 3.0], description="factors on the rate of session starts, one for each load")
    rounds: int = Field(5, ge=1, description="number of draws of each load")
    first_seed: int = Field(0, ge=0, description="seed of the first draw")
    trace: Path | None = Field(None, description="trace file; default: new synthetic sessions for each draw")
    sessions: int = Field(24, ge=0, description="number of sessions; of a trace the first ones, 0: all")
    span_s: float = Field(22.0, gt=0, description="time in which synthetic sessions start, in s, at a rate of 1")
    token_scale: float = Field(0.25, gt=0, description="factor on prompt and answer lengths")
    time_scale: float = Field(0.25, gt=0, description="factor on the trace's times, including those between turns")
    max_wake_delay_s: float = Field(
        0.01,
        gt=0,
        description="mean delay of a sleeping task, in s, above which a live run counts as disturbed by other processes of the "
        "machine, and is made again",
    )
    out: Path = Field(Path("runs/agreement"), description="folder of the runs and of agreement.md")

    @property
    def draws(self) -> Draws:
        """The source of the sessions."""
        return Draws(self.trace, self.sessions, self.span_s)

    @property
    def scale(self) -> Scale:
        """The factors on lengths and times."""
        return Scale(self.token_scale, self.time_scale)

    @property
    def instances(self) -> int:
        """Number of engines."""
        return len(self.engines) or self.emulated


class AgreeError(RuntimeError):
    """The comparison cannot be made; the message says why."""


def run(settings: AgreeSettings) -> None:
    """Make the missing runs and write the page. Exits with 2 if a run cannot be made, with 130 on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = make_console()
    try:
        _Comparison(settings, console).run()
    except (
        AgreeError,
        EngineError,
        FitError,
        LocalFleetError,
        OSError,
        ProfileError,
        ReplayError,
        TraceError,
    ) as error:
        typer.echo(f"pointsman agree: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(f"{settings.out / 'agreement.md'}: written", highlight=False)


class _Comparison:
    """The runs of one folder, and what is missing of them."""

    def __init__(self, settings: AgreeSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._file = settings.out / "runs.jsonl"
        settings.out.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        self._runs = _read_runs(self._file)

    def run(self) -> None:
        settings = self._settings
        seeds = range(settings.first_seed, settings.first_seed + settings.rounds)
        policies, rates = dict.fromkeys(settings.policies), dict.fromkeys(settings.rates)
        planned = list(rounds(list(policies), list(rates), seeds))
        missing = [[case for case in cases if self._stored(case, LIVE) is None] for cases in planned]
        if any(missing):
            with self._engines() as engines, LocalPlane(settings.out / "plane", engines) as plane:
                plane.new_router([], self._variant(settings.policies[0]).environment)
                before = self._measure(engines, plane.url)
                for cases in missing:
                    if cases:
                        before = self._round(cases, plane, engines, before)
        for case in [case for cases in planned for case in cases]:
            self._simulate(case)
        self._write_page()

    def _round(
        self, cases: Sequence[Case], plane: LocalPlane, engines: Sequence[str], before: Measurements
    ) -> Measurements:
        """Make the live runs of a round and simulate them; return the measurements after it."""
        number = 1 + max((run.costs for run in self._runs), default=0)
        self._save_costs(number, before)
        for case in cases:
            self._live(case, number, plane)
        after = self._measure(engines, plane.url, before)
        self._save_costs(number, together([before, after]))
        for case in cases:
            self._simulate(case)
        self._write_page()
        return after

    def _live(self, case: Case, costs: int, plane: LocalPlane) -> None:
        settings = self._settings
        for attempt in range(1 + MAX_REPETITIONS):
            # Another attempt has other prompts, which no engine has cached.
            requests = settings.draws.draw(case.seed, case.rate, case.number + attempt)
            plane.new_router([], self._variant(case.policy).environment)
            sending = run_live(
                requests, settings.out / case.name, plane.url, plane.router, settings.tokenizer, settings.scale
            )
            records, delay_s = asyncio.run(sending)
            if delay_s <= settings.max_wake_delay_s:
                break
            self._console.print(
                f"{case.name} was disturbed: a task woke up {delay_s * 1e3:.0f} ms late", highlight=False
            )
        self._store(StoredRun(LIVE, case.policy, case.rate, case.seed, run_measures(records), costs, delay_s))

    def _simulate(self, case: Case) -> None:
        """Simulate a case that has run live and is not simulated yet."""
        live = self._stored(case, LIVE)
        if live is None or self._stored(case, SIMULATED) is not None:
            return
        settings = self._settings
        requests = settings.draws.draw(case.seed, case.rate, case.number)
        costs = self._costs(live.costs)
        variant = self._variant(case.policy)
        records = simulate(requests, case.seed, variant, settings.instances, costs, settings.tokenizer, settings.scale)
        self._store(StoredRun(SIMULATED, case.policy, case.rate, case.seed, run_measures(records), live.costs))

    def _variant(self, name: str) -> Variant:
        return Variant.of(name, self._settings.admission_bound_s)

    # ---- engines and their costs ----

    @contextmanager
    def _engines(self) -> Iterator[list[str]]:
        """Yield the base URLs of the engines, which are started if none are given."""
        settings = self._settings
        if settings.engines:
            yield list(settings.engines)
            return
        flags = {
            "--profile": settings.profile,
            "--speedup": settings.speedup,
            "--kv-blocks": settings.kv_blocks,
            "--max-model-len": settings.max_model_len,
            "--max-num-batched-tokens": settings.max_num_batched_tokens,
            "--tokenizer": settings.tokenizer,
        }
        with ChildProcesses(settings.out) as processes:
            yield start_engines(processes, settings.emulated, [str(part) for flag in flags.items() for part in flag])

    def _measure(self, engines: Sequence[str], url: str, before: Measurements | None = None) -> Measurements:
        """Measure the engines and the request overhead; of emulated engines, whose costs are known, the overhead alone."""
        settings = self._settings
        if settings.engines:
            chunk = before.engine.get("max_num_batched_tokens", 0) if before else 0
            return asyncio.run(measure_fleet(settings, engines, url, chunk))
        lengths = (SHORTEST, settings.profile_longest // 4, settings.profile_longest // 2)
        known = Measurements(
            engine={
                "block_size": KEY_TOKENS,
                "kv_blocks": settings.kv_blocks,
                "max_model_len": settings.max_model_len,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
            }
        )
        return asyncio.run(with_overhead(settings, known, engines, url, lengths))

    def _save_costs(self, number: int, measured: Measurements) -> None:
        (self._settings.out / f"costs-{number}.json").write_bytes(msgspec.json.encode(measured))

    def _costs(self, number: int) -> FleetCosts:
        settings = self._settings
        measured = msgspec.json.decode((settings.out / f"costs-{number}.json").read_bytes(), type=Measurements)
        if settings.engines:
            return costs_of(settings, measured)
        profile = load_profile(settings.profile).slowed(1 / settings.speedup)
        return FleetCosts(engine_config(settings, measured), profile, *measured.frontend_s)

    # ---- what is stored ----

    def _check_settings(self) -> None:
        """Store the settings. Raises AgreeError if the folder has runs of other settings."""
        plan = self._settings.model_dump(mode="json", exclude=FREE_FIELDS)
        plan["instances"] = self._settings.instances
        file = self._settings.out / "settings.json"
        if file.exists() and (stored := msgspec.json.decode(file.read_bytes())) != plan:
            other = sorted(name for name in plan.keys() | stored.keys() if plan.get(name) != stored.get(name))
            raise AgreeError(f"{self._settings.out} has runs with other settings: {', '.join(other)}")
        file.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2))

    def _stored(self, case: Case, kind: str) -> StoredRun | None:
        return next((run for run in self._runs if (run.case, run.kind) == (case, kind)), None)

    def _store(self, stored: StoredRun) -> None:
        self._runs.append(stored)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(stored) + b"\n")
        measures = stored.measures
        self._console.print(
            f"{stored.case.name} {stored.kind}: TTFT mean {measures.get('ttft_mean_s', 0):.2f} s, session time mean "
            f"{measures.get('session_mean_s', 0):.1f} s, {measures.get('failed', 0):.0f} requests failed",
            highlight=False,
        )

    def _write_page(self) -> None:
        (self._settings.out / "agreement.md").write_text(page(self._runs))


def _read_runs(file: Path) -> list[StoredRun]:
    """Return the stored runs. An incomplete last line, as after a kill, is removed."""
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        file.write_bytes(whole)
    return [msgspec.json.decode(line, type=StoredRun) for line in whole.splitlines()]
