"""docs/findings.md from trials: tables, verdicts on what others claim, and the goals of `foresight`. Pure.

Whatever is a figure in the document is computed here; the sentences around say what it means and why it may be so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lab.floor import FLOOR
from lab.measures import ALL, Measures
from lab.paired import Estimate, difference_by_seed

BASE = "unified"
OURS = "foresight"
TTFT, E2E90, E2E99, TPOT = "ttft_p90_s", "e2e_p90_s", "e2e_p99_s", "tpot_p90_s"
PEERS = ("dynamo_kv", "sglang_cache_aware", "llmd_default", "aibrix_prefix", "preble")
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


# policy -> seed -> metric -> value, of all requests.
Cell = Mapping[str, Mapping[int, Mapping[str, float]]]


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


def render(results: Sequence[Result], loads: Mapping[str, Mapping[str, object]], missing: int, quick: bool) -> str:
    """The document. `loads` tells what a load's name means; `missing` trials were planned and are not there."""
    cells: dict[Place, dict[str, dict[int, Mapping[str, float]]]] = {}
    for one in results:
        cell = cells.setdefault(Place(one.trace, one.load, one.threshold), {})
        cell.setdefault(one.policy, {})[one.seed] = one.measures[ALL]
    parts = [_head(results, loads, missing, quick)]
    traces = list(dict.fromkeys(place.trace for place in cells))
    for trace in traces:
        main = {place: cell for place, cell in cells.items() if place.trace == trace and not place.threshold}
        parts += [_table(place, cell) for place, cell in main.items() if place.load not in ("slow", "overloaded")]
    first = {place.load: cell for place, cell in cells.items() if place.trace == traces[0] and not place.threshold}
    parts += [_claims({load: cell for load, cell in first.items() if load != "slow"})]
    parts += [_ours(cells), _ablations(first)]
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
        "waits, and whatever any request has computed is cached for all.",
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


def _values(cell: Cell, policy: str, metric: str) -> dict[int, float]:
    return {seed: found[metric] for seed, found in cell.get(policy, {}).items() if metric in found}


def _mean(cell: Cell, policy: str, metric: str) -> float | None:
    values = list(_values(cell, policy, metric).values())
    return statistics.fmean(values) if values else None


def _difference(cell: Cell, policy: str, metric: str, base: str = BASE) -> Estimate | None:
    if policy == base:
        return None
    return difference_by_seed(_values(cell, policy, metric), _values(cell, base, metric))


def _ratio(cell: Cell, policy: str, metric: str, base: str = BASE) -> float | None:
    """Mean over mean, of the seeds that both policies have run."""
    ours, theirs = _values(cell, policy, metric), _values(cell, base, metric)
    common = ours.keys() & theirs.keys()
    below = sum(theirs[seed] for seed in common)
    return sum(ours[seed] for seed in common) / below if below else None


def _told(difference: Estimate | None, scale: float = 1.0, digits: int = 2) -> str:
    if difference is None:
        return ""
    sign = f"{difference.mean * scale:+.{digits}f}"
    if difference.half_width is None:
        return f" ({sign})"
    if not difference.differs:
        return " (=)"
    return f" ({sign} ± {difference.half_width * scale:.{digits}f})"


def _number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _table(place: Place, cell: Cell) -> str:
    lines = [
        f"## {place.trace}: {place.name}",
        "| policy | TTFT p50 s | TTFT p90 s | TTFT p99 s | E2E p90 s | E2E p99 s | TPOT p90 ms | cached | failed | trials |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in sorted(_plain(cell), key=lambda name: (name != FLOOR, _mean(cell, name, TTFT) or 0.0)):
        row = [f"`{policy}`"]
        for metric, scale, digits in (
            ("ttft_p50_s", 1.0, 2),
            (TTFT, 1.0, 2),
            ("ttft_p99_s", 1.0, 1),
            (E2E90, 1.0, 1),
            (E2E99, 1.0, 1),
            (TPOT, 1e3, 0),
        ):
            mean = _mean(cell, policy, metric)
            row.append(
                _number(mean, scale, digits)
                + (_told(_difference(cell, policy, metric), scale, digits) if policy != FLOOR else "")
            )
        hits = _mean(cell, policy, "hit_ratio")
        row += [
            "-" if hits is None else f"{hits:.0%}",
            _number(_mean(cell, policy, "failed"), 1.0, 0),
            str(len(cell[policy])),
        ]
        lines.append("| " + " | ".join(row) + " |")
    note = "`foresight`'s cached share counts what its own slices left: it is no hit ratio to compare."
    return "\n".join([*lines, "", note] if OURS in cell else lines)


def _plain(cell: Cell) -> list[str]:
    return [name for name in cell if not name.startswith(f"{OURS} ")]


# ---- what others claim ----

Say = Callable[[Mapping[str, Cell]], list[str]]


def _by_load(first: Mapping[str, Cell], policy: str, base: str = BASE, metric: str = TTFT) -> list[str]:
    said = []
    for load, cell in first.items():
        difference, ratio = _difference(cell, policy, metric, base), _ratio(cell, policy, metric, base)
        if difference is not None and ratio is not None:
            said.append(f"{load}: {ratio - 1:+.0%}{_told(difference)} s, {difference.verdict}")
    return said


def _spread(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        values = list(_values(cell, BASE, TTFT).values())
        if len(values) > 1:
            said.append(f"{load}: ±{statistics.stdev(values) / statistics.fmean(values):.0%}")
    return said


def _worst(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        ratios = {name: ratio for name in _plain(cell) if (ratio := _ratio(cell, name, TTFT)) is not None}
        ranked = sorted(ratios, key=lambda name: -ratios[name])[:3]
        if ranked:
            said.append(f"{load}: " + ", ".join(f"`{name}` {ratios[name]:.1f} x" for name in ranked))
    return said


def _shares(policy: str) -> Say:
    def say(first: Mapping[str, Cell]) -> list[str]:
        found = [(load, _mean(cell, policy, "offloads")) for load, cell in first.items()]
        return [f"{load}: {share:.1%} of all answers" for load, share in found if share is not None]

    return say


def _best_peer(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        peers = [name for name in PEERS if name in cell]
        if peers:
            best = min(peers, key=lambda name: _ratio(cell, name, TTFT) or float("inf"))
            said.append(f"{load}: `{best}`{_told(_difference(cell, best, TTFT))} s")
    return said


def _against(policy: str, base: str = BASE, metric: str = TTFT) -> Say:
    return lambda first: _by_load(first, policy, base, metric)


CLAIMS: Sequence[tuple[str, Sequence[tuple[str, Say]], str]] = (
    (
        "One run proves nothing: it differs by 7 % from the next.",
        (("Standard deviation of `unified`'s TTFT p90 over the draws", _spread),),
        "Here the draws move when sessions start, which a repetition on one cluster does not; within a draw "
        "the lab repeats itself to "
        "the bit. Differences are therefore taken draw by draw.",
    ),
    (
        "`unified` with factor 1.3 and decode weight 0.01 (A + B') is better than with 2.0 and 0.",
        (("The first setting's TTFT p90 against the default's", _against("unified (of 2.0, dw 0)")),),
        "The stricter gate leaves an owner sooner. That pays where owners are really crowded; where they are "
        "not, it only costs cache.",
    ),
    (
        "Both affinity and load are needed: policies that see one of them lose.",
        (
            ("`sticky` (affinity alone)", _against("sticky")),
            ("`least_requests` (load alone)", _against("least_requests")),
            ("The three worst, as multiples of `unified`", _worst),
        ),
        "Spreading a session over the fleet computes its context again on every instance, and the copies evict "
        "each other; most of a "
        "blind policy's time is prefill that had been done already.",
    ),
    (
        "Without affinity, `lmetric` falls behind `unified`.",
        (
            ("`lmetric`", _against("lmetric")),
            ("`lmetric1`, its published form", _against("lmetric1")),
            ("`lpwl`, without the number of requests", _against("lpwl")),
        ),
        "`lmetric` multiplies by the number of requests, so an idle instance scores 0 whatever it would have "
        "to compute. The published "
        "form adds one and does not. `lpwl` needs no gate at all: exact knowledge of what is new on each "
        "instance is affinity enough.",
    ),
    (
        "Elastic offload: most HEAVY requests at low load, almost none when saturated.",
        (
            ("`elastic` (cost) offloads", _shares("elastic")),
            ("`elastic` (heuristic) offloads", _shares("elastic (heuristic)")),
        ),
        "The cost decider spares only decodes: it offloads where the cache's owner decodes while another "
        "instance has nothing open. When "
        "all is idle there is nothing to spare, and when all is busy nobody to take it, so its share need not "
        "fall from the start.",
    ),
    (
        "Offload and migration pay queue, prefill, transfer and a second start; they rarely win.",
        (
            ("`adaptive_offload` (always)", _against("adaptive_offload")),
            ("`elastic`", _against("elastic")),
            ("`elastic`, TPOT p90", _against("elastic", metric=TPOT)),
            ("`migrate`", _against("migrate")),
            ("`migrate` (cache_rich)", _against("migrate (cache_rich)")),
        ),
        "An offloaded prefix is held twice, and what it evicts is computed again later. Always to offload "
        "shows that price in full; a "
        "policy that seldom does is hard to tell from `unified`.",
    ),
    (
        "Other routers' scores, given our exact knowledge, against `unified`.",
        (("The best of them by TTFT p90", _best_peer), *((f"`{name}`", _against(name)) for name in PEERS)),
        "They are compared by their scores alone: at home they also work with older and rougher knowledge. "
        "Those that weigh the tokens "
        "still to be prefilled come near `lpwl`; those that look at a cache first and at load only beyond a "
        "threshold leave queues "
        "standing behind long prompts.",
    ),
)

NOT_TRIED = """Not reproduced here: that counters only scraped once a second cost a router 20 to 48 % of its TTFT p90 (Pointsman
counts what it places itself, so none of its policies lives on scraped counters alone), and that a cold prefill multiplies
the TPOT of decodes beside it (that is the engine model's assumption, not its result)."""


def _claims(first: Mapping[str, Cell]) -> str:
    lines = ["## What is claimed, and what the lab says"]
    for claim, asked, why in CLAIMS:
        said = [(label, say(first)) for label, say in asked]
        if any(found for _, found in said):
            lines += ["", f"**{claim}**", ""]
            lines += [f"- {label}: {'; '.join(found)}." for label, found in said if found]
            lines += ["", why]
    return "\n".join([*lines, "", NOT_TRIED])


# ---- foresight ----

LOWEST, CLOSED = "lowest", "closed"
FORESIGHT_TEXT = """Tuned on: `generated` of seeds 0 to 3, and every second session of `agentic` on four instances, seeds 0 to 3;
two prices were dropped for what they did on `agentic`, saturated, seeds 7 and 8. Which requests paid in E2E was looked up on
`agentic`, light, seed 100. The trials here are of other seeds; nothing was tuned on `chat`.

Why it wins: a prompt's seconds are predicted, so an instance that has little to do can be told from one that has few requests;
heavy prompts go in slices, so what is small waits for a slice and not for a whole prompt; and what waits, waits in the router,
shortest first, until its own cache is free, instead of in the queue of an engine that was picked too early.
What it costs: an answer that begins between two slices gets a token per chunk until the heavy prompt is through. Where others
are idle the score avoids that (without: the ablation); where none is, decodes pay for TTFT, and the heaviest prompts wait for
everything shorter. What is left to the floor is mostly prefill of what was evicted, which no placement recovers.
Where engines cut long prompts themselves (threshold), the engine does what slices would, and less is left to win."""


def _ours(cells: Mapping[Place, Cell]) -> str:
    lines = [
        "## `foresight`",
        "One setting for all loads. Closed is the share of `unified`'s gap to the floor in TTFT p90. The best "
        "other is the policy with the",
        "lowest mean of those that were run there, on the same draws; beside it stands its difference to `foresight`.",
        "",
        "| cell | floor | `unified` | best other | `foresight` | closed | goal | E2E p90 | E2E p99 | TPOT p90 | not met |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    unmet: list[list[str]] = []
    for place, cell in cells.items():
        ours, base, floor = (_mean(cell, name, TTFT) for name in (OURS, BASE, FLOOR))
        if ours is None or base is None or floor is None or base <= floor:
            continue
        others = [name for name in _plain(cell) if name not in (OURS, FLOOR)]
        best = min(others, key=lambda name: _ratio(cell, name, TTFT, OURS) or float("inf"))
        closed = (base - ours) / (base - floor)
        goal = None if place.load in ("slow", "overloaded") else GOAL_CLOSED_FLAG if place.threshold else GOAL_CLOSED
        failed = _unmet(cell, (_ratio(cell, best, TTFT, OURS) or 0.0) > 1.0, goal is None or closed >= goal)
        unmet.append(failed)
        tpot, tpot_base = _mean(cell, OURS, TPOT), _mean(cell, BASE, TPOT)
        lines.append(
            f"| {place.trace}, {place.name} | {floor:.2f} | {base:.2f} | `{best}`{_told(_difference(cell, best, TTFT, OURS))} | "
            f"{ours:.2f}{_told(_difference(cell, OURS, TTFT))} | {closed:.0%} | {'-' if goal is None else f'{goal:.0%}'} | "
            f"{_relative(cell, E2E90)} | {_relative(cell, E2E99)} | "
            f"{'-' if not tpot or not tpot_base else f'{tpot / tpot_base:.1f} x'} | {', '.join(failed) or 'none'} |"
        )
    if not unmet:
        return ""
    ttft = sum(not {LOWEST, CLOSED} & {*failed} for failed in unmet)
    lines += [
        "",
        f"Every goal is met in {sum(not failed for failed in unmet)} of {len(unmet)} cells, those of TTFT p90 in {ttft}.",
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
    tpot, base = _mean(cell, OURS, TPOT), _mean(cell, BASE, TPOT)
    return [
        *([] if lowest else [LOWEST]),
        *([] if closed else [CLOSED]),
        *(
            name
            for metric, name in worse.items()
            if (found := _difference(cell, OURS, metric)) is not None
            and found.mean > 0
            and (found.half_width is None or found.differs)
        ),
        *(["TPOT p90"] if tpot and base and tpot > GOAL_TPOT * base else []),
    ]


def _relative(cell: Cell, metric: str) -> str:
    difference, base = _difference(cell, OURS, metric), _mean(cell, BASE, metric)
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
                mean = _mean(first[load], name, metric)
                row.append(_number(mean) + _told(_difference(first[load], name, metric, OURS)))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)
