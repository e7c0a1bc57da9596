"""What the commands on traces have in common: their arguments, and their errors. Needs nothing of the lab's extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pointsman_lab.workload.synthetic_trace import ShapeError
from pointsman_lab.workload.trace_files import AUTO
from pointsman_lab.workload.trace_formats import READERS
from pointsman_lab.workload.traces import TraceError

Format = Annotated[str, typer.Option("--format", help=f"{AUTO}, {', '.join(READERS)}")]
Trace = Annotated[Path, typer.Argument(help="trace file (jsonl, jsonl.gz)")]


@contextmanager
def trace_errors(command: str) -> Iterator[None]:
    """End the command with status 2 and a message for a trace that cannot be used."""
    try:
        yield
    except (TraceError, ShapeError) as error:
        typer.echo(f"pointsman trace {command}: {error}", err=True)
        raise typer.Exit(2) from None
