"""`pointsman compare`: policies, settings, loads and seeds against each other, over the same draws."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.analysis import make_console
from lab.bundle import git_commit
from lab.compare_tables import print_comparisons
from lab.draws import Starts
from lab.experiments import Cell, Comparison, Trial, compare, run_cells
from lab.floor import FLOOR
from lab.simulate import RunSettings, cell_of
from services.router.policy.base import SettingError
from services.router.policy.registry import make_policy

DEFAULT_BASELINE = "unified"


class CompareSettings(RunSettings):
    """One comparison: every policy under every variation of the run's settings, each under every seed."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_COMPARE_")

    config: Path | None = Field(None, description="TOML file of these settings under the same names; flags win over it")
    policies: list[str] = Field(
        ["round_robin", "lmetric", "unified", FLOOR],
        description="NAME or NAME:SETTING=VALUE,...; floor is the bound that no policy can pass",
    )
    baseline: str = Field(
        "", description="what the others are compared to (as in policies; default: unified, or the first)"
    )
    vary: list[str] = Field([], description="FIELD=VALUE,...: a field of the run and what it takes, e.g. rate=0.5,1,2")
    seeds: int = Field(5, ge=1, description="trials of each cell; fewer than 5 prove little")
    first_seed: int = Field(0, ge=0, description="the first trial's seed")
    starts: Starts = Field("jitter", description=RunSettings.model_fields["starts"].description)
    processes: int = Field(0, ge=0, description="processes to run trials on; 0 is one for each core")
    bundles: bool = Field(False, description="write a bundle of every trial, too")
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
        """Flags, then the TOML file that they name, then the environment."""
        assert isinstance(init_settings, InitSettingsSource)
        path = init_settings.init_kwargs.get("config")
        sources = [init_settings, env_settings]
        if path is not None:
            sources.insert(1, InitSettingsSource(settings_cls, _read_toml(Path(path))))
        return tuple(sources)


def run(settings: CompareSettings) -> None:
    """Run the trials, print and write what they come to. Exits with 2 when they cannot be run as asked, with 130 when Ctrl-C
    ended them: what had finished is printed and written all the same."""
    try:
        cells = cells_of(settings)
        baseline = _baseline(settings, cells)
    except ValueError as error:
        typer.echo(f"pointsman compare: {error}", err=True)
        raise typer.Exit(2) from None
    console = make_console()
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("trials", total=len(cells) * len(seeds))
        try:
            trials = run_cells(
                cells,
                seeds,
                settings.processes,
                lambda _: progress.advance(task),
                settings.out / "bundles" if settings.bundles else None,
            )
        except ValueError as error:
            typer.echo(f"pointsman compare: {error}", err=True)
            raise typer.Exit(2) from None
    comparisons = compare(trials, baseline)
    settings.out.mkdir(parents=True, exist_ok=True)
    write_results(settings.out / "results.json", settings.model_dump(mode="json"), trials, comparisons)
    print_comparisons(console, comparisons, baseline)
    with (settings.out / "table.txt").open("w") as file:
        print_comparisons(make_console(file), comparisons, baseline)
    missing = len(cells) * len(seeds) - len(trials)
    if missing:
        console.print(f"[bold]interrupted[/bold]: {missing} of {len(cells) * len(seeds)} trials were not run")
        raise typer.Exit(130)


def cells_of(settings: CompareSettings) -> list[Cell]:
    """Every policy under every variation. Raises ValueError, which names the field, for what cannot be run."""
    policies = [(text, *_policy(text)) for text in settings.policies]
    if len({text for text, _, _ in policies}) < len(policies):
        raise ValueError("policies: one is named twice")
    cells = []
    for load, varied in _variations(settings):
        cells += [cell_of(varied, name, wanted, text, load) for text, name, wanted in policies]
    return cells


def write_results(
    path: Path, config: dict[str, Any], trials: Sequence[Trial], comparisons: Sequence[Comparison]
) -> None:
    """Write all measures and comparisons as one JSON object."""
    found = {
        "config": config,
        "git_commit": git_commit(),
        "trials": [asdict(trial) for trial in trials],
        "comparisons": [asdict(one) | {"verdict": one.verdict} for one in comparisons],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def _baseline(settings: CompareSettings, cells: Sequence[Cell]) -> str:
    names = [cell.policy for cell in cells]
    wanted = settings.baseline or (DEFAULT_BASELINE if DEFAULT_BASELINE in names else names[0])
    if wanted not in names:
        raise ValueError(f"baseline: {wanted} is not among the policies {', '.join(dict.fromkeys(names))}")
    return wanted


def _policy(text: str) -> tuple[str, dict[str, Any]]:
    """NAME:SETTING=VALUE,... taken apart; ValueError for a policy or setting that does not exist."""
    name, _, rest = text.partition(":")
    wanted: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"policies: {item!r} in {text!r} is not SETTING=VALUE")
        wanted[key.strip()] = _scalar(value.strip())
    if name == FLOOR:
        if wanted:
            raise ValueError(f"policies: {FLOOR} has no settings")
        return name, wanted
    try:
        make_policy(name, wanted)
    except SettingError as error:
        raise ValueError(f"policies: {text}: {error}") from None
    return name, wanted


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _variations(settings: CompareSettings) -> list[tuple[str, RunSettings]]:
    """Every combination of what varies, with its label."""
    base = {name: getattr(settings, name) for name in RunSettings.model_fields}
    varied: dict[str, list[str]] = {}
    for text in settings.vary:
        field, equals, values = text.partition("=")
        if field not in RunSettings.model_fields:
            raise ValueError(f"vary: there is no field {field!r}; there are {', '.join(RunSettings.model_fields)}")
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
