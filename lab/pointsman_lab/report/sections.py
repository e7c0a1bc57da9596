"""Sections of tables and plots that `pointsman analyze` prints and puts into its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pointsman_lab.report import plots
from pointsman_lab.report.bundle import Bundle
from pointsman_lab.report.diagnostics import (
    LATENCIES,
    TAIL_S,
    LatencyDifference,
    MatchedRequests,
    Timelines,
    by_class,
    by_decision,
    hotspot,
    match_runs,
    panel_maxima,
    parts_table,
    slowest,
    tail_counts,
    timelines,
)
from pointsman_lab.report.measures import class_of
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import summarise
from pointsman_lab.report.terminal import percent

PERCENTILES = ("p50", "p90", "p99")
# Maximum length of a session id in tables, characters; longer ones are cut.
NAME_LENGTH = 28


@dataclass(frozen=True)
class Table:
    """Rows of text; all columns but the first `text_columns` are numbers and right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text_columns: int = 1


@dataclass(frozen=True)
class Plot:
    """A drawn figure as an <svg> element, with its caption."""

    svg: str
    caption: str


@dataclass
class Section:
    """A heading with a note and its blocks; a section without blocks is left out."""

    title: str
    note: str = ""
    blocks: list[Table | Plot] = field(default_factory=list)


def sections(runs: Mapping[str, Bundle], *, draw: bool) -> list[Section]:
    """Return all sections of `runs` (name -> bundle; the first is the base of pairs). Without `draw` they have no plots."""
    over_time = {name: timelines(run.records, run.samples) for name, run in runs.items()} if draw else {}
    scale = panel_maxima(chart for chart in over_time.values() if chart)
    found = [
        _bottom_line(runs),
        _overview(runs, draw),
        _groups(runs, draw, "By class", "the router's class of each request when it was placed", by_class),
        _groups(runs, draw, "By decision", "the rule that found the answering instance", by_decision),
        _tail(runs),
        *(_instances(name, run, over_time.get(name), scale) for name, run in runs.items()),
        *(_hotspot(name, run, draw) for name, run in runs.items()),
        *(_slowest(name, run) for name, run in runs.items()),
        *_pairs(runs, draw),
    ]
    return [section for section in found if section.blocks]


def _bottom_line(runs: Mapping[str, Bundle]) -> Section:
    """Return the section that compares each other run with the first, and says what the comparison proves."""
    (base, first), *others = runs.items()
    rows = []
    for name, run in others:
        pairs = match_runs(first.records, run.records)
        found = (pairs.difference(metric) for metric in LATENCIES.values())
        rows.append(
            [
                name,
                f"{len(pairs.base):,}",
                *("-" if difference is None else _verdict(difference) for difference in found),
            ]
        )
    return Section(
        "Bottom line",
        f"the mean change of the requests that {base} answered, too. It is of these runs alone: the same policy, run again on "
        "other arrivals, may differ as much. To find which policy is better, use pointsman compare with several seeds.",
        [Table(["run", "pairs", *LATENCIES], rows, text_columns=1)] if rows else [],
    )


def _overview(runs: Mapping[str, Bundle], draw: bool) -> Section:
    columns = ["run", "requests", "failed", "hit ratio"]
    columns += [f"{name} {point}" for name in LATENCIES for point in PERCENTILES]
    rows = []
    for name, run in runs.items():
        summary = summarise(run.records)
        row = [name, f"{summary['requests']:,}", str(summary["failed"]), percent(summary["hit_ratio"])]
        rows.append(row + [_time(summary[metric], point) for metric in LATENCIES.values() for point in PERCENTILES])
    section = Section("Latencies", "of complete answers; failures are counted separately", [Table(columns, rows)])
    if draw:
        lines = {name: run.records for name, run in runs.items()}
        section.blocks.append(
            Plot(plots.cdfs(lines), "Share of answers that were at least this fast. Further left is better.")
        )
    parts = {name: parts_table(run.breakdown) for name, run in runs.items()}
    rows = [
        [name, part.replace("_", " "), f"{figures['count']:,}", *(_ms(figures[point]) for point in PERCENTILES)]
        for name, of in parts.items()
        for part, figures in of.items()
    ]
    if rows:
        caption = "Where the time went, by the gateway's clock"
        section.blocks.append(Table(["run", "part", "requests", *PERCENTILES], rows, caption, text_columns=2))
    return section


def _groups(
    runs: Mapping[str, Bundle],
    draw: bool,
    title: str,
    note: str,
    split: Callable[[Sequence[RequestRecord]], dict[str, list[RequestRecord]]],
) -> Section:
    section = Section(title, note)
    found = {name: split(run.records) for name, run in runs.items()}
    if not any(found.values()):
        return section
    if draw:
        counts = {name: {part: len(of) for part, of in parts.items()} for name, parts in found.items()}
        section.blocks.append(Plot(plots.splits(counts, title), "Share of complete answers."))
    rows = []
    for name, parts in found.items():
        total = sum(len(of) for of in parts.values())
        for part, of in parts.items():
            summary = summarise(of)
            row = [name, part, f"{len(of):,}", percent(len(of) / total), percent(summary["hit_ratio"])]
            rows.append(row + [_time(summary[metric], point) for metric in LATENCIES.values() for point in PERCENTILES])
    columns = ["run", title.removeprefix("By "), "requests", "share", "hit ratio"]
    columns += [f"{name} {point}" for name in LATENCIES for point in PERCENTILES]
    section.blocks.append(Table(columns, rows, text_columns=2))
    return section


def _tail(runs: Mapping[str, Bundle]) -> Section:
    rows = []
    for name, run in runs.items():
        good = sum(record.ok for record in run.records) or 1
        for latency, counts in tail_counts(run.records).items():
            cells = [f"{count:,} ({count / good:.1%})" if count else "-" for count in counts]
            rows.append([name, latency, *cells])
    columns = ["run", "latency", *(f"> {limit} s" for limit in TAIL_S)]
    return Section(
        "Long tail", "answers slower than each limit, and their share of all", [Table(columns, rows, text_columns=2)]
    )


def _instances(name: str, run: Bundle, over_time: Timelines | None, scale: Mapping[str, float]) -> Section:
    section = Section(f"Instances of {name}")
    rows = []
    summary = summarise(run.records)
    for instance, totals in summary["instances"].items():
        cache = (run.caches or {}).get(instance)
        hit_ratios = cache["hit_ratio"] if cache else {}
        rows.append(
            [
                instance or "(unknown)",
                f"{totals['requests']:,}",
                f"{totals['session_count']:,}",
                f"{totals['prompt_tokens']:,}",
                percent(totals["hit_ratio"]),
                *((percent(hit_ratios.get("local")), percent(hit_ratios.get("external"))) if run.caches else ()),
                f"{totals['output_tokens']:,}",
                *(_time(totals["ttft_s"], point) for point in PERCENTILES),
                *(_time(totals["e2e_s"], point) for point in PERCENTILES[:2]),
            ]
        )
    engine = ["engine's local", "external"] if run.caches else []
    columns = ["instance", "requests", "sessions", "prompt tokens", "from cache", *engine, "generated"]
    columns += [*(f"TTFT {point}" for point in PERCENTILES), *(f"E2E {point}" for point in PERCENTILES[:2])]
    section.blocks.append(Table(columns, rows))
    if over_time is not None:
        source = "as router and engines reported" if over_time.sampled else "from the requests' own times (no samples)"
        caption = (
            f"Each instance over time, {source}; blank where there is no value. All runs have the same colour scale."
        )
        section.blocks.append(Plot(plots.timeline(over_time, scale, name), caption))
    return section


def _hotspot(name: str, run: Bundle, draw: bool) -> Section:
    section = Section(f"Hotspot of {name}")
    spot = hotspot(run.records, {sample.instance for sample in run.samples})
    if spot is None:
        return section
    section.note = (
        f"{spot.instance} had {spot.open_mean:.1f} requests open on average, {spot.ratio:.2f} times the mean of all "
        "instances. Its top sessions, the longest open first."
    )
    rows = [
        [
            share.session[:NAME_LENGTH],
            str(share.requests),
            f"{share.prompt_tokens:,}",
            f"{share.computed_tokens:,}",
            f"{share.output_tokens:,}",
            _seconds(share.open_s),
            _seconds(share.ttft_max_s),
        ]
        for share in spot.sessions
    ]
    columns = ["session", "requests", "prompt tokens", "of them computed", "generated", "total E2E", "worst TTFT"]
    section.blocks.append(Table(columns, rows))
    if draw:
        section.blocks.append(Plot(plots.request_bars(spot, name), f"Their requests on {spot.instance}."))
    return section


def _slowest(name: str, run: Bundle) -> Section:
    rows = [
        [
            f"{record.session[:NAME_LENGTH]} turn {record.turn}",
            class_of(record) or "-",
            record.rule or record.reason or "-",
            record.instance,
            str(others),
            f"{record.prompt_tokens or 0:,}",
            _count(record.predicted_cached_tokens),
            _count(record.cached_tokens),
            _seconds(record.t_send),
            _seconds(record.ttft_s),
            _seconds(record.e2e_s),
        ]
        for record, others in slowest(run.records)
    ]
    columns = ["request", "class", "decision", "instance", "open there", "prompt", "predicted", "cached", "sent at"]
    columns += ["TTFT", "E2E"]
    note = "open there: other requests that were open on the instance when the request was sent"
    if lost := [record for record in run.records if record.lost_tokens]:
        note += (
            f". predicted: cached tokens at the placement, which set the class. In {len(lost):,} of {len(run.records):,} "
            f"requests the engine found less when it began, because it had evicted blocks while the request waited (or the "
            f"prediction was wrong): {sum(record.lost_tokens for record in lost):,} tokens were computed again"
        )
    return Section(f"Slowest first tokens of {name}", note, [Table(columns, rows, text_columns=4)] if rows else [])


def _pairs(runs: Mapping[str, Bundle], draw: bool) -> list[Section]:
    (base, first), *others = runs.items()
    return [_paired(base, name, match_runs(first.records, run.records), draw) for name, run in others]


def _paired(base: str, other: str, pairs: MatchedRequests, draw: bool) -> Section:
    section = Section(f"{other} against {base}, request by request")
    if not pairs.base:
        section.note = "the two runs have no request in common"
        section.blocks.append(Table(["pairs"], [["0"]]))
        return section
    section.note = (
        f"{len(pairs.base):,} requests were answered in both runs, {pairs.unmatched:,} in one alone. Less than 0 is faster than "
        f"{base}. The interval is for the mean of these two runs, not for other runs."
    )
    rows = []
    classes = sorted({class_of(record) for record in pairs.base} - {""})
    for label, route_class in (("all", ""), *((name, name) for name in classes)):
        for latency, metric in LATENCIES.items():
            if (found := pairs.difference(metric, route_class)) is not None:
                rows.append([f"{label} {latency}", *_difference(found)])
    columns = ["", "pairs", "mean difference", "95 % interval", "median", "faster", "slower"]
    section.blocks.append(Table(columns, rows))
    if draw:
        section.blocks.append(
            Plot(plots.scatter(pairs, base, other), "TTFT of each request in both runs, and its change.")
        )
    rows = [
        [
            f"{first.session[:NAME_LENGTH]} turn {first.turn}",
            f"{first.prompt_tokens or 0:,}",
            *(
                part
                for record in (first, second)
                for part in (record.instance, _count(record.cached_tokens), _seconds(record.ttft_s))
            ),
            _signed((second.ttft_s or 0.0) - (first.ttft_s or 0.0)),
        ]
        for first, second in pairs.extremes()
    ]
    columns = [
        "request",
        "prompt",
        f"{base}: instance",
        "cached",
        "TTFT",
        f"{other}: instance",
        "cached",
        "TTFT",
        "change",
    ]
    section.blocks.append(Table(columns, rows, "The largest changes"))
    return section


def _difference(found: LatencyDifference) -> list[str]:
    return [
        f"{found.pairs:,}",
        _signed(found.mean),
        f"{_signed(found.low)} to {_signed(found.high)}",
        _signed(found.median),
        percent(found.faster),
        percent(found.slower),
    ]


def _verdict(found: LatencyDifference) -> str:
    if found.low <= 0 <= found.high:
        return f"no difference ({_signed(found.low)} to {_signed(found.high)})"
    return f"{'faster' if found.mean < 0 else 'slower'} here by {_seconds(abs(found.mean))}"


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


def _time(points: Mapping[str, Any] | None, key: str) -> str:
    return _seconds(points[key]) if points else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _seconds(value: float | None) -> str:
    """Format a duration with three significant digits, in ms below 1 s; "-" for None."""
    if value is None:
        return "-"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 100 else f"{value:,.0f} s"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + _seconds(value)
