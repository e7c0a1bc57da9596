"""`pointsman analyze`: prints the bundles of runs as tables, and writes them as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from rich.console import Console

from pointsman_lab.report.bundle import Bundle, BundleError, read_bundle
from pointsman_lab.report.sections import Section, Table, sections
from pointsman_lab.report.terminal import make_console, make_table

# Minimum width of the printed tables, columns.
WIDTH = 200
TEMPLATE = Path(__file__).parents[1] / "data" / "report.html.jinja"


def analyze(
    folders: Annotated[
        list[Path], typer.Argument(help="bundles of runs; the first is the base that the others are compared with")
    ],
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: report.html in the first bundle")
    ] = None,
) -> None:
    """Report latencies, splits, tails, instances over time, hotspots and matched pairs of replays and simulations."""
    runs: dict[str, Bundle] = {}
    try:
        for name, folder in zip(names_of(folders), folders, strict=True):
            runs[name] = read_bundle(folder)
            if not runs[name].records:
                raise BundleError(f"{folder / 'metrics.jsonl'}: it has no requests")
    except BundleError as error:
        typer.echo(f"pointsman analyze: {error}", err=True)
        raise typer.Exit(2) from None
    console = make_console()
    # A narrow terminal wraps long lines; a table that is squeezed into its width would lose figures.
    console.width = max(console.width, WIDTH)
    for section in sections(runs, draw=False):
        _print(console, section)
    page = html or folders[0] / "report.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(runs))
    except OSError as error:
        typer.echo(f"pointsman analyze: {page}: cannot be written: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    console.print(f"\nwith plots: {page}", highlight=False, soft_wrap=True)


def render(runs: Mapping[str, Bundle]) -> str:
    """Return the HTML page of these runs, with its style and plots inline, and without scripts or external links."""
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text())
    kinds = {str(run.config.get("kind", "run")) for run in runs.values()}
    requests = sum(len(run.records) for run in runs.values())
    return template.render(
        title=" and ".join(runs) if len(runs) < 3 else f"{next(iter(runs))} and {len(runs) - 1} more runs",
        subtitle=f"Pointsman: {requests:,} requests, {', '.join(sorted(kinds))}",
        runs={name: _facts(run) for name, run in runs.items()},
        sections=sections(runs, draw=True),
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return distinct names of the folders: as few of their last parts as differ, or the whole path and a number."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} #{number}" for number, folder in enumerate(folders, 1)]


def _facts(run: Bundle) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if value not in (None, "")}


def _print(console: Console, section: Section) -> None:
    console.print(f"\n[bold]{section.title}[/bold]" + (f": {section.note}" if section.note else ""), highlight=False)
    for block in section.blocks:
        if not isinstance(block, Table):
            continue
        table = make_table(*block.columns, text_columns=block.text_columns, caption=block.caption)
        for row in block.rows:
            table.add_row(*row)
        console.print(table, highlight=False, markup=False, soft_wrap=not console.is_terminal)
