"""Simulates a fleet that is scaled on the router's backlog, and on other signals, while the load rises.

The scaling rules are those of the shipped manifest. `python -m studies.autoscaling` compares signals in two minutes;
with `--sweep` it compares thresholds, ramps and startup times in ten.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import yaml
from rich.console import Console
from rich.table import Table

from bench.figures import Figure, figure_table
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Ramp, ramp_sessions
from pointsman_lab.workload.synthetic_trace import AGENTIC, SMALL, SessionShape, generate
from studies.autoscaling.autoscaled_simulator import AutoscaledSimulator
from studies.autoscaling.horizontal_autoscaler import SYNC_EVERY_S, TargetType, settings_of_hpa
from studies.autoscaling.outcome import WINDOW_S, ScalingOutcome, TtftWindows, outcome_of
from studies.autoscaling.signals import (
    AverageOverTime,
    Signal,
    backlog_seconds,
    kv_usage,
    requests_waiting,
)

COMPONENT = Path(__file__).parents[2] / "deploy/k8s/components/autoscaling-hpa"
SHIPPED = settings_of_hpa(yaml.safe_load((COMPONENT / "autoscaler.yaml").read_text()))
# Averaging window of the shipped query, in minutes and then as a number of readings.
_AVERAGED = re.search(r"avg_over_time\(.*\[(\d+)m\]", (COMPONENT / "adapter-rule.yaml").read_text())
READINGS = round(int(_AVERAGED[1]) * 60 / SYNC_EVERY_S) if _AVERAGED else 1
# Maximum number of instances, as a multiple of the initial number.
GROWTH = 4
# Time at the start of a run that is not measured, s.
SETTLE_S = 300.0
RAMP = Ramp(before_s=900.0, rise_s=300.0, after_s=480.0, factor=2.5)
# Time until a new instance answers, s.
STARTUP_S = 120.0
# Number of draws of the sessions per figure.
DRAWS = 5
# Further (ramp, startup time) pairs of the sweep.
VARIED = (
    (replace(RAMP, rise_s=600.0), STARTUP_S),
    (replace(RAMP, factor=2.0), STARTUP_S),
    (replace(RAMP, factor=3.0), STARTUP_S),
    (RAMP, 60.0),
    (RAMP, 180.0),
)


@dataclass(frozen=True)
class Setup:
    """A workload and its fleet. `rate`: sessions of `shape` that start per second and initial instance. `threshold_s`: the
    backlog that the fleet is scaled on. `thresholds_s`: the thresholds of the sweep."""

    name: str  # begins the names of its figures
    shape: SessionShape
    rate: float
    instances: int  # at the start, and the least during the run
    engine: EngineConfig  # of each instance
    threshold_s: float
    thresholds_s: tuple[float, ...]


# TTFT p90 before the rise is about 7 s (agentic) and 1 s (small), as on fleets with spare capacity. The shipped threshold is for
# the first setup.
SETUPS = (
    Setup("agentic", AGENTIC, 0.012, 8, EngineConfig(max_model_len=200_000), SHIPPED.target, (1.0, 2.0, 3.0, 4.0, 6.0)),
    Setup("small", SMALL, 0.13, 3, EngineConfig(max_model_len=70_000), 0.5, (0.25, 0.5, 1.0, 2.0)),
)


@dataclass(frozen=True)
class Scaler:
    """The signal that a fleet is scaled on, with its target; without a signal the fleet is not scaled."""

    name: str
    signal: Callable[[], Signal] | None
    target: float = 1.0
    target_type: TargetType = "Value"


def backlog(target: float, readings: int = READINGS) -> Scaler:
    """Return a scaler on the router's backlog, averaged over the last `readings`."""
    return Scaler(f"backlog_{target:g}s_of_{readings}", lambda: AverageOverTime(backlog_seconds, readings), target)


FIXED = Scaler("fixed", None)
RIVALS = (
    # The default of vLLM's production-stack, the same with the lowest possible target, and the other signal that guides
    # recommend.
    Scaler("waiting_5", lambda: requests_waiting, 5.0, "AverageValue"),
    Scaler("waiting_1", lambda: requests_waiting, 1.0, "AverageValue"),
    Scaler("kv_usage_0.5", lambda: kv_usage, 0.5),
)


def compare_signals() -> list[Figure]:
    """Return for each setup and signal, as medians over draws: TTFT p90, the time of the decision to scale, and the instances
    paid."""
    figures = []
    for setup in SETUPS:
        figures += _compared(setup, (FIXED, backlog(setup.threshold_s), *RIVALS), show=True)
    return figures


def sweep() -> list[Figure]:
    """Return the figures of compare_signals() for other thresholds, for one reading instead of an average, and for the ramps and
    startup times of VARIED."""
    figures = []
    for setup in SETUPS:
        figures += _compared(setup, [backlog(threshold_s) for threshold_s in setup.thresholds_s])
        figures += _compared(setup, [backlog(threshold_s, 1) for threshold_s in setup.thresholds_s[1:]])
        for ramp, startup_s in VARIED:
            figures += _compared(setup, [backlog(setup.threshold_s)], ramp, startup_s)
    return figures


def _compared(
    setup: Setup, scalers: Sequence[Scaler], ramp: Ramp = RAMP, startup_s: float = STARTUP_S, *, show: bool = False
) -> list[Figure]:
    """Return the figures of each scaler; with `show` print a table of the first draw over time."""
    figures = []
    columns: list[list[tuple[str, str]]] = []
    for scaler in scalers:
        outcomes = []
        for seed in range(1, DRAWS + 1):
            p90_before_s = _p90_before_s(setup, ramp, seed)
            simulator = _simulator(setup, scaler, ramp, startup_s, seed)
            records = simulator.run_until(ramp.end_s)
            outcomes.append(outcome_of(simulator, records, ramp, SETTLE_S, p90_before_s))
            if seed == 1:
                columns.append(_column(simulator, TtftWindows.of(records), ramp, p90_before_s))
        figures += _figures(
            f"{setup.name}_x{ramp.factor:g}_in_{ramp.rise_s:g}s_start_{startup_s:g}s_{scaler.name}", outcomes
        )
    if show:
        table = Table("minute", *(scaler.name for scaler in scalers), box=None)
        for cells in zip(*columns, strict=True):
            table.add_row(cells[0][0], *(cell for _, cell in cells))
        title = f"{setup.name}, first draw: TTFT p90 of the last {WINDOW_S:g} s over that of before the rise; instances wanted"
        Console(width=180).print(title, table)
    return figures


@lru_cache
def _p90_before_s(setup: Setup, ramp: Ramp, seed: int) -> float:
    """Return TTFT p90 before the rise on the fleet that is not scaled, in s."""
    records = _simulator(setup, FIXED, ramp, STARTUP_S, seed).run_until(ramp.before_s)
    return TtftWindows.of(records).p90(SETTLE_S, ramp.before_s)


def _simulator(setup: Setup, scaler: Scaler, ramp: Ramp, startup_s: float, seed: int) -> AutoscaledSimulator:
    sessions = round(setup.rate * setup.instances * ramp.constant_s)
    drawn = ramp_sessions(generate(sessions, ramp.constant_s, seed, setup.shape), ramp)
    config = SimulationConfig(instances=setup.instances, engine=setup.engine, timing="think", seed=seed)
    most = setup.instances * (GROWTH if scaler.signal else 1)
    settings = replace(
        SHIPPED,
        min_replicas=setup.instances,
        max_replicas=most,
        target=scaler.target,
        target_type=scaler.target_type,
    )
    signal = scaler.signal() if scaler.signal else (lambda *_: None)
    return AutoscaledSimulator(iter(drawn), config, settings, signal, startup_s)


def _column(
    simulator: AutoscaledSimulator, windows: TtftWindows, ramp: Ramp, p90_before_s: float
) -> list[tuple[str, str]]:
    """Return (minute since the rise began, TTFT p90 relative to before the rise and the instances wanted) for each window."""
    cells = []
    for number in range(int((ramp.end_s - ramp.before_s) / WINDOW_S) + 3):
        at = ramp.before_s + (number - 2) * WINDOW_S
        wanted = next(sync.after for sync in reversed(simulator.syncs) if sync.at <= at)
        cells.append(
            (f"{(at - ramp.before_s) / 60:g}", f"{windows.p90(at - WINDOW_S, at) / p90_before_s:.2f}; {wanted}")
        )
    return cells


def _figures(name: str, outcomes: Sequence[ScalingOutcome]) -> list[Figure]:
    """Return two figures: TTFT p90 relative to before the rise, and the paid instance time relative to the fixed fleet's."""
    in_time = sum(outcome.in_time for outcome in outcomes)
    decided = [outcome.decided_s for outcome in outcomes if outcome.decided_s is not None]
    doubled = [outcome.doubled_s for outcome in outcomes if outcome.doubled_s is not None]
    moments = (
        f"in time in {in_time} of {len(outcomes)} draws: decided in {len(decided)}, after {_median(decided)} s, "
        f"p90 doubled in {len(doubled)}, after {_median(doubled)} s"
    )
    most = _median([outcome.most_instances for outcome in outcomes])
    cost = f"{median(outcome.paid_before for outcome in outcomes):.2f} before the rise, at most {most} instances"
    worst, last = (median(getattr(outcome, field) for outcome in outcomes) for field in ("worst_p90", "last_p90"))
    windows = f"worst {WINDOW_S:g} s {worst:.2f}, last 5 min {last:.2f}"
    return [
        Figure(
            f"{name}_ttft_p90", median(outcome.p90 for outcome in outcomes), "x before", note=f"{windows}; {moments}"
        ),
        Figure(f"{name}_paid", median(outcome.paid_after for outcome in outcomes), "x fixed", note=cost),
    ]


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.0f}" if values else "-"


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(
        "python -m studies.autoscaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="compare thresholds, ramps and startup times")
    given = parser.parse_args()
    Console(width=180).print(figure_table(sweep() if given.sweep else compare_signals()))


if __name__ == "__main__":
    main()
