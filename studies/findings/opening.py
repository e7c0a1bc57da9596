"""The opening of docs/findings.md: each policy's gain in seconds, and the plots. Pure.

Both are made from the document's own tables, so that they agree with the tables, and can be made again without the trials.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pointsman_lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman_lab.report.plots import LIGHT_STYLE
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from studies.findings.cells import BASE, CHAT, GENERATED, OURS, REAL
from studies.marked_sections import OPENING, with_section

TTFT, E2E, TPOT = "TTFT p90 s", "E2E p90 s", "TPOT p90 ms"
TRAFFIC = {REAL: "coding agents, recorded", GENERATED: "coding agents, made up", CHAT: "chat, recorded"}
# Policy -> the widely used router whose rule the policy follows.
ROUTERS = {
    "round_robin": "round robin (nginx)",
    "least_requests": "least requests (nginx `least_conn`)",
    "sticky": "sticky sessions",
    "aibrix_prefix": "AIBrix prefix cache",
    "dynamo_kv": "Dynamo KV router",
    "llmd_default": "llm-d without configuration",
    "llmd_affinity": "llm-d guides, sticky until saturated",
    "sglang_cache_aware": "SGLang cache-aware",
    "preble": "Preble",
    BASE: "Pointsman",
    DEFAULT_POLICY: "Pointsman, the default",
    OURS: "Pointsman",
}
PLOT_STYLE: Any = LIGHT_STYLE | {"svg.hashsalt": "pointsman findings"}
_COLOURS = {
    FLOOR: "#8a8f98",
    OURS: "#0b6e4f",
    DEFAULT_POLICY: "#1b1f24",
    BASE: "#1f6feb",
    "round_robin": "#b35900",
    "least_requests": "#8250df",
    "sticky": "#c2255c",
    "aibrix_prefix": "#0c8599",
    "dynamo_kv": "#846a00",
    "llmd_default": "#5c636a",
    "llmd_affinity": "#6b4f0b",
    "sglang_cache_aware": "#d9480f",
}


@dataclass(frozen=True)
class TableCell:
    """A mean and its paired difference to `unified` as text: "" if the table shows none, as for `unified` itself; "=" for no
    difference."""

    mean: float
    difference: str


Rows = Mapping[str, Mapping[str, TableCell]]


@dataclass(frozen=True)
class Tables:
    """The document's tables. `loads`: (trace, load) -> policy -> column -> cell. `closed`: name of a cell -> the shares of the
    gap that `foresight` and `pooled` close, in %, from the table of `foresight`."""

    loads: Mapping[tuple[str, str], Rows]
    closed: Mapping[str, tuple[float, float | None]]


def read_tables(document: str) -> Tables:
    """Parse the tables of a document that findings_page.render() made."""
    loads = {}
    for trace, load, text in re.findall(
        r"^## ([\w-]+): ([\w-]+)\n(.*?)(?=^## |\Z)", document, re.MULTILINE | re.DOTALL
    ):
        header, rows = _table(text)
        loads[trace, load] = {
            row[0].strip("`"): {
                name: found
                for name, text in zip(header[1:], row[1:], strict=True)
                if (found := _cell(text)) is not None
            }
            for row in rows
        }
    header, rows = _table(document.partition(f"\n## `{OURS}`\n")[2].partition("\n## ")[0])
    closed = {}
    for row in rows:
        fields = dict(zip(header, row, strict=True))
        ours, pooled = _cell(fields["closed"]), _cell(fields["`pooled` closes"])
        if ours is not None:
            closed[fields["cell"]] = (ours.mean, pooled.mean if pooled else None)
    return Tables(loads, closed)


def with_opening(document: str) -> str:
    """Return the document with the text between the opening's marks made from its tables."""
    return with_section(document, OPENING, _opening(read_tables(document)))


def plots(document: str) -> dict[str, str]:
    """Return file name -> SVG of each plot that the opening shows."""
    tables = read_tables(document)
    return {"findings_ttft.svg": _ttft(tables), "findings_gap.svg": _gap(tables), "findings_tpot.svg": _tpot(tables)}


def router_table(tables: Tables, trace: str = REAL) -> str:
    """Return a Markdown table of TTFT p90 of ROUTERS by load, the slowest at the middle load first; "" with fewer than two of
    them."""
    loads = [load for at, load in tables.loads if at == trace]
    names = [name for name in ROUTERS if all(name in tables.loads[trace, load] for load in loads)]
    if not loads or len(names) < 2:
        return ""
    middle = loads[len(loads) // 2]
    names.sort(key=lambda name: -tables.loads[trace, middle][name][TTFT].mean)
    lines = [f"| router | policy | {' | '.join(loads)} |", f"|---|---|{'---|' * len(loads)}"]
    for name in names:
        values = [f"{_rounded(tables.loads[trace, load][name][TTFT].mean)} s" for load in loads]
        lines.append(f"| {ROUTERS[name]} | `{name}` | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _opening(tables: Tables) -> str:
    parts = [
        "![TTFT p90 by load, for each policy](findings_ttft.svg)\n",
        "TTFT p90 by load, on a logarithmic scale. `floor` is the bound: nothing waits, and one cache has everything.\n",
        "### Your traffic, your policy, what you gain\n",
        f"The policy with the lowest TTFT p90 of all that were run, against `{BASE}`. In brackets the gain's 95 %\n"
        "confidence interval; `=` is no difference beyond chance. TPOT p90 is the price: decodes run beside prefills.\n",
        _gains(tables),
    ]
    if routers := router_table(tables):
        parts += [
            "### Your router today\n",
            "TTFT p90 on recorded coding agents. Other routers' rules get Pointsman's exact knowledge here; at home they have "
            "less.\n`sglang_cache_aware` and `dynamo_kv` are compared with the routers' own programs, sglang-router 0.3.2 and "
            "smg, and Dynamo 1.6.1\n(`python -m studies.rival_rules`). The former chooses as they do, smg in front of engines "
            "that tell no load\n(of others it takes the one with the shortest expected wait where nothing matches). The latter "
            "differs where open\nrequests of one instance share blocks, which Dynamo counts once: in a tenth of such states.\n"
            "`llmd_affinity` is a reading of the source of llm-d-router at ebab6879 with the configuration of llm-d's "
            "guides,\n`llmd_default` of its scorers without a configuration, "
            "`aibrix_prefix` and `preble` of what is published.\n",
            routers,
        ]
    parts += [
        "### What is left to gain, and the price\n",
        "![Share of the gap to the bound that is closed, by cell](findings_gap.svg)\n",
        f"The gap is what `{BASE}`'s TTFT p90 has over the bound's. `pooled` closes what one cache for all instances would.\n",
        "![TPOT p90 by load](findings_tpot.svg)\n",
    ]
    return "\n".join(parts)


def _gains(tables: Tables) -> str:
    lines = [
        "| your traffic | load | your policy | you gain in TTFT p90 | TTFT p90 | E2E p90 | TPOT p90 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (trace, load), rows in tables.loads.items():
        best = min((name for name in rows if name not in BOUNDS), key=lambda name: rows[name][TTFT].mean)
        if best == BASE or BASE not in rows:
            continue
        gain = f"{_rounded(rows[BASE][TTFT].mean - rows[best][TTFT].mean)} s"
        difference = rows[best][TTFT].difference
        gain = f"**{gain}**" if "±" in difference else gain
        sure = f" ({difference.partition(' ')[2]})" if "±" in difference else f" ({difference})" if difference else ""
        changes = " | ".join(_change(rows, best, column) for column in (TTFT, E2E, TPOT))
        lines.append(f"| {TRAFFIC.get(trace, trace)} | {load} | `{best}` | {gain}{sure} | {changes} |")
    return "\n".join(lines) + "\n"


def _change(rows: Rows, policy: str, column: str) -> str:
    unit = column.rpartition(" ")[2]
    digits = 0 if unit == "ms" else 1
    before, after = rows[BASE][column], rows[policy][column]
    doubt = " (=)" if after.difference == "=" else ""
    return f"{_rounded(before.mean, digits)} -> {_rounded(after.mean, digits)} {unit}{doubt}"


def _rounded(value: float, digits: int = 1) -> str:
    """Format `value`, rounded half up, as a reader would round the figures in the tables."""
    return f"{value + 1e-9:,.{digits}f}"


def _table(text: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and the rows of the first table in a text; empty without a table."""
    from_table = dropwhile(lambda line: not line.startswith("| "), text.splitlines())
    lines = [line for line in takewhile(lambda line: line.startswith("|"), from_table) if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return (rows[0], rows[1:]) if rows else ((), ())


def _cell(text: str) -> TableCell | None:
    found = re.fullmatch(r"(-?[\d,]+(?:\.\d+)?)%?(?: \((.*)\))?", text)
    return TableCell(float(found[1].replace(",", "")), found[2] or "") if found else None


# ---- plots ----


def _ttft(tables: Tables) -> str:
    return _by_load(tables, TTFT, list(_COLOURS), "TTFT p90, s")


def _tpot(tables: Tables) -> str:
    return _by_load(tables, TPOT, (OURS, BASE, "llmd_default", "sglang_cache_aware", "dynamo_kv"), "TPOT p90, ms")


def _by_load(tables: Tables, column: str, names: Sequence[str], label: str) -> str:
    traces = list(dict.fromkeys(trace for trace, _ in tables.loads))
    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        panels = figure.subplots(1, max(len(traces), 1), squeeze=False, sharey=True)[0]
        for axes, trace in zip(panels, traces, strict=False):
            loads = [load for at, load in tables.loads if at == trace]
            for name in names:
                line = [tables.loads[trace, load].get(name, {}).get(column) for load in loads]
                if all(line):
                    axes.plot(
                        loads, [cell.mean for cell in line if cell], color=_COLOURS[name], label=name, marker="o", markersize=3.5,
                        linewidth=2.4 if name == OURS else 1.4, linestyle="--" if name == FLOOR else "-",
                    )  # fmt: skip
            axes.set_title(TRAFFIC.get(trace, trace))
            axes.set_yscale("log")
            _plain(axes)
        panels[0].set_ylabel(label)
        handles = {
            text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if handles:
            figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=6)
        return as_svg(figure)


def _gap(tables: Tables) -> str:
    cells = list(tables.closed)
    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9.6, 0.9 + 0.24 * len(cells)), layout="constrained")
        axes = figure.subplots()
        at = range(len(cells))
        pooled = [tables.closed[cell][1] or 0.0 for cell in cells]
        axes.barh(at, pooled, color="#d8dce2", height=0.75, label="one cache for all (pooled)")
        axes.barh(at, [tables.closed[cell][0] for cell in cells], color=_COLOURS[OURS], height=0.42, label=OURS)
        axes.set_yticks(list(at), cells)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.0f}%")
        axes.set_xlabel(f"of the gap between {BASE} and the bound, in TTFT p90")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        return as_svg(figure)


def _plain(axes: Axes) -> None:
    """Label the y axis with 1, 2, 5, 10, ... instead of powers of ten. Mutates."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def as_svg(figure: Figure) -> str:
    """Return a figure as SVG. Equal figures give equal text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
