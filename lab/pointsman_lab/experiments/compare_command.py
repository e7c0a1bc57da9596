"""`pointsman compare`: simulates policies, settings and loads on the same draws of the workload, and compares them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import typer
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from rich.progress import Progress

from pointsman_lab.experiments.knee import Knee, knees
from pointsman_lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman_lab.experiments.simulate_command import RunSettings, cell_of
from pointsman_lab.experiments.tables import print_comparisons, print_knees
from pointsman_lab.experiments.trials import Cell, MetricComparison, Trial, compare, run_cells
from pointsman_lab.report.bundle import git_commit
from pointsman_lab.report.terminal import make_console, make_progress
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_lab.workload.session_starts import Starts
from pointsman_router.core.policy.base import SettingError
from pointsman_router.core.policy.registry import DEFAULT_POLICY, parsed

DEFAULT_BASELINE = "unified"
# SWEEP_STEP: number of rates that a sweep adds at a time. SWEEP_RATES: number of rates from which a sweep adds no more; the 20th
# rate is 2^9.5 times the first.
SWEEP_STEP, SWEEP_RATES = 4, 20


class CompareSettings(RunSettings):
    """One comparison: every policy under every variation of the run's settings, each under every seed."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_COMPARE_")

    config: Path | None = Field(None, description="TOML file of these settings under the same names; flags override it")
    policies: list[str] = Field(
        ["round_robin", "lmetric", "unified", DEFAULT_POLICY, FLOOR],
        description="NAME or NAME:SETTING=VALUE,...; repeat the flag for each. floor: lower bound without queues, every block "
        "cached on every instance; pooled: the same with one shared cache as large as all instances' together",
    )
    baseline: str = Field(
        "",
        description="policy that the others are compared to, written as in policies; default: unified, else the first",
    )
    vary: list[str] = Field(
        [], description="FIELD=VALUE,...: a setting of the run and the values to run it with, e.g. rate=0.5,1,2"
    )
    sweep: bool = Field(
        False, description="raise the rate from `rate` by factors of sqrt(2) until every policy is saturated"
    )
    seeds: int = Field(
        5, ge=1, description="number of runs per policy and variation, each with its own seed; at least 5 are advised"
    )
    first_seed: int = Field(0, ge=0, description="seed of the first run")
    starts: Starts = Field("jitter", description=RunSettings.model_fields["starts"].description)
    processes: int = Field(0, ge=0, description="number of processes; 0: one for each core")
    bundles: bool = Field(False, description="also write a bundle of every run")
    out: Path = Field(Path("runs/compare"), description="folder of results.json and table.txt")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: flags, then the TOML file that they name, then the environment."""
        assert isinstance(init_settings, InitSettingsSource)
        path = init_settings.init_kwargs.get("config")
        sources = [init_settings, env_settings]
        if path is not None:
            sources.insert(1, InitSettingsSource(settings_cls, _read_toml(Path(path))))
        return tuple(sources)


def run(settings: CompareSettings) -> None:
    """Run the trials, then print and write their comparison. Exits with 2 if the settings cannot be run, and with 130 after
    Ctrl-C; after Ctrl-C the finished trials are still printed and written."""
    try:
        cells = cells_of(settings)
        baseline = _baseline(settings, cells)
    except ValueError as error:
        typer.echo(f"pointsman compare: {error}", err=True)
        raise typer.Exit(2) from None
    console = make_console()
    with make_progress(console) as progress:
        try:
            trials = _run_batch(settings, cells, progress)
            while (
                settings.sweep and len(trials) == len(cells) * settings.seeds and (rates := _next_rates(cells, trials))
            ):
                more = cells_of(settings, rates)
                cells += more
                trials += _run_batch(settings, more, progress)
        except ValueError as error:
            typer.echo(f"pointsman compare: {error}", err=True)
            raise typer.Exit(2) from None
    comparisons, found = compare(trials, baseline), knees(cells, trials)
    settings.out.mkdir(parents=True, exist_ok=True)
    write_results(settings.out / "results.json", settings.model_dump(mode="json"), trials, comparisons, found)
    with (settings.out / "table.txt").open("w") as file:
        for where in (console, make_console(file)):
            print_comparisons(where, comparisons, baseline)
            if settings.sweep or found:
                print_knees(where, found)
    console.print(_assumptions(settings), highlight=False)
    missing = len(cells) * settings.seeds - len(trials)
    if missing:
        console.print(f"[bold]interrupted[/bold]: {missing} of {len(cells) * settings.seeds} trials were not run")
        raise typer.Exit(130)


def _assumptions(settings: CompareSettings) -> str:
    """Return what the figures of a run assume that those of `pointsman shadow read` on the same log do not."""
    starts = (
        f"sessions start as by starts={settings.starts}" if settings.starts != "trace" else "sessions start as recorded"
    )
    return (
        f"Policies against each other, on {settings.instances} modelled instances: {starts}, and a turn waits for the answer "
        "before it. `pointsman shadow read` compares one policy with where a log's requests really went: docs/compare.md"
    )


def _run_batch(settings: CompareSettings, cells: Sequence[Cell], progress: Progress) -> list[Trial]:
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    task = progress.add_task("trials", total=len(cells) * len(seeds))
    bundles = settings.out / "bundles" if settings.bundles else None
    return run_cells(cells, seeds, settings.processes, lambda _: progress.advance(task), bundles)


def _next_rates(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[float]:
    """Return the rates that a sweep tries next; empty if every policy is saturated or SWEEP_RATES are reached."""
    rates = sorted({cell.workload.arrivals.rate for cell in cells})
    if len(rates) >= SWEEP_RATES or all(knee.saturated for knee in knees(cells, trials) if knee.policy not in BOUNDS):
        return []
    return [rates[0] * 2 ** ((len(rates) + step) / 2) for step in range(SWEEP_STEP)]


def cells_of(settings: CompareSettings, rates: Sequence[float] = ()) -> list[Cell]:
    """Return a cell for every policy under every variation; a sweep takes `rates`, or its first SWEEP_STEP rates. Raises
    ValueError, which names the field, for settings that cannot be run."""
    if settings.sweep:
        if any(text.startswith("rate=") for text in settings.vary):
            raise ValueError("vary: rate cannot be varied in a sweep, which sets it")
        rates = rates or [settings.rate * 2 ** (step / 2) for step in range(SWEEP_STEP)]
        settings = settings.model_copy(
            update={"vary": [*settings.vary, "rate=" + ",".join(f"{rate:.5g}" for rate in rates)]}
        )
    policies = [(text, *_policy(text)) for text in settings.policies]
    if len({text for text, _, _ in policies}) < len(policies):
        raise ValueError("policies: a policy is named twice")
    cells = []
    for load, varied in _variations(settings):
        cells += [cell_of(varied, name, wanted, text, load) for text, name, wanted in policies]
    return cells


def write_results(
    path: Path,
    config: dict[str, Any],
    trials: Sequence[Trial],
    comparisons: Sequence[MetricComparison],
    found: Sequence[Knee],
) -> None:
    """Write all measures, comparisons and knees as one JSON object."""
    results = {
        "config": config,
        "git_commit": git_commit(),
        "trials": [asdict(trial) for trial in trials],
        "comparisons": [asdict(comparison) | {"verdict": comparison.verdict} for comparison in comparisons],
        "knees": [asdict(knee) | {"rate": knee.rate, "inside": knee.inside} for knee in found],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _baseline(settings: CompareSettings, cells: Sequence[Cell]) -> str:
    names = [cell.policy for cell in cells]
    wanted = settings.baseline or (DEFAULT_BASELINE if DEFAULT_BASELINE in names else names[0])
    if wanted not in names:
        raise ValueError(f"baseline: {wanted} is not among the policies {', '.join(dict.fromkeys(names))}")
    return wanted


def _policy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME:SETTING=VALUE,... into name and settings. Raises ValueError for a policy or setting that does not exist."""
    try:
        name, wanted = parsed(text)
        if name in BOUNDS:
            if wanted:
                raise ValueError(f"policies: {name} has no settings")
            return name, wanted
        make_policy(name, wanted)
    except SettingError as error:
        raise ValueError(f"policies: {text}: {error}") from None
    return name, wanted


def _variations(settings: CompareSettings) -> list[tuple[str, RunSettings]]:
    """Return the settings of every combination of the varied fields, each with its label. Raises ValueError for a bad field or
    value."""
    base = {name: getattr(settings, name) for name in RunSettings.model_fields}
    varied: dict[str, list[str]] = {}
    for text in settings.vary:
        field, equals, values = text.partition("=")
        if field not in RunSettings.model_fields:
            raise ValueError(f"vary: there is no field {field!r}; the fields are {', '.join(RunSettings.model_fields)}")
        if not equals or not all(values.split(",")):
            raise ValueError(f"vary: {text!r} is not FIELD=VALUE,...")
        varied.setdefault(field, []).extend(values.split(","))
    found = []
    for chosen in product(*varied.values()):
        changes = dict(zip(varied, chosen, strict=True))
        label = ", ".join(f"{field} {value}" for field, value in changes.items())
        try:
            found.append((label, RunSettings(**base | changes)))
        except ValidationError as invalid:
            wrong = invalid.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"vary: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"config: {path}: {error}") from error
