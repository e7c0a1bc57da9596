"""The section of docs/findings.md on admission, and its plots, from the study's trials. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from pointsman_lab.experiments.paired_statistics import CONFIDENCE, Estimate, difference_by_seed
from studies.admission.cells import ADMISSIONS, INSTANCES, NONE, SCENARIOS
from studies.admission.measures import ALL, BIN_S, StartBin
from studies.admission.runs import AdmissionTrial, by_cell
from studies.findings.opening import PLOT_STYLE, as_svg
from studies.marked_sections import filled_template

TEMPLATE = Path(__file__).with_name("section.md.jinja")
PLOT, FRONTIER = "findings_admission.svg", "findings_admission_frontier.svg"
# End of the plot's time axis, s.
PLOT_END_S = 2_400.0
COLOURS = (
    *("#8a8f98", "#0b6e4f", "#1f6feb", "#b35900", "#8250df", "#c2255c"),
    *("#0c8599", "#846a00", "#5c636a", "#d9480f", "#1b1f24", "#e8a317", "#6b4f0b", "#a61e4d", "#364fc7"),
)

Trials = Mapping[int, AdmissionTrial]


class Row:
    """A row of a table: the trials of one cell by seed, beside those of the same scenario and policy without admission."""

    def __init__(self, name: tuple[str, str, str], trials: Trials, base: Trials) -> None:
        self.scenario, self.policy, self.admission = name
        self.about = ADMISSIONS[self.admission].about
        self.seeds = sorted(trials)
        self._trials, self._base = trials, base

    def mean(self, phase: str, measure: str) -> float | None:
        """Return the mean over the seeds; None if no trial has the measure."""
        values = _by_seed(self._trials, phase, measure).values()
        return statistics.fmean(values) if values else None

    def highest(self, phase: str, measure: str) -> float | None:
        """Return the highest value of any seed; None if no trial has the measure."""
        return max(_by_seed(self._trials, phase, measure).values(), default=None)

    def ratio(self, phase: str, measure: str) -> float | None:
        """Return the ratio of the means to that without admission, over common seeds; None without any."""
        ours, base = (_by_seed(trials, phase, measure) for trials in (self._trials, self._base))
        common = ours.keys() & base.keys()
        below = sum(base[seed] for seed in common)
        return sum(ours[seed] for seed in common) / below if below else None

    def difference(self, phase: str, measure: str) -> Estimate | None:
        """Return the paired difference to the cell without admission; None for that cell itself, and without common seeds."""
        if self.admission == NONE:
            return None
        return difference_by_seed(*(_by_seed(trials, phase, measure) for trials in (self._trials, self._base)))


def section(trials: Sequence[AdmissionTrial], missing: int, instances: int = INSTANCES, *, quick: bool = False) -> str:
    """Return the section in Markdown. `missing`: number of planned trials that were not run. `instances`: those of the trials."""
    cells = by_cell(trials)
    rows = [Row(name, found, cells.get((name[0], name[1], NONE), {})) for name, found in cells.items()]
    text = filled_template(
        TEMPLATE,
        {"fixed": _fixed, "percent": _percent, "change": _change},
        rows=rows,
        scenarios={
            name: scenario.about for name, scenario in SCENARIOS.items() if any(row.scenario == name for row in rows)
        },
        commits=sorted({trial.commit[:12] for trial in trials if trial.commit}),
        seeds=sorted({trial.seed for trial in trials}),
        trials=len(trials),
        missing=missing,
        quick=quick,
        instances=instances,
        planned_instances=INSTANCES,
        none=NONE,
        all=ALL,
        plot=PLOT,
        frontier=FRONTIER,
        confidence=CONFIDENCE,
    )
    return text.strip() + "\n"


def plot(trials: Sequence[AdmissionTrial], scenario: str = "burst", policy: str = "foresight") -> str:
    """Return an SVG of the mean session time by the time at which sessions started, with one line per way to admit; below, the
    share of sessions that were not done."""
    cells = {name[2]: found for name, found in by_cell(trials).items() if name[:2] == (scenario, policy)}
    arrivals = SCENARIOS[scenario].arrivals
    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        times, lost = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for colour, name in zip(COLOURS, sorted(cells, key=list(ADMISSIONS).index), strict=False):
            # By the minute in the middle of each bin.
            bins = {
                (at + 0.5) * BIN_S / 60: sum(found, StartBin())
                for at, found in enumerate(
                    zip_longest(*(trial.by_start for trial in cells[name].values()), fillvalue=StartBin())
                )
                if (at + 1) * BIN_S <= PLOT_END_S
            }
            drawn = {minute: starts.time_s / starts.done for minute, starts in bins.items() if starts.done}
            times.plot([*drawn], [*drawn.values()], color=colour, label=name, marker="o", markersize=3)
            shares = {
                minute: 100 - 100 * starts.done / starts.sessions for minute, starts in bins.items() if starts.sessions
            }
            lost.plot([*shares], [*shares.values()], color=colour, marker="o", markersize=3)
        for axes in (times, lost):
            begin = arrivals.before_burst_s / 60
            axes.axvspan(begin, begin + arrivals.burst_s / 60, color="#f1e3c6", zorder=0)
        times.set_yscale("log")
        times.yaxis.set_major_formatter("{x:g}")
        times.set_ylabel("mean session time, s")
        lost.set_ylabel("not done, %")
        lost.set_xlabel("minute in which a session started; the burst is shaded")
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        return as_svg(figure)


def frontier(trials: Sequence[AdmissionTrial], scenario: str = "burst", policy: str = "foresight") -> str:
    """Return an SVG of what each way to admit gives up in a burst: over the share of the burst's sessions that it refuses, their
    mean time, and the TTFT p90 of their requests."""
    cells = {name[2]: found for name, found in by_cell(trials).items() if name[:2] == (scenario, policy)}
    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        measures = {"time_mean_s": "mean session time, s", "ttft_p90_s": "TTFT p90, s"}
        for axes, (measure, label) in zip(figure.subplots(1, 2), measures.items(), strict=True):
            for colour, name in zip(COLOURS, sorted(cells, key=list(ADMISSIONS).index), strict=False):
                refused, values = (_by_seed(cells[name], "burst", of) for of in ("refused", measure))
                common = sorted(refused.keys() & values.keys())
                axes.plot(
                    [100 * statistics.fmean(refused[seed] for seed in common)] if common else [],
                    [statistics.fmean(values[seed] for seed in common)] if common else [],
                    color=colour,
                    label=name,
                    marker="o",
                    linestyle="",
                )
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.set_xlabel("sessions of the burst that are refused, %")
            axes.set_ylabel(label)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        return as_svg(figure)


def _by_seed(trials: Trials, phase: str, measure: str) -> dict[int, float]:
    return {
        seed: trial.measures[phase][measure]
        for seed, trial in sorted(trials.items())
        if phase in trial.measures and measure in trial.measures[phase]
    }


def _fixed(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _change(difference: Estimate | None, digits: int = 0) -> str:
    """Format a paired difference in brackets, to follow a mean; `=` if its interval contains 0; empty for None."""
    if difference is None:
        return ""
    if difference.half_width is None:
        return f" ({difference.mean:+,.{digits}f})"
    return f" ({difference.mean:+,.{digits}f} ± {difference.half_width:,.{digits}f})" if difference.differs else " (=)"
