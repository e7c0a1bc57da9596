"""Printed tables of a comparison and of its knees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pointsman_lab.experiments.knee import Knee
from pointsman_lab.experiments.trials import MetricComparison
from pointsman_lab.report.measures import ALL, LATENCIES
from pointsman_lab.report.terminal import make_table, percent

# Metrics of the whole run that are shown beside the latencies, with their formats.
WHOLE: dict[str, Callable[[float], str]] = {
    "hit_ratio": percent,
    "imbalance": lambda value: f"{value:.2f}",
    "offloads": percent,
    "throughput": lambda value: f"{value:.2f}/s",
    "failed": lambda value: f"{value:.1f}",
}


def print_comparisons(console: Console, comparisons: Sequence[MetricComparison], baseline: str) -> None:
    """Print for every load each latency by group of requests, then the metrics of the whole run. Each mean over trials is
    followed by its paired difference to the baseline with the 95 % confidence interval."""
    if not comparisons:
        console.print("no trial has finished")
        return
    trials = max(comparison.value.trials for comparison in comparisons)
    console.print(
        f"means over {trials} paired trials; in brackets the difference to [bold]{baseline}[/bold] and its 95 % confidence "
        "interval (Student's t); = means no difference: the interval contains 0",
        highlight=False,
    )
    for load in dict.fromkeys(comparison.load for comparison in comparisons):
        under = {
            (comparison.policy, comparison.group, comparison.metric): comparison
            for comparison in comparisons
            if comparison.load == load
        }
        console.print(f"\n[bold]{load or 'no varied settings'}[/bold]", highlight=False)
        for latency in LATENCIES:
            metrics = {f"{latency}_{share}_s": share for share in ("p50", "p90", "p99")}
            _table(console, latency.upper(), under, metrics, _time)
        _whole(console, under)


def print_knees(console: Console, knees: Sequence[Knee]) -> None:
    """Print each policy's knee, or a line that no seed had enough answers at every rate."""
    if not knees:
        console.print("\nno knee: no seed had enough answers at every rate to tell its throughput", highlight=False)
        return
    console.print("\nknees: the rate of the greatest power, throughput / mean E2E (Kleinrock 1979)", highlight=False)
    table = make_table("policy", "rate", "under", "seeds that agree", "power by rate", wrap=True)
    for knee in knees:
        powers = ", ".join(f"{rate:g}: {power:.3g}" for rate, power in zip(knee.rates, knee.powers, strict=True))
        rate = f"{knee.rate:g}" + ("" if knee.inside else " (at the sweep's edge)")
        table.add_row(knee.policy, rate, knee.loads[knee.position], f"{knee.agreement:.0%}", powers)
    console.print(table)


def _table(
    console: Console,
    title: str,
    under: dict[tuple[str, str, str], MetricComparison],
    metrics: dict[str, str],
    shown: Callable[[float], str],
) -> None:
    table = make_table(title, "policy", "requests", *metrics.values(), text_columns=2, wrap=True)
    groups = dict.fromkeys(group for _, group, _ in under)
    for group in sorted(groups, key=lambda name: name != ALL):
        for policy in dict.fromkeys(policy for policy, _, _ in under):
            cells = [under.get((policy, group, metric)) for metric in metrics]
            if not any(cells):
                continue
            count = under[policy, group, "requests"].value.mean
            table.add_row(group, policy, f"{count:,.0f}", *(_cell(cell, shown) for cell in cells))
    console.print(table)


def _whole(console: Console, under: dict[tuple[str, str, str], MetricComparison]) -> None:
    table = make_table("run", *WHOLE, wrap=True)
    for policy in dict.fromkeys(policy for policy, _, _ in under):
        table.add_row(policy, *(_cell(under.get((policy, ALL, metric)), shown) for metric, shown in WHOLE.items()))
    console.print(table)


def _cell(comparison: MetricComparison | None, shown: Callable[[float], str]) -> str:
    if comparison is None:
        return "-"
    text = shown(comparison.value.mean)
    if comparison.difference is None:
        return text
    if comparison.difference.half_width is None:
        return f"{text} ({_signed(comparison.difference.mean, shown)})"
    if not comparison.difference.differs:
        return f"{text} (=)"
    return f"{text} ({_signed(comparison.difference.mean, shown)} ± {shown(comparison.difference.half_width)})"


def _signed(value: float, shown: Callable[[float], str]) -> str:
    return ("-" if value < 0 else "+") + shown(abs(value))


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
