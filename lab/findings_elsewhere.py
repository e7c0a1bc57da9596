"""Other fleets, engines and sessions than the main study's: one setting has to do there, too. Cells and their table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.findings_figures import (
    BASE,
    E2E90,
    E2E99,
    OURS,
    TPOT,
    TTFT,
    TTFT99,
    Cell,
    best_rival,
    closed_by,
    mean_of,
    on_common_draws,
    ratio_of,
)
from lab.floor import FLOOR
from lab.generate import AGENTIC, SMALL, SessionShape


@dataclass(frozen=True)
class Elsewhere:
    """Generated sessions on so many engines. They start `rate` times as fast as the load says, so that at the floor an engine has
    to compute as much a second as on eight engines with the main study's; `kv` is a factor of its blocks."""

    sessions: int = 115
    rate: float = 0.93
    changes: Mapping[str, object] = field(default_factory=dict)
    base: SessionShape = AGENTIC
    instances: int = 4
    step_tokens: int = 8_192
    kv: float = 1.0


ELSEWHERE: Mapping[str, Elsewhere] = {
    "4 instances": Elsewhere(),
    "2 instances": Elsewhere(58, 0.84, instances=2),
    "16 instances": Elsewhere(460, 1.15, instances=16),
    "steps of 2,048 tokens": Elsewhere(step_tokens=2_048),
    "steps of 16,384 tokens": Elsewhere(step_tokens=16_384),
    "half the KV blocks": Elsewhere(kv=0.5),
    "twice the KV blocks": Elsewhere(kv=2.0),
    "12 turns, contexts of 50k": Elsewhere(
        60, 0.94, {"context_tokens": 50_000, "growth_tokens": 3_000, "mean_turns": 12}
    ),
    "1.3 turns": Elsewhere(150, 0.79, {"mean_turns": 1.3}),
    "many sub-agents": Elsewhere(80, 1.59, {"subagent_chance": 0.5}),
    "people, not tools": Elsewhere(115, 1.45, {"human_share": 0.8}),
    "answers of 800 tokens": Elsewhere(115, 1.01, {"output_tokens": 800}),
    "short and very long": Elsewhere(
        200, 1.23, {"context_tokens": 3_000, "context_spread": 2.0, "system_tokens": 2_000}
    ),
    "small sessions": Elsewhere(400, 1.48, base=SMALL),
}
# Of the bounds the floor alone: what caches lose is the main study's matter.
ELSEWHERE_POLICIES = (FLOOR, BASE, OURS, "lpwl", "preble")
ELSEWHERE_TRIALS = 2


def elsewhere_text(cells: Mapping[tuple[str, str, int], Cell]) -> str:
    """The section; cells by name, load and threshold. Empty without any that the floor, `unified` and `foresight` have run."""
    usable = {
        place: on_common_draws(cell, (OURS, BASE, FLOOR))
        for place, cell in cells.items()
        if {OURS, BASE, FLOOR} <= cell.keys()
    }
    usable = {place: cell for place, cell in usable.items() if cell[OURS]}
    if not usable:
        return ""
    loads = list(dict.fromkeys(load for _, load, _ in usable))
    lines = [
        "### Elsewhere",
        f"Nothing was tuned on these; {_trials(usable)} trials tell little of a cell: what counts is where it fails. "
        "Generated sessions,",
        "at rates that give an engine as much to compute as above. TTFT p90 in s of `unified` -> `foresight` "
        "(and of the floor), and the",
        "share of the gap that is closed.",
        "",
        "| what differs | threshold | " + " | ".join(loads) + " |",
        "|---" * (2 + len(loads)) + "|",
    ]
    for name, threshold in dict.fromkeys((name, threshold) for name, _, threshold in usable):
        row = [name, f"{threshold}" if threshold else "none"]
        row += [_closed(usable.get((name, load, threshold), {})) for load in loads]
        lines.append("| " + " | ".join(row) + " |")
    best = {place: best_rival(cell) for place, cell in usable.items()}
    lost = [f"{_told(place)} (`{name}` {ratio - 1:+.0%})" for place, (name, ratio) in best.items() if ratio <= 1.0]
    lines += [
        "",
        f"Of all that were run there, `foresight` has the lowest TTFT p90 in {len(usable) - len(lost)} of {len(usable)} cells"
        + (f"; not in {', '.join(lost)}." if lost else "."),
        "To `unified`'s, median and highest:",
        *(f"{_spread(usable, metric, said)}{end}" for metric, said, end in _TOLD),
    ]
    return "\n".join(lines)


_TOLD = ((TTFT99, "TTFT p99", ";"), (E2E90, "E2E p90", ";"), (E2E99, "E2E p99", ";"), (TPOT, "TPOT p90", "."))


def _trials(cells: Mapping[tuple[str, str, int], Cell]) -> str:
    counts = sorted({len(cell[OURS]) for cell in cells.values()})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _closed(cell: Cell) -> str:
    ours, base, floor = (mean_of(cell, name, TTFT) for name in (OURS, BASE, FLOOR))
    if ours is None or base is None or floor is None:
        return "-"
    share = closed_by(cell, OURS)
    return f"{base:.2f} -> {ours:.2f} ({floor:.2f})" + ("" if share is None else f", {share:.0%}")


def _spread(cells: Mapping[tuple[str, str, int], Cell], metric: str, said: str) -> str:
    ratios = {place: ratio for place, cell in cells.items() if (ratio := ratio_of(cell, OURS, metric)) is not None}
    worst = max(ratios, key=ratios.__getitem__)
    return f"{said} {statistics.median(ratios.values()):.2f} and {ratios[worst]:.2f} times ({_told(worst)})"


def _told(place: tuple[str, str, int]) -> str:
    name, load, threshold = place
    return f"{name}, {load}" + (f", threshold {threshold}" if threshold else "")
