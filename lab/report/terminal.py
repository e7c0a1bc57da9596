"""What the lab's commands print with: a console, tables, a bar of progress, and shares."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def make_console(file: TextIO | None = None) -> Console:
    """A console on stdout or `file`; wide enough for the tables where that is no terminal, and rich would assume 80 columns."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=140)


def make_table(*columns: str, text_columns: int = 1, caption: str = "", wrap: bool = False) -> Table:
    """A table without a frame; all columns but the first `text_columns` are numbers, set to the right. Where it is too wide its
    cells are cut, or with `wrap` folded."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=caption or None, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= text_columns else "left", no_wrap=not wrap)
    return table


def make_progress(console: Console) -> Progress:
    """A bar that goes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def percent(share: float | None) -> str:
    """A share (0 to 1) for people; "-" for none."""
    return "-" if share is None else f"{share:.1%}"
