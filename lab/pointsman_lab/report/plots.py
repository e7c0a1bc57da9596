"""Plots of runs as inline SVG for the report page. Colours are the page's CSS variables; text remains text."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pointsman_lab.report.diagnostics import LATENCIES, FloatArray, Hotspot, MatchedRequests, Timelines, values
from pointsman_lab.report.request_record import RequestRecord

# Placeholder colours, replaced by the page's CSS variables after a figure is drawn.
INK, FAINT = "#010101", "#010102"
SERIES = tuple(f"#0101{number:02x}" for number in range(0x10, 0x18))
VARIABLES = {INK: "var(--ink)", FAINT: "var(--rule)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(SERIES)
}
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
# For documents, which are read on white pages.
LIGHT_STYLE: Any = STYLE | {
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#1f2328",
    "text.color": "#1f2328",
    "xtick.color": "#1f2328",
    "ytick.color": "#1f2328",
    "grid.color": "#d8dce2",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
# Width of a figure, inches.
WIDTH = 9.6


def cdfs(runs: Mapping[str, Sequence[RequestRecord]]) -> str:
    """Return the cumulative distribution of each latency, with one line per run."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        panels = figure.subplots(1, len(LATENCIES))
        for axes, (name, metric) in zip(panels, LATENCIES.items(), strict=True):
            for colour, (run, records) in zip(_colours(), runs.items(), strict=False):
                found = np.sort(values(records, metric))
                found = found[found > 0]
                if len(found):
                    shares = np.arange(1, len(found) + 1) / len(found) * 100
                    axes.step(found, shares, where="post", color=colour, linewidth=1.5, label=run)
            axes.set_xscale("log")
            axes.set_title(f"{name}, s")
            axes.set_ylim(0, 101)
            _plain_log(axes)
        panels[0].set_ylabel("% of answers")
        if len(runs) > 1:
            figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(runs)))
        return _svg(figure, "cdf")


def splits(runs: Mapping[str, Mapping[str, int]], name: str) -> str:
    """Return one bar of shares per run; a part has the same colour in all bars."""
    parts = list(dict.fromkeys(part for split in runs.values() for part in split))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.75 + 0.34 * len(runs)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(runs))
        for colour, part in zip(_colours(), parts, strict=False):
            shares = np.array([split.get(part, 0) / (sum(split.values()) or 1) * 100 for split in runs.values()])
            axes.barh(list(runs), shares, left=left, color=colour, height=0.62, label=part, edgecolor="none")
            left += shares
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        axes.xaxis.set_major_formatter("{x:.0f}%")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(6, len(parts)))
        return _svg(figure, f"split {name}")


def timeline(found: Timelines, panel_maxima: Mapping[str, float], name: str) -> str:
    """Return a heat map of instance by time per panel; `panel_maxima` has the value of each panel's brightest colour."""
    rows = len(found.instances)
    with mpl.rc_context(STYLE):
        height = 0.75 + max(0.14 * rows, 0.5)
        figure = Figure(figsize=(WIDTH, height * len(found.panels)), layout="constrained")
        panels = np.atleast_1d(figure.subplots(len(found.panels), 1, sharex=True))
        end = found.times[-1] + (found.times[1] - found.times[0] if len(found.times) > 1 else 1.0)
        for number, (axes, (title, grid)) in enumerate(zip(panels, found.panels.items(), strict=True)):
            image = axes.imshow(
                grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0, vmax=panel_maxima[title],
                extent=(0.0, float(end), rows - 0.5, -0.5),
            )  # fmt: skip
            # Without an explicit id, two identical maps would have the same id.
            image.set_gid(f"map-{number}")
            axes.set_title(title)
            axes.grid(visible=False)
            axes.spines[["left", "bottom"]].set_visible(False)
            shown = range(0, rows, max(1, rows // 16))
            axes.set_yticks(list(shown), [found.instances[row] for row in shown])
            bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=8 * max(1, height), format="{x:,.0f}")
            bar.outline.set_visible(False)
            bar.locator = MaxNLocator(4, integer=True)
        panels[-1].set_xlabel("s since the run began")
        return _svg(figure, f"timeline {name}")


def request_bars(spot: Hotspot, name: str) -> str:
    """Return the requests of the busiest instance's top sessions as bars, split at their first token."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.9 + 0.26 * len(spot.sessions)), layout="constrained")
        axes = figure.subplots()
        for row, share in enumerate(spot.sessions):
            waits = [(record.t_send, record.ttft_s or record.e2e_s) for record in share.records]
            streams = [
                (record.t_send + record.ttft_s, record.e2e_s - record.ttft_s)
                for record in share.records
                if record.ttft_s
            ]
            axes.broken_barh(
                waits, (row - 0.36, 0.72), color=SERIES[1], label="until the first token" if not row else None
            )
            axes.broken_barh(streams, (row - 0.36, 0.72), color=SERIES[0], label="streaming" if not row else None)
        axes.set_yticks(range(len(spot.sessions)), [share.session for share in spot.sessions])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("s since the run began")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        return _svg(figure, f"lanes {name}")


def scatter(pairs: MatchedRequests, base: str, other: str) -> str:
    """Return a scatter plot of each request's TTFT in both runs, and the distribution of its change."""
    both = [
        (first.ttft_s, second.ttft_s)
        for first, second in zip(pairs.base, pairs.other, strict=True)
        if first.ttft_s and second.ttft_s
    ]
    points: FloatArray = np.array(both, dtype=np.float64).reshape(-1, 2)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        if len(points):
            low, high = points.min() * 0.8, points.max() * 1.25
            left.plot([low, high], [low, high], color=INK, linewidth=0.8)
            left.scatter(points[:, 0], points[:, 1], s=7, color=SERIES[0], alpha=0.45, linewidths=0)
            left.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
            _plain_log(left)
            change = np.sort(points[:, 1] - points[:, 0])
            right.axvline(0, color=INK, linewidth=0.8)
            right.step(change, np.arange(1, len(change) + 1) / len(change) * 100, where="post", color=SERIES[0])
            reach = max(float(np.abs(np.percentile(change, (1, 99))).max()), 1e-3)
            right.set(xlim=(-reach, reach), ylim=(0, 101))
        left.set(xlabel=f"{base}: TTFT, s", ylabel=f"{other}: TTFT, s", title="below the line: faster")
        right.set(xlabel="TTFT less the base's, s", ylabel="% of pairs", title="left of 0: faster")
        return _svg(figure, f"pairs {other}")


def _colours() -> list[str]:
    return [*SERIES] * 4


def _plain_log(axes: Any) -> None:
    """Label the decades of logarithmic axes as 0.01, 1, 100 instead of powers, without minor labels. Mutates."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")


def _svg(figure: Figure, name: str) -> str:
    """Return the figure as an <svg> element with ids that are unique on the page, and with the page's colours."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    prefix = re.sub(r"\W", "-", name)
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', drawn)
    drawn = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", drawn)
    drawn = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', drawn)
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, variable)
    return re.sub(r'(<svg[^>]*?) width="[^"]+" height="[^"]+"|(<svg)', r"\1\2", drawn, count=1)
