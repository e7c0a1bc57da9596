"""docs/scoreboard.md, written from stored trials: what was run, who wins, and every figure with its ratio to Pointsman's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.rivals.contenders import ABSENT, POINTSMAN
from bench.side_by_side import GOALS
from studies.marked_sections import BOARD, write_front_section
from studies.scoreboard.board import EMULATED, OWN_CLIENT, Cell, Results, SavedFigures, StoredTrial
from studies.scoreboard.comparison import (
    CPU,
    E2E,
    HEADLINES,
    HITS,
    SESSION,
    TPOT,
    TTFT,
    Column,
    Comparison,
    Entry,
    Verdict,
)
from studies.scoreboard.plots import cpu_plot, ttft_plot

BEHIND, AHEAD, EVEN = "**behind**", "ahead", "even"
_OPENING = """# Scoreboard

Pointsman and other routers' own programs in front of the same engines, with the same requests. `make scoreboard` runs all of it
again and writes this page. A ratio is to {reference} in the same rounds; in brackets is its 95 % interval over {rounds} paired
rounds (Student's, on the logarithm). An interval that contains 1 is no difference beyond chance. All programs run with their
defaults.

Run on {date} at commit `{commit}`, on {machine}. {note}

![TTFT p90 of each router](scoreboard_ttft.svg)

![CPU time of each router per request](scoreboard_cpu.svg)
"""


def write_page(results: Results, out: Path) -> None:
    """Write the page to `out`, its plots beside it, and README's section."""
    cells, facts = results.plan()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(cells, results.trials, facts, results.figures()))
    comparisons = _comparisons(cells, results.trials)
    out.with_name("scoreboard_ttft.svg").write_text(ttft_plot(comparisons))
    out.with_name("scoreboard_cpu.svg").write_text(cpu_plot(comparisons))
    write_front_section(out, BOARD, front_section(cells, results.trials))


def render(
    cells: Sequence[Cell],
    trials: Sequence[StoredTrial],
    facts: dict[str, object],
    figures: SavedFigures | None = None,
) -> str:
    """Return the page. `facts`: commit, machine, rounds and date of the run, and a note about it. `figures`: those of
    side_by_side."""
    comparisons = _comparisons(cells, trials)
    references = dict.fromkeys(comparison.reference for comparison in comparisons if comparison.reference)
    known = {"commit": "", "machine": "", "rounds": 0, "date": "", "note": ""} | facts
    parts = [
        _OPENING.format(**{**known, "reference": " or ".join(references) or "nothing"}),
        "## Who wins\n",
        _winners(comparisons),
        "## What was run\n",
        _traffic(comparisons, trials),
        _missing(cells, trials, int(str(known["rounds"]))),
        _programs(trials),
        *(_cell(comparison) for comparison in comparisons),
        *([_side_by_side(figures)] if figures is not None else []),
    ]
    return "\n".join(parts)


def front_section(cells: Sequence[Cell], trials: Sequence[StoredTrial]) -> str:
    """Return README's section: the cells that all routers are in, and where Pointsman is behind, ahead, and neither."""
    comparisons = _comparisons(cells, trials)
    tables = [comparison for comparison in comparisons if comparison.cell.everyone]
    lines = [
        f"| router | {' | '.join(comparison.cell.title for comparison in tables)} | {CPU.name}, {CPU.unit} |",
        f"|---|{'---|' * (len(tables) + 1)}",
    ]
    for name in tables[0].ranked() if tables else ():
        cpu = field(tables[0].entry(name, CPU, ""), CPU, is_reference=True)
        lines.append(f"| {name} | {' | '.join(_front_field(comparison, name) for comparison in tables)} | {cpu} |")
    verdicts = [
        (column, comparison.cell.title, verdict)
        for column in HEADLINES
        for comparison in comparisons
        if (verdict := comparison.verdict(column))
    ]
    even = sum(_word(verdict) == EVEN for _, _, verdict in verdicts)
    lines += [
        "",
        f"Pointsman's best policy beside the best other router ({len(comparisons)} kinds of traffic, {len(HEADLINES)} measures).",
        "After `x` is the other's figure divided by Pointsman's.",
        "",
        *(
            textwrap.fill(f"- {word}: {_places(verdicts, word, len(comparisons))}.", 150, subsequent_indent="  ")
            for word in (BEHIND, AHEAD)
        ),
        f"- no difference beyond chance: the other {even} of {len(verdicts)}.",
    ]
    return "\n".join(lines)


def _front_field(one: Comparison, name: str) -> str:
    """Return TTFT p50 and p90, with "=" where p90 does not differ from the reference's beyond chance."""
    if name not in one.trials:
        return "-"
    entries = [one.entry(name, column, one.reference) for column in TTFT[:2]]
    text = " / ".join(field(entry, column, is_reference=True) for entry, column in zip(entries, TTFT, strict=False))
    return text if name == one.reference or entries[1].sure else f"{text} ="


def _places(verdicts: Sequence[tuple[Column, str, Verdict]], word: str, kinds: int) -> str:
    """Return the measures and kinds of traffic of the verdicts that are `word`, each with its ratio."""
    found: dict[str, list[tuple[str, float]]] = {}
    for column, title, verdict in verdicts:
        if _word(verdict) == word and verdict.entry.ratio is not None:
            found.setdefault(column.name, []).append((title, verdict.entry.ratio))
    parts = []
    for name, places in found.items():
        ratios = [ratio for _, ratio in places]
        text = f"all x{min(ratios):.2f} to x{max(ratios):.2f}"
        if len(places) < kinds:
            text = "; ".join(f"{title} x{ratio:.2f}" for title, ratio in places)
        parts.append(f"{name} ({text})")
    return ", ".join(parts) or "none"


def _comparisons(cells: Sequence[Cell], trials: Iterable[StoredTrial]) -> list[Comparison]:
    kept = list(trials)
    return [Comparison(cell, kept) for cell in cells if any(trial.cell == cell.name for trial in kept)]


def _winners(comparisons: Sequence[Comparison]) -> str:
    """Return the first table: for each cell and measure the winner, and what the best of the others has in Pointsman's terms."""
    lines = [
        "For each measure Pointsman's best policy and the best other router, with the other's figure divided by Pointsman's.",
        "**behind**: the other router is better; ahead: Pointsman is; even: no difference beyond chance. A router that failed",
        "more than 1 % of its requests is left out here.",
        "",
        f"| traffic | {' | '.join(column.name for column in HEADLINES)} |",
        f"|---|{'---|' * len(HEADLINES)}",
    ]
    for comparison in comparisons:
        fields = [_winner(comparison.verdict(column), column) for column in HEADLINES]
        lines.append(f"| {comparison.cell.title} | {' | '.join(fields)} |")
    return "\n".join(lines) + "\n"


def _winner(verdict: Verdict | None, column: Column) -> str:
    if verdict is None:
        return "-"
    ratio = verdict.entry.ratio
    ratio_text = "" if ratio is None else f" x{ratio:.2f}"
    return f"{_word(verdict)}: {verdict.own.removeprefix(POINTSMAN).strip()}, {verdict.rival}{ratio_text}"


def _word(verdict: Verdict) -> str:
    if not verdict.entry.sure:
        return EVEN
    return AHEAD if verdict.winner == verdict.own else BEHIND


def _traffic(comparisons: Sequence[Comparison], trials: Iterable[StoredTrial]) -> str:
    sources = {trial.cell: trial.source for trial in trials if trial.source}
    lines = [
        "| traffic | requests of sessions | source | engines | sent by | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        cell = comparison.cell
        first = next((measures for of in comparison.trials.values() for measures in of.values()), None)
        if cell.engines == EMULATED:
            engines = f"{cell.count} emulated, {cell.speedup:g} times as fast as the modelled one"
        else:
            engines = f"{cell.count} vLLM servers on CPU, a small random model"
        client = "the replay client" if cell.client == OWN_CLIENT else cell.client
        count = f"{first.requests} of {first.sessions}" if first else "-"
        lines.append(
            f"| {cell.title} | {count} | {sources.get(cell.name, '-')} | {engines} | {client} | {comparison.rounds} |"
        )
    return "\n".join(lines) + "\n\n" + _NOTES


_NOTES = """\
Latencies are those that the client saw, in seconds of the clock, also where engines are faster than the modelled one:
a router's own time then weighs more than it would in front of the modelled engine. A session is timed from its first
request to its last answer, pauses included. The hit ratio is the engines' own count of cached prompt tokens. A
router's CPU time is that of all its processes while the requests ran; Dynamo's workers only connect its front end to
the engines here, and are counted apart. The emulated engines answer `/render`, which vllm-router asks for each
prompt; vLLM does with `--enable-scale-out`. Clients send `X-Session-ID`. One request of a word goes first to each
router, and the caches of the engines are empty otherwise.
"""


def _missing(cells: Sequence[Cell], trials: Sequence[StoredTrial], rounds: int) -> str:
    """Return a sentence that names what has fewer rounds than asked for, or is not there at all; empty if nothing is missing."""
    found: dict[tuple[str, str], int] = {}
    for trial in trials:
        found[trial.cell, trial.contender] = found.get((trial.cell, trial.contender), 0) + (
            rounds if trial.problem else 1
        )
    everyone = {trial.contender for trial in trials}
    short = []
    for cell in cells:
        there = {name: count for (at, name), count in found.items() if at == cell.name}
        names = sorted(name for name in (everyone if cell.everyone else there) if there.get(name, 0) < rounds)
        if not there:
            short.append(f"{cell.title}: all")
        elif names:
            short.append(f"{cell.title}: {', '.join(f'{name} has {there.get(name, 0)}' for name in names)}")
    return f"Missing of {rounds} rounds: {'; '.join(short)}.\n" if short else ""


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
        parts.append(f"Ratios are to {one.reference}.\n")
    parts += [_table(one, TTFT), _table(one, [*TPOT, *E2E]), _rest(one)]
    idle = [measures.idle for of in one.trials.values() for measures in of.values()]
    if idle:
        parts.append(f"The machine's cores were idle {min(idle):.0%} to {max(idle):.0%} of the time.\n")
    return "\n".join(parts)


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
        _, against, goal = GOALS[f"side_{what}"]
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
        fields = [field(one.entry(name, column, one.reference), column, name == one.reference) for column in columns]
        lines.append(f"| {name} | {' | '.join(fields)} |")
    return "\n".join(lines) + "\n"


def _rest(one: Comparison) -> str:
    columns = (SESSION, HITS, CPU)
    names = " | ".join(f"{column.name}, {column.unit}" for column in columns)
    lines = [f"| router | {names} | CPU by process, ms | memory, MB | failed |", f"|---|{'---|' * 6}"]
    for name in one.ranked():
        fields = [field(one.entry(name, column, one.reference), column, name == one.reference) for column in columns]
        rounds = list(one.trials[name].values())
        parts = dict.fromkeys(part for measures in rounds for part in measures.cpu_ms)
        cpu = [f"{part} {sum(trial.cpu_ms.get(part, 0.0) for trial in rounds) / len(rounds):.2f}" for part in parts]
        if beside := sum(measures.beside_cpu_ms for measures in rounds) / len(rounds):
            cpu.append(f"(adapters {beside:.2f})")
        memory = max(measures.rss_mb for measures in rounds)
        lines.append(f"| {name} | {' | '.join(fields)} | {', '.join(cpu)} | {memory:.0f} | {_failed(rounds)} |")
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
