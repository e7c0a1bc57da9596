"""The scoreboard's plots: TTFT p90 and CPU time per request of each router, by traffic."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from bench.rivals.contenders import POINTSMAN
from pointsman_lab.report.plots import LIGHT_STYLE
from studies.scoreboard.comparison import CPU, TTFT, Column, Comparison

_STYLE: Any = LIGHT_STYLE | {"svg.hashsalt": "pointsman scoreboard"}
_OWN, _OTHER, _RANGE = "#0b6e4f", "#8a8f98", "#1f2328"


def ttft_plot(comparisons: Sequence[Comparison]) -> str:
    """Return the SVG of TTFT p90: a bar for the mean over rounds, a line from the lowest to the highest round."""
    return _bars(comparisons, TTFT[1], "TTFT p90, s", log=False)


def cpu_plot(comparisons: Sequence[Comparison]) -> str:
    """Return the SVG of the routers' CPU time per request, on a logarithmic scale."""
    return _bars(comparisons, CPU, "ms of CPU per request", log=True)


def _bars(comparisons: Sequence[Comparison], column: Column, label: str, *, log: bool) -> str:
    rows = max((len(comparison.trials) for comparison in comparisons), default=1)
    columns = min(2, max(len(comparisons), 1))
    lines = -(-max(len(comparisons), 1) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, lines * (0.9 + 0.24 * rows)), layout="constrained")
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, comparison in zip(panels, comparisons, strict=False):
            names = comparison.ranked(column)
            for at, name in enumerate(names):
                values = [
                    value * column.factor
                    for rounds in comparison.trials[name].values()
                    if (value := column.value(rounds))
                ]
                if not values:
                    continue
                colour = _OWN if name.startswith(POINTSMAN) else _OTHER
                axes.barh(at, sum(values) / len(values), color=colour, height=0.66)
                axes.plot([min(values), max(values)], [at, at], color=_RANGE, linewidth=1.0)
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_title(comparison.cell.title)
            axes.set_xlabel(label)
            if log:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_locator(NullLocator())
        for axes in panels[len(comparisons) :]:
            axes.set_visible(False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
