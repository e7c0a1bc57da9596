"""Terminal output of the lab's commands: console, tables, progress bar, and percentages."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def make_console(file: TextIO | None = None) -> Console:
    """Return a console on stdout or `file`; 140 columns wide if it is not a terminal, where rich would assume 80."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=140)


def make_table(*columns: str, text_columns: int = 1, caption: str = "", wrap: bool = False) -> Table:
    """Return a table without a frame; all columns but the first `text_columns` are numbers and right-aligned. Cells of a table
    that is too wide are cut, or wrapped with `wrap`."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=caption or None, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= text_columns else "left", no_wrap=not wrap)
    return table


def make_progress(console: Console) -> Progress:
    """Return a progress bar that is removed when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def percent(share: float | None) -> str:
    """Format a share (0 to 1) as a percentage; "-" for None."""
    return "-" if share is None else f"{share:.1%}"
