"""docs/findings.md from trials: tables, verdicts on what others claim, and the goals of `foresight`. Pure.

Whatever is a figure in the document is computed here; the sentences around say what it means and why it may be so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lab.calibration import GOAL, Comparison, table, worst
from lab.findings_claims import claims_text
from lab.findings_elsewhere import ELSEWHERE, elsewhere_text
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
    difference_of,
    mean_of,
    number,
    on_common_draws,
    plain,
    rivals,
    told,
)
from lab.floor import BOUNDS, FLOOR, POOLED
from lab.measures import ALL, Measures

GOAL_CLOSED, GOAL_CLOSED_FLAG, GOAL_TPOT = 0.75, 0.5, 1.8


class Result(Protocol):
    """What is told of a trial."""

    @property
    def trace(self) -> str: ...
    @property
    def load(self) -> str: ...
    @property
    def threshold(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def commit(self) -> str: ...
    @property
    def measures(self) -> Measures: ...


@dataclass(frozen=True)
class Place:
    """Where a table's trials were run."""

    trace: str
    load: str
    threshold: int

    @property
    def name(self) -> str:
        """For people."""
        return self.load + (f", threshold {self.threshold}" if self.threshold else "")


def render(
    results: Sequence[Result],
    loads: Mapping[str, Mapping[str, object]],
    missing: int,
    quick: bool,
    calibrated: Sequence[tuple[str, Sequence[Comparison]]] = (),
) -> str:
    """The document. `loads` tells what a load's name means; `missing` trials were planned and are not there; `calibrated` is what
    a calibration found."""
    cells: dict[Place, dict[str, dict[int, Mapping[str, float]]]] = {}
    for one in results:
        cell = cells.setdefault(Place(one.trace, one.load, one.threshold), {})
        cell.setdefault(one.policy, {})[one.seed] = one.measures[ALL]
    elsewhere = {place: cells.pop(place) for place in list(cells) if place.trace in ELSEWHERE}
    parts = [_head(results, loads, missing, quick)]
    traces = list(dict.fromkeys(place.trace for place in cells))
    for trace in traces:
        main = {place: cell for place, cell in cells.items() if place.trace == trace and not place.threshold}
        parts += [_table(place, cell) for place, cell in main.items() if place.load not in ("slow", "overloaded")]
    first = {place.load: cell for place, cell in cells.items() if place.trace == traces[0] and not place.threshold}
    parts += [claims_text({load: cell for load, cell in first.items() if load != "slow"})]
    other = {(place.trace, place.load, place.threshold): cell for place, cell in elsewhere.items()}
    parts += [_ours(cells), _ablations(first), elsewhere_text(other), _calibration(calibrated)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(results: Sequence[Result], loads: Mapping[str, Mapping[str, object]], missing: int, quick: bool) -> str:
    commits = ", ".join(sorted({one.commit[:12] for one in results if one.commit})) or "unknown"
    seeds = sorted({one.seed for one in results})
    lines = [
        "# Findings",
        "Made by `pointsman findings`, which runs the trials in the lab (lab/README.md says what it models and "
        "what not) and writes",
        "this page; every figure comes from them. Nothing here was measured on GPUs: these are modelled "
        "engines with the cost of one",
        "model on one kind of device, and real traces and generated sessions on top.",
        "",
        f"Trials: {len(results)}, seeds {seeds[0]} to {seeds[-1]} (so at most {len(seeds)} for each cell), at {commits}."
        + (f" **{missing} of the trials that were planned are missing**, rivals' first of all." if missing else ""),
        "Where a policy has fewer trials its means are over fewer draws, its differences over those that both have.",
        "All policies of a seed see the same draw. Beside a mean stands the mean of the paired differences to "
        "`unified` and its 95 %",
        "confidence interval (Student's t); `=` is no difference: the interval holds 0. `floor` is no policy "
        "but the bound: nothing",
        "waits, and whatever any request has computed is cached for all. In `pooled` nothing waits either, and all have one "
        "cache, as large",
        "as all instances' together, which evicts what was used least recently, as theirs do.",
        "",
        "| load | sessions start | steps cost | KV blocks of 16 |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {load['rate']:g} x as recorded | {load['slow']:g} x the reference | {load['kv_blocks']:,} |"
        for name, load in loads.items()
    ]
    lines += [
        "",
        "Traces: `agentic`, segments of real coding-agent sessions, each session's start jittered; "
        "`generated`, sessions made up by",
        "`lab/generate.py`, a fresh draw for each seed; `chat`, the first sessions of the Mooncake "
        "conversation trace. No policy's",
        "settings vary with the load. A router that asks takes 2 ms, a tokenizer 1 us per token.",
    ]
    if quick:
        lines.insert(
            1, "**A quick run over a small part of each trace: it shows that the command works, and proves nothing.**"
        )
    return "\n".join(lines)


# ---- tables ----


def _table(place: Place, cell: Cell) -> str:
    lines = [
        f"## {place.trace}: {place.name}",
        "| policy | TTFT p50 s | TTFT p90 s | TTFT p99 s | E2E p90 s | E2E p99 s | TPOT p90 ms | cached | failed | trials |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in sorted(plain(cell), key=lambda name: (name not in BOUNDS, mean_of(cell, name, TTFT) or 0.0)):
        row = [f"`{policy}`"]
        for metric, scale, digits in (
            ("ttft_p50_s", 1.0, 2),
            (TTFT, 1.0, 2),
            (TTFT99, 1.0, 1),
            (E2E90, 1.0, 1),
            (E2E99, 1.0, 1),
            (TPOT, 1e3, 0),
        ):
            mean = mean_of(cell, policy, metric)
            row.append(
                number(mean, scale, digits)
                + (told(difference_of(cell, policy, metric), scale, digits) if policy not in BOUNDS else "")
            )
        hits = mean_of(cell, policy, "hit_ratio")
        row += [
            "-" if hits is None else f"{hits:.0%}",
            number(mean_of(cell, policy, "failed"), 1.0, 0),
            str(len(cell[policy])),
        ]
        lines.append("| " + " | ".join(row) + " |")
    note = "`foresight`'s cached share counts what its own slices left: it is no hit ratio to compare."
    return "\n".join([*lines, "", note] if OURS in cell else lines)


# ---- foresight ----

LOWEST, CLOSED = "lowest", "closed"
FORESIGHT_TEXT = """Tuned on: `generated`, seeds 0 to 3, at up to 1.7 times as recorded; every second session of `agentic` on four
instances, seeds 0 to 3; and all of `agentic`, saturated, seeds 7 and 8; how slices are cut and who goes on, on seeds 0 to 7 of
the first two and on sessions 1,001 to 2,000 of `chat`'s trace, saturated. That the first form answered slowly was seen on
`agentic`, light, seed 100, that it was weak under overload on trials of seeds 100 to 103, and that short slices starve the
heaviest prompts on trials of seeds 100 to 104; all were mended on the draws named first. No number was chosen by trials of this
page. Five further draws of each cell, seeds 105 to 109, were run once, after all that, with `floor` and `unified` alone. Closed
at light load, knee and saturation: `agentic` 79, 80 and 84 %, `generated` 84, 77 and 75 %, `chat` 35, 66 and 73 %; with a
threshold `agentic` 55, 45 and 78 %, `generated` 59, 49 and 67 %. E2E p90 and p99 were not worse than `unified`'s in any of the 20
cells, TPOT p90 at most 1.5 times, TTFT p99 0.9 to 1.3 times.

Why it wins: a prompt's seconds are predicted, so an instance that has little to do can be told from one that has few requests;
heavy prompts go in slices, so what is small waits for a slice and not for a whole prompt; of the heavy ones on an instance only
that goes on which has the least left, so that they do not make each other wait; and what waits, waits in the router, shortest
first, until its own cache is free, instead of in the queue of an engine that was picked too early.
What it costs: an answer that begins between two slices gets a token per chunk until the heavy prompt is through. Where others
are idle the score avoids that (without it: the ablation); where none is, decodes pay for TTFT. The heaviest prompts wait for
everything shorter: TTFT p99 is the price in `chat` and where engines are slow. Under overload what is computed of a sliced prompt
may be evicted before its next slice, and answers beside slices hold their KV for longer, which evicts more. Decodes are therefore
left alone the more, the more instances have prefills.
What is left to the floor, taken apart request by request on draws for tuning (and sessions 1,001 to 2,000 of `chat`'s trace): in
`chat` 85 % of the gap (light; saturated 70 %) is prefill of what was evicted; elsewhere 30 to 55 % is, what is cached on another
instance makes up 0 to 19 %, and most of the rest is waiting for others' prefills or computing beside them. What is evicted
between two slices makes up 3 % at most; decodes and the slices' way there and back do not show. Beyond what `pooled` closes it
takes better-kept caches, not better places. One that knew what will be asked for would lose nothing: pooled, it came to the
floor's TTFT p90 in the five cells that were tried. What a router can know of a session, how many turns it has had and how long it
has been gone, is too little for that: to evict first what is least likely to return by these two, as learned from the very draw,
wins 0.15 s of the 0.66 that `pooled` lacks in `chat`, light, and nothing saturated or in `agentic`. So nothing was built that
touches caches to keep them.
Where engines cut long prompts themselves (threshold), the engine does much of what slices would, and less is left to win. But a
lone prompt has its whole step, which takes seconds deep in a long prompt, and who comes meanwhile waits for that; and two prompts
that share a step are both through only when the second is. So heavy prompts go in slices there, too, and light ones of more than
a chunk one after another.

Tried and dropped: a price on computing where much was computed lately (5 % more of the gap at light load, and evictions that
feed on themselves when saturated); pauses for decodes between slices (E2E p90 lower by a tenth, TTFT p90 higher); no slices
where the KV is nearly full (overloaded, fewer tokens computed twice, and all the waiting back); a higher or lower price on
leaving a cache, or none where instances are idle (no difference beyond luck); among instances that are equal for it, that which
had least to compute of late, whose cache is the stalest (no difference in six cells, either); a price on instances to which
sessions are likely to return soon, by the answers that ended there in the last minute (TTFT p90 the same, E2E p99 up to half as
much again). And, by the share of the gap closed in six or seven cells of draws for tuning: heavy prompts that take turns, slice
by slice (63 % with or without, but TTFT p99 up to 30 % longer: all are through only when the last one is); slices that grow
with a prompt's wait (58 instead of 61 %, p99 the same); what goes before a heavy prompt at its full price in the score (65
instead of 67 %, and E2E p90 in `chat` 6 % over `unified`'s instead of 11 % under it). Slices of 0.3 to 0.75 u, light up to 1.5
or 2 u, a start where 0.1 to 0.4 u go before: all within luck.

What an engine takes to read a request before it schedules it, which the trials of this page leave out, is paid again for each
slice. With 30 ms of it in the mean, three fresh draws at the knee: 78 % closed instead of 80 (`agentic`), 76 instead of 78
(`generated`), and TTFT p99 44 s instead of 46, and 57 instead of 50. Slices of 0.75 u and at least 4,096 tokens close 77 and 75 %
without it, 76 and 78 % with it, at a TTFT p99 of 38 to 45 s: where requests take long to reach the engine, set `slice_u` and
`slice_min_tokens` so."""


def _ours(cells: Mapping[Place, Cell]) -> str:
    lines = [
        "## `foresight`",
        "One setting for all loads. Closed is the share of `unified`'s gap to the floor in TTFT p90. The best "
        "other is the policy with the",
        "lowest mean of those that were run there, on the same draws; beside it stands its difference to `foresight`. "
        "Only draws count that",
        "`floor`, `unified` and `foresight` have run. What `pooled` would close is about what is left to places: the rest of "
        "the gap is",
        "what caches of this size lose that evict what was used least recently.",
        "",
        "| cell | floor | `unified` | best other | `foresight` | closed | goal | `pooled` closes | TTFT p99 "
        "| E2E p90 | E2E p99 | TPOT p90 | not met |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    unmet: list[list[str]] = []
    alone = 0
    for place, whole in cells.items():
        # A share of means has to be one of the same draws' means.
        cell = on_common_draws(whole, (OURS, BASE, FLOOR))
        ours, base, floor = (mean_of(cell, name, TTFT) for name in (OURS, BASE, FLOOR))
        closed, pooled = closed_by(cell, OURS), closed_by(cell, POOLED)
        if ours is None or base is None or floor is None or closed is None:
            continue
        best, ratio = best_rival(cell)
        goal = None if place.load in ("slow", "overloaded") else GOAL_CLOSED_FLAG if place.threshold else GOAL_CLOSED
        failed = _unmet(cell, ratio > 1.0, goal is None or closed >= goal)
        unmet.append(failed)
        alone += rivals(cell) == [BASE]
        tpot, tpot_base = mean_of(cell, OURS, TPOT), mean_of(cell, BASE, TPOT)
        lines.append(
            f"| {place.trace}, {place.name} | {floor:.2f} | {base:.2f} | `{best}`{told(difference_of(cell, best, TTFT, OURS))} | "
            f"{ours:.2f}{told(difference_of(cell, OURS, TTFT))} | {closed:.0%} | {'-' if goal is None else f'{goal:.0%}'} | "
            f"{'-' if pooled is None else f'{pooled:.0%}'} | "
            f"{_relative(cell, TTFT99)} | {_relative(cell, E2E90)} | {_relative(cell, E2E99)} | "
            f"{'-' if not tpot or not tpot_base else f'{tpot / tpot_base:.1f} x'} | {', '.join(failed) or 'none'} |"
        )
    if not unmet:
        return ""
    ttft = sum(not {LOWEST, CLOSED} & {*failed} for failed in unmet)
    lines += [
        "",
        f"Every goal is met in {sum(not failed for failed in unmet)} of {len(unmet)} cells, those of TTFT p90 in {ttft}."
        + (f" No rival but `unified` was run in {alone} of them: what is lowest there is not known." if alone else ""),
        "The goals: TTFT p90 lowest of all in the mean; so much of the gap closed (slow and overloaded cells have no such goal);",
        "E2E p90 and p99 not worse than `unified`'s, an interval that holds 0 being no worse; "
        f"TPOT p90 at most {GOAL_TPOT:g} x.",
        "",
        *FORESIGHT_TEXT.splitlines(),
    ]
    return "\n".join(lines)


def _unmet(cell: Cell, lowest: bool, closed: bool) -> list[str]:
    """The goals that a cell does not meet."""
    worse = {E2E90: "E2E p90", E2E99: "E2E p99"}
    tpot, base = mean_of(cell, OURS, TPOT), mean_of(cell, BASE, TPOT)
    return [
        *([] if lowest else [LOWEST]),
        *([] if closed else [CLOSED]),
        *(
            name
            for metric, name in worse.items()
            if (found := difference_of(cell, OURS, metric)) is not None
            and found.mean > 0
            and (found.half_width is None or found.differs)
        ),
        *(["TPOT p90"] if tpot and base and tpot > GOAL_TPOT * base else []),
    ]


def _relative(cell: Cell, metric: str) -> str:
    difference, base = difference_of(cell, OURS, metric), mean_of(cell, BASE, metric)
    if difference is None or not base:
        return "-"
    return "=" if difference.verdict == "no difference" else f"{difference.mean / base:+.0%}"


def _ablations(first: Mapping[str, Cell]) -> str:
    names = list(dict.fromkeys(name for cell in first.values() for name in cell if name.startswith(f"{OURS} ")))
    if not names:
        return ""
    loads = [load for load, cell in first.items() if any(name in cell for name in names)]
    lines = [
        "### What each part is worth",
        "TTFT p90 and E2E p90 in s, with the paired difference to the whole policy.",
        "",
        "| `foresight` | " + " | ".join(f"{load}: TTFT p90 | {load}: E2E p90" for load in loads) + " |",
        "|---" * (1 + 2 * len(loads)) + "|",
    ]
    for name in (OURS, *names):
        row = [name.removeprefix(f"{OURS} ") if name != OURS else "as it is"]
        for load in loads:
            for metric in (TTFT, E2E90):
                mean = mean_of(first[load], name, metric)
                row.append(number(mean) + told(difference_of(first[load], name, metric, OURS)))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _calibration(loads: Sequence[tuple[str, Sequence[Comparison]]]) -> str:
    if not loads:
        return ""
    lines = [
        "## Is the model true?",
        "`python -m tests.engine.calibrate`: two real vLLM engines on CPU answer one small agentic trace at several loads,",
        "live through gateway and router; each load is then simulated with what was measured right before and after it:",
        "what steps cost, one engine at a time, what a request pays beside them up to its first token, and what a token does",
        "that gateway and client carry away. The engines have a core each; client, gateway and router run on the same two, and",
        "that one of them keeps an engine from its core for a moment is not simulated.",
        "",
        *table(loads).splitlines(),
        "",
        f"The greatest error is {worst(loads):.0%}; the goal is {GOAL:.0%}.",
    ]
    return "\n".join(lines)
