"""The commands `pointsman trace generate` and `stats`. `convert`, which also reads texts, is in pointsman_cli.trace_convert."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pointsman_lab.report.terminal import make_console, make_table
from pointsman_lab.workload.synthetic_trace import SHAPES, ShapeError, generate, shape_with
from pointsman_lab.workload.trace_arguments import Format, Trace, trace_errors
from pointsman_lab.workload.trace_files import AUTO, load_trace, read_trace, save_trace
from pointsman_lab.workload.trace_stats import CACHE_TOKENS, PERCENTILES, statistics
from pointsman_lab.workload.traces import TraceRequest

app = typer.Typer(no_args_is_help=True, help="Generate, describe and convert traces.")

BARS = " ▁▂▃▄▅▆▇█"


@app.command("generate")
def generate_command(
    out: Annotated[Path, typer.Argument(help="file to write; gzip when its name ends with .gz")],
    sessions: Annotated[int, typer.Option(min=1, help="number of sessions, without their sub-agents")] = 230,
    span_s: Annotated[float, typer.Option(min=0, help="time span in which sessions start, s")] = 600.0,
    seed: Annotated[int, typer.Option(help="seed of the draw; equal seeds give equal bytes")] = 1,
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}")] = "agentic",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of a SessionShape parameter; can be repeated")
    ] = None,
) -> None:
    """Write synthetic agentic sessions (described in lab/pointsman_lab/workload/synthetic_trace.py)."""
    with trace_errors("generate"):
        if shape not in SHAPES:
            raise ShapeError(f"{shape}: no such shape; the shapes are {', '.join(SHAPES)}")
        given = dict(change.partition("=")[::2] for change in changes or ())
        written = save_trace(out, generate(sessions, span_s, seed, shape_with(SHAPES[shape], given)))
    typer.echo(f"{out}: {written} requests")


@app.command()
def stats(
    trace: Trace,
    trace_format: Format = AUTO,
    cache_tokens: Annotated[
        list[int] | None, typer.Option("--cache-tokens", min=1, help="size of an LRU cache, tokens; can be repeated")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Print lengths, turns, cache hit ratios, reuse gaps, class split and sessions in flight. Streams a trace in time order."""
    sizes = cache_tokens or CACHE_TOKENS
    with trace_errors("stats"):
        try:
            found = statistics(_in_order(read_trace(trace, trace_format)), sizes)
        except _Unordered:
            found = statistics(load_trace(trace, trace_format), sizes)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print(make_console(), found, str(trace))


class _Unordered(Exception):
    """A request is earlier than the one before it in the file."""


def _in_order(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    last_ms = 0.0
    for request in requests:
        if request.timestamp_ms < last_ms:
            raise _Unordered
        last_ms = request.timestamp_ms
        yield request


def _print(console: Console, found: dict[str, Any], title: str) -> None:
    flight = found["sessions_in_flight"]
    within = found["within_session"]
    console.print(
        f"[bold]{title}[/bold]: {found['requests']:,} requests of {found['sessions']:,} sessions in {found['span_s']:,.0f} s; "
        f"an unlimited cache for all would serve {found['ideal_hit_ratio']:.1%} of the input"
        + (f", {within:.1%} of that from the same session" if within is not None else ""),
        highlight=False,
    )
    table = make_table("", *(f"p{name}" for name in PERCENTILES), "max", "mean")
    rows = {
        "input tokens": ("input_tokens", "{:,.0f}"),
        "of first turns": ("first_input_tokens", "{:,.0f}"),
        "output tokens": ("output_tokens", "{:,.0f}"),
        "turns": ("turns", "{:,.1f}"),
        "think time, s": ("think_s", "{:,.1f}"),
        "later turn's own cached share": ("later_turn_cached", "{:.1%}"),
        "reuse gap, s": ("reuse_gap_s", "{:,.1f}"),
    }
    for name, (key, form) in rows.items():
        figures = found[key]
        table.add_row(name, *(form.format(value) for value in figures.values()) if figures else ("-",))
    console.print(table)
    table = make_table("LRU cache, tokens", "hit ratio", "LIGHT", "MEDIUM", "HEAVY")
    for cache in found["caches"]:
        size = "unlimited" if cache["tokens"] is None else f"{cache['tokens']:,}"
        table.add_row(size, f"{cache['hit_ratio']:.1%}", *(f"{share:.1%}" for share in cache["classes"].values()))
    console.print(table)
    most = max(count for _, count in flight["curve"]) or 1
    curve = "".join(BARS[round(count / most * (len(BARS) - 1))] for _, count in flight["curve"])
    console.print(
        f"sessions in flight: {flight['mean']:.1f} on average, {flight['max']} at most\n{curve}", highlight=False
    )
