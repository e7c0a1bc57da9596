"""docs/scoreboard.md, written from stored trials: what was run, who wins, and every figure with its ratio to Pointsman's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.rivals.contenders import ABSENT, POINTSMAN, contenders
from bench.side_by_side import GOALS as CPU_GOALS
from studies.marked_sections import BOARD, write_front_section
from studies.scoreboard.board import HELD_OUT, VERSION, Cell, Results, SavedFigures, StoredTrial
from studies.scoreboard.comparison import (
    AHEAD,
    BEHIND,
    CPU,
    E2E,
    EVEN,
    FAILED_SHARE,
    GOALS,
    HEADLINES,
    HITS,
    MARKED_ERROR,
    PREDICTED,
    SESSION,
    TPOT,
    TTFT,
    Column,
    Comparison,
    Entry,
    Goal,
)
from studies.scoreboard.costs import Costs
from studies.scoreboard.plots import cpu_plot, ttft_plot
from studies.scoreboard.sequential import LEVEL, MOST

_OPENING = """# Scoreboard

Pointsman and other routers' own programs in front of the same engines, with the same requests. `make scoreboard` runs all of it
again and writes this page. A ratio is to {reference} in the same rounds; in brackets is its interval, which is true to {sure:.0%}
for each router and measure by itself, although a router gets no further rounds when its comparison is decided
(`studies/scoreboard/sequential.py`). An interval that contains 1 is no difference beyond chance. All routers have {rounds}
rounds, and Pointsman, the best rivals and nginx up to {most}; means are over a router's own rounds, so compare ratios. All
programs run with their defaults.

Run on {date} at commit `{commit}`, on {machine}. {note}

![TTFT p90 of each router](scoreboard_ttft.svg)

![CPU time of each router per request](scoreboard_cpu.svg)
"""
EARLIER = (
    "These trials are of an earlier board, which had other cells, a fixed number of rounds, and in two cells other engines or\n"
    "another client."
)


def write_page(results: Results, out: Path) -> None:
    """Write the page to `out`, its plots beside it, and README's section."""
    cells, facts = results.plan()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(cells, results.trials, facts, results.figures(), results.costs()))
    comparisons = _comparisons(cells, results.trials)
    out.with_name("scoreboard_ttft.svg").write_text(ttft_plot(comparisons))
    out.with_name("scoreboard_cpu.svg").write_text(cpu_plot(comparisons))
    write_front_section(out, BOARD, front_section(cells, results.trials))


def render(
    cells: Sequence[Cell],
    trials: Sequence[StoredTrial],
    facts: dict[str, object],
    figures: SavedFigures | None = None,
    costs: Costs | None = None,
) -> str:
    """Return the page. `facts`: commit, machine, rounds and date of the run, and a note about it. `figures`: those of
    side_by_side. `costs`: those that the lab's predictions are made with."""
    comparisons = _comparisons(cells, trials)
    references = dict.fromkeys(comparison.reference for comparison in comparisons if comparison.reference)
    known = {"commit": "", "machine": "", "rounds": 0, "date": "", "note": ""} | facts
    named = {"reference": " or ".join(references) or "nothing", "sure": 1 - LEVEL, "most": MOST}
    of_this_board = facts.get("board") == VERSION
    parts = [
        _OPENING.format(**{**known, **named}),
        *([] if of_this_board else [EARLIER + "\n"]),
        *([_goals(comparisons)] if of_this_board else []),
        "## Who wins\n",
        _winners(comparisons),
        "## What was run\n",
        _traffic(comparisons, trials),
        _missing(cells, trials, int(str(known["rounds"]))),
        _programs(trials),
        *(_cell(comparison) for comparison in comparisons),
        *filter(None, [_predictions(comparisons, costs)]),
        *([_side_by_side(figures)] if figures is not None else []),
    ]
    return "\n".join(parts)


def front_section(cells: Sequence[Cell], trials: Sequence[StoredTrial]) -> str:
    """Return README's section: TTFT by cell, and where Pointsman is behind, ahead, and neither."""
    comparisons = _comparisons(cells, trials)
    references = list(dict.fromkeys(comparison.reference for comparison in comparisons))
    names = [name for comparison in comparisons for name in comparison.ranked()]
    lines = [
        f"| router | {' | '.join(comparison.cell.title for comparison in comparisons)} | {CPU.name} |",
        f"|---|{'---|' * (len(comparisons) + 1)}",
    ]
    for name in dict.fromkeys([*references, *names]):
        fields = [_front_field(comparison, name, TTFT[:2]) for comparison in comparisons]
        lines.append(f"| {name} | {' | '.join([*fields, _front_field(comparisons[0], name, [CPU])])} |")
    standings = [
        (column, comparison, comparison.standing(column)) for column in HEADLINES for comparison in comparisons
    ]
    count = sum(len(found) for _, _, standing in standings for found in standing.values())
    lines += [
        "",
        f"TTFT p50 / p90: of {' or '.join(references)} in {TTFT[0].unit} (CPU time in {CPU.unit}), of others as multiples of it",
        "in the same rounds; `=`: no difference beyond chance (of p90). Of all comparisons with other products' routers",
        f"({len(comparisons)} kinds of traffic, {len(HEADLINES)} measures), with the other's figure divided by Pointsman's:",
        "",
        *(
            textwrap.fill(f"- {label}: {_places(standings, word)}.", 150, subsequent_indent="  ")
            for word, label in ((BEHIND, f"**{BEHIND}**"), (AHEAD, AHEAD))
        ),
        f"- no difference beyond chance: {sum(len(standing[EVEN]) for _, _, standing in standings)} of {count}.",
    ]
    return "\n".join(lines)


def _front_field(one: Comparison, name: str, columns: Sequence[Column]) -> str:
    """Return measures, of other routers as ratios to the reference's, with "=" where the last does not differ beyond chance."""
    if name not in one.trials:
        return "-"
    entries = [one.entry(name, column) for column in columns]
    if name == one.reference:
        return " / ".join(
            field(entry, column, is_reference=True) for entry, column in zip(entries, columns, strict=True)
        )
    text = " / ".join("-" if entry.ratio is None else f"x{entry.ratio:.2f}" for entry in entries)
    return text if entries[-1].sure else f"{text} ="


def _places(standings: Sequence[tuple[Column, Comparison, dict[str, list[tuple[str, float]]]]], word: str) -> str:
    """Return the measures in which the reference is `word` of others: how many, and the ratios, or all names of up to three."""
    found: dict[str, list[tuple[str, float]]] = {}
    counts: dict[str, int] = {}
    for column, comparison, standing in standings:
        counts[column.name] = counts.get(column.name, 0) + sum(map(len, standing.values()))
        for name, ratio in standing[word]:
            found.setdefault(column.name, []).append((f"{comparison.cell.title}: {name}", ratio))
    parts = []
    for measure, places in found.items():
        ratios = [ratio for _, ratio in places]
        text = f"{len(places)} of {counts[measure]}, x{min(ratios):.2f} to x{max(ratios):.2f}"
        if len(places) <= 3:
            text = "; ".join(f"{name} x{ratio:.2f}" for name, ratio in places)
        parts.append(f"{measure} ({text})")
    return ", ".join(parts) or "none"


def _comparisons(cells: Sequence[Cell], trials: Iterable[StoredTrial]) -> list[Comparison]:
    kept = list(trials)
    return [Comparison(cell, kept) for cell in cells if any(trial.cell == cell.name for trial in kept)]


def _goals(comparisons: Sequence[Comparison]) -> str:
    """Return the goals, and whether they are met: "open" where the interval contains the limit."""
    rows = [
        f"| {goal.column.name}: {goal.title} | {comparison.cell.title} | {_goal(comparison, goal)} |"
        for goal in GOALS
        for comparison in comparisons
        if comparison.cell.name in goal.cells or not goal.cells
    ]
    return "\n".join(["## Goals\n", "| goal | traffic | result |", "|---|---|---|", *rows, ""])


def _goal(comparison: Comparison, goal: Goal) -> str:
    result, names = comparison.goal(goal)
    if names == [comparison.reference]:
        return f"**missed**: {comparison.reference} failed {comparison.failed_share(comparison.reference):.1%} of its requests"
    ratios = [(name, comparison.entry(name, goal.column).ratio or 0.0) for name in names]
    if goal.limit != 1.0:
        ratios = [(name, 1 / ratio) for name, ratio in ratios if ratio]
    of = ", ".join(f"{name} x{ratio:.2f}" for name, ratio in ratios)
    return f"{f'**{result}**' if result == 'missed' else result}{f': {of}' if of else ''}"


def _winners(comparisons: Sequence[Comparison]) -> str:
    """Return the first table: for each cell and measure how many rivals Pointsman is ahead of, and which it is behind."""
    lines = [
        "For each measure the number of other products' routers that Pointsman is ahead of, those that it is behind, each with",
        "its figure divided by Pointsman's, and the number of those without a difference beyond chance. A router that failed",
        "more than 1 % of its requests is left out here.",
        "",
        f"| traffic | {' | '.join(column.name for column in HEADLINES)} |",
        f"|---|{'---|' * len(HEADLINES)}",
    ]
    for comparison in comparisons:
        fields = [_winner(comparison.standing(column)) for column in HEADLINES]
        lines.append(f"| {comparison.cell.title} | {' | '.join(fields)} |")
    failing = [
        f"{comparison.cell.title}: {name} {comparison.failed_share(name):.1%}"
        for comparison in comparisons
        for name in comparison.trials
        if comparison.failed_share(name) > FAILED_SHARE
    ]
    return "\n".join(lines) + "\n" + (f"\nFailed more: {'; '.join(failing)}.\n" if failing else "")


def _winner(standing: dict[str, list[tuple[str, float]]]) -> str:
    behind = ", ".join(f"{name} x{ratio:.2f}" for name, ratio in standing[BEHIND])
    parts = [
        f"ahead of {len(standing[AHEAD])}" if standing[AHEAD] else "",
        f"**{BEHIND}** {behind}" if behind else "",
        f"even with {len(standing[EVEN])}" if standing[EVEN] else "",
    ]
    return "; ".join(filter(None, parts)) or "-"


def _traffic(comparisons: Sequence[Comparison], trials: Iterable[StoredTrial]) -> str:
    sources = {trial.cell: trial.source for trial in trials if trial.source}
    lines = [
        "| traffic | requests of sessions | source | engines | rounds | decided by |",
        "|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        cell = comparison.cell
        first = next((measures for of in comparison.trials.values() for measures in of.values()), None)
        engines = f"{cell.count} emulated, {cell.speedup:g} times as fast as the modelled one"
        count = f"{first.requests} of {first.sessions}" if first else "-"
        source, decides = sources.get(cell.name, "-"), ", ".join(cell.decides)
        lines.append(f"| {cell.title} | {count} | {source} | {engines} | {comparison.rounds} | {decides} |")
    return "\n".join(lines) + "\n\n" + _NOTES


_NOTES = """\
Latencies are those that the client saw, in seconds of the clock, also where engines are faster than the modelled one:
a router's own time then weighs more than it would in front of the modelled engine. A session is timed from its first
request to its last answer, pauses included. The hit ratio is the share of the prompts' tokens that no engine
computed, by the engines' own count. A router's CPU time is that of all its processes while the requests ran; Dynamo's
workers only connect its front end to the engines here, and are counted apart. A router begins each trial without
anything learned. The emulated engines answer `/render`, which vllm-router asks for each prompt; vLLM does with
`--enable-scale-out`. They tokenise by vLLM's library, which their speed-up does not make faster: it, too, weighs more
than in front of the modelled engine, and the engines' CPU time shows how much of it a router asks for. Clients send
`X-Session-ID`; those of ThunderAgent Dynamo's headers, and a request at a session's end. ThunderAgent's router is in
Dynamo's package, which calls it experimental. One request of a word goes first to each router, and the caches of the
engines are empty otherwise.
"""


def _missing(cells: Sequence[Cell], trials: Sequence[StoredTrial], rounds: int) -> str:
    """Return a sentence that names what has fewer rounds than all routers should have; empty if nothing is missing."""
    short = []
    for cell in cells:
        found: dict[str, int] = {}
        for trial in trials:
            if trial.cell == cell.name and trial.round != HELD_OUT:
                found[trial.contender] = found.get(trial.contender, 0) + (rounds if trial.problem else 1)
        everyone = {trial.contender for trial in trials if cell.everyone and trial.contender not in _ADMITTING}
        names = sorted(name for name in everyone | set(found) if found.get(name, 0) < rounds)
        if not found:
            short.append(f"{cell.title}: all")
        elif names:
            short.append(f"{cell.title}: {', '.join(f'{name} has {found.get(name, 0)}' for name in names)}")
    return f"Missing of {rounds} rounds: {'; '.join(short)}.\n" if short else ""


# Routers that are only in cells with admission.
_ADMITTING = {contender.name for contender in contenders() if contender.admits}
# How trials name the command line of Pointsman: its module, which has had two names.
_OWN_MODULE = re.compile(r"^python -m pointsman(?:\.|_)cli\.main\b", re.MULTILINE)


def _programs(trials: Iterable[StoredTrial]) -> str:
    kept = list(trials)
    versions = {trial.contender: trial.version for trial in kept}
    problems = {trial.contender: trial.problem for trial in kept if trial.problem}
    measured = {trial.contender for trial in kept if trial.measures is not None}
    lines = ["| router | version | runs |", "|---|---|---|"]
    for name in sorted(versions, key=lambda name: (not name.startswith(POINTSMAN), name)):
        ran = "yes" if name in measured else "no"
        note = f"{ran}: {problems[name]}" if name in problems else ran
        lines.append(f"| {name} | {versions[name] or '-'} | {_plain(note)} |")
    lines += [f"| {name} | - | no: {_plain(why)} |" for name, why in ABSENT.items()]
    commands = {trial.contender: trial.command for trial in kept if trial.command}
    shown = [f"{name}:\n{_OWN_MODULE.sub('pointsman', command)}\n" for name, command in sorted(commands.items())]
    return "\n".join([*lines, "", "Their commands:", "", "```text", "\n".join(shown).rstrip(), "```", ""])


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _cell(one: Comparison) -> str:
    parts = [f"## {one.cell.title[:1].upper()}{one.cell.title[1:]}\n"]
    if one.reference:
        parts.append(
            f"Ratios are to {one.reference}. Rounds: {', '.join(f'{name} {len(of)}' for name, of in one.trials.items())}.\n"
        )
    parts += [_table(one, TTFT), _table(one, [*TPOT, *E2E]), _rest(one)]
    if told := [text for name in one.ranked() if (text := _held_out(one, name))]:
        parts.append(f"A held-out draw, of one round and so without an interval: {'; '.join(told)}.\n")
    idle = [measures.idle for of in one.trials.values() for measures in of.values()]
    if idle:
        parts.append(f"The machine's cores were idle {min(idle):.0%} to {max(idle):.0%} of the time.\n")
    return "\n".join(parts)


def _held_out(one: Comparison, name: str) -> str:
    """Return the cell's deciding measures in the held-out draw."""
    if name == one.reference or one.reference not in one.held_out or name not in one.held_out:
        return ""
    columns = [column for column in HEADLINES if column.name in one.cell.decides]
    ratios = [(column.name, one.held_out_ratio(name, column)) for column in columns]
    return f"{name} {', '.join(f'{measure} x{ratio:.2f}' for measure, ratio in ratios if ratio is not None)}"


def _predictions(comparisons: Sequence[Comparison], costs: Costs | None) -> str:
    """Return the lab's prediction of each cell beside what was measured; empty without any."""
    lines = [
        "## The lab's predictions\n",
        "Each trial simulated: the same sessions, engines and rule. Predicted mean over the rounds for the measured one, with",
        f"its error. **Bold**: off by more than {MARKED_ERROR:.0%}.",
        _MEASURED_COSTS if costs else _MODELLED,
        "",
        f"| traffic | router | {' | '.join(f'{column.name}, {column.unit}' for column in PREDICTED)} |",
        f"|---|---|{'---|' * len(PREDICTED)}",
    ]
    head = len(lines)
    for comparison in comparisons:
        for name in comparison.predicted:
            fields = [_prediction(comparison, name, column) for column in PREDICTED]
            lines.append(f"| {comparison.cell.title} | {name} | {' | '.join(fields)} |")
    if len(lines) == head:
        return ""
    return "\n".join([*lines, *(_ways(costs) if costs else [])]) + "\n"


def _prediction(comparison: Comparison, name: str, column: Column) -> str:
    found = comparison.prediction(name, column)
    if found is None or not found[1]:
        return "-"
    lab, live = found
    text = f"{lab:,.{column.digits}f} for {live:,.{column.digits}f} ({lab / live - 1:+.0%})"
    return f"**{text}**" if abs(lab / live - 1) > MARKED_ERROR else text


_MODELLED = "The lab models neither a router's own time nor the clients'."
_MEASURED_COSTS = """\
Steps of engines cost what one engine alone was measured to take here, and a request's way what it took through each router,
one at a time, before the first token (below). Not modelled: that programs wait for a core, and what a tokenizer remembers of
the turn before."""


def _ways(costs: Costs) -> list[str]:
    """Return a table of what each router's way takes."""
    rows = [
        f"| {name} | {way.request_s * 1e3:.0f} | {way.prompt_token_s * 1e6:.2f} | {way.streamed_token_s * 1e3:.2f} |"
        for name, way in costs.ways.items()
    ]
    head = "| way of a request, the engine's front end included | ms | us/prompt token | ms/streamed token |"
    return ["", head, "|---|---|---|---|", *rows]


# Metric of side_by_side, without the prefix of the proxy -> what is measured.
_MEASURED = {
    "new_1k_us": "a new prompt of 1 KB",
    "new_1k_of_dynamo_us": "a new prompt of 1 KB",
    "new_32k_us": "a new prompt of 32 KB",
    "new_400k_us": "a new prompt of 400 KB",
    "turn_32k_us": "a follow-up turn of 32 KB",
    "turn_400k_us": "a follow-up turn of 400 KB",
    "chunk_us": "a chunk of a stream",
    "answer_300_us": "a whole answer of 300 chunks",
    "added_ttft_ms": "added TTFT",
    "rss_mb_1000_streams": "memory at 1,000 open streams",
}


def _side_by_side(saved: SavedFigures) -> str:
    """Return the section of CPU time: each figure with its ratio to another program's in the same run, and the goal of it."""
    lines = [
        "## CPU time side by side\n",
        "What a request, a chunk or a stream costs, in front of engines that answer at once; medians of rounds in which each",
        "program is measured in turn. `serve` is router and gateway in one process. vllm-router and SMG run cache_aware, which",
        "does not tokenise; nginx knows nothing of a request. Of Dynamo its front end counts, not the adapters behind it.",
        f"Measured on {saved.date} at commit `{saved.commit}`. [Where the time is](../bench/README.md#where-the-cpu-time-is)",
        "tells what was tried, and why goals are missed.",
        "",
        "| measured | Pointsman is | figure | compared with | ratio | goal of the ratio | all programs |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in saved.figures:
        serve = figure.metric.startswith("side_serve_")
        what = figure.metric.removeprefix("side_serve_" if serve else "side_")
        _, against, goal = CPU_GOALS[f"side_{what}"]
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
        reached = "-" if not goal else f"{goal:g}, {'reached' if (figure.ratio or 0.0) <= goal else '**missed**'}"
        others = re.sub(r"[\d.]+e\+\d+", lambda found: _short(float(found[0])), figure.note.partition("; baseline")[0])
        form = "`serve`" if serve else "two processes"
        lines.append(
            f"| {_MEASURED[what]} | {form} | {_short(figure.value)} {figure.unit} | {against} | {ratio} | {reached} | {others} |"
        )
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(one: Comparison, columns: Sequence[Column]) -> str:
    lines = [
        f"| router | {' | '.join(f'{column.name}, {column.unit}' for column in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for name in one.ranked():
        fields = [field(one.entry(name, column), column, name == one.reference) for column in columns]
        lines.append(f"| {name} | {' | '.join(fields)} |")
    return "\n".join(lines) + "\n"


def _rest(one: Comparison) -> str:
    columns = (SESSION, HITS, CPU)
    names = " | ".join(f"{column.name}, {column.unit}" for column in columns)
    lines = [
        f"| router | {names} | CPU by process, ms | engines' CPU/request, ms | memory, MB | failed |",
        f"|---|{'---|' * 7}",
    ]
    for name in one.ranked():
        fields = [field(one.entry(name, column), column, name == one.reference) for column in columns]
        rounds = list(one.trials[name].values())
        parts = dict.fromkeys(part for measures in rounds for part in measures.cpu_ms)
        cpu = [f"{part} {sum(trial.cpu_ms.get(part, 0.0) for trial in rounds) / len(rounds):.2f}" for part in parts]
        if beside := sum(measures.beside_cpu_ms for measures in rounds) / len(rounds):
            cpu.append(f"(adapters {beside:.2f})")
        engines = sum(measures.engines_cpu_ms for measures in rounds) / len(rounds)
        memory = max(measures.rss_mb for measures in rounds)
        figures = [*fields, ", ".join(cpu), f"{engines:.0f}", f"{memory:.0f}", _failed(rounds)]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _failed(rounds: Sequence[object]) -> str:
    failed = sum(getattr(measures, "failed", 0) for measures in rounds)
    asked = sum(getattr(measures, "requests", 0) for measures in rounds)
    kinds: dict[str, int] = {}
    for measures in rounds:
        for kind, count in getattr(measures, "errors", {}).items():
            kinds[kind] = kinds.get(kind, 0) + count
    return f"{failed} of {asked}" + (
        f" ({', '.join(f'{kind} {count}' for kind, count in kinds.items())})" if kinds else ""
    )


def field(entry: Entry, column: Column, is_reference: bool) -> str:
    """Return a table's field: the figure, and its ratio with the interval."""
    if entry.mean is None:
        return "-"
    text = f"{entry.mean:,.{column.digits}f}"
    if is_reference or entry.ratio is None:
        return text
    if entry.high == float("inf"):
        return f"{text} (x{entry.ratio:.2f})"
    return f"{text} (x{entry.ratio:.2f}, {entry.low:.2f} to {entry.high:.2f})"
