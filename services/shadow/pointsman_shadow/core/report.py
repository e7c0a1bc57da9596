"""The shadow's report, as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from pointsman_lab.report.terminal import make_table, percent


def summary_of(models: Mapping[str, Any], excluded: Mapping[str, int]) -> dict[str, Any]:
    """Return the report as JSON: `models` from PlacementComparison.summaries, and the number of excluded requests by reason."""
    return {
        "models": models,
        "excluded": {reason: count for reason, count in sorted(excluded.items()) if count},
    }


def print_report(console: Console, summary: Mapping[str, Any], policy: str, assumed: str) -> None:
    """Print a summary of summary_of() or of a serving shadow."""
    for model, found in summary["models"].items():
        _print_model(console, model, found, policy, assumed)
    if excluded := summary["excluded"]:
        excluded_counts = ", ".join(f"{count:,} {reason}" for reason, count in excluded.items())
        console.print(f"excluded: {excluded_counts}", highlight=False)
    if now := summary.get("now"):
        _print_now(console, now, policy)


def _print_model(console: Console, model: str, found: Mapping[str, Any], policy: str, assumed: str) -> None:
    answered = found["requests"] - found["failed"]
    console.print(
        f"[bold]{model}[/bold], {len(found['engines'])} engines: {found['requests']:,} requests, "
        f"{found['prompt_tokens']:,} prompt tokens"
        + (f"; {found['failed']:,} that the model could not serve are excluded below" if found["failed"] else ""),
        highlight=False,
    )
    if not answered:
        return
    recorded, counterfactual = found["recorded"], found["counterfactual"]
    unknown = answered - found["placement_known"]
    sides = {
        "as it was placed" if not unknown else f"as it was placed, else {assumed}": recorded,
        f"by Pointsman ({policy})": counterfactual,
    }
    table = make_table("modelled", "cached tokens", "of prompts", "TTFT p50", "p90", "p99")
    for name, side in sides.items():
        table.add_row(
            name,
            f"{side['cached_tokens']:,}",
            percent(side["hit_ratio"]),
            *(_ms(side["ttft_s"][share]) for share in ("p50", "p90", "p99")),
        )
    console.print(table)
    more = found["saved_tokens"]
    console.print(
        f"{abs(more):,} prompt tokens {'fewer' if more >= 0 else 'more'} to compute ({more / found['prompt_tokens']:+.1%}); "
        f"{found['same_instance']:,} of {found['placement_known']:,} requests on the same instance",
        highlight=False,
    )
    said = found["engine_reported"]
    if said["requests"]:
        console.print(
            f"model accuracy (cached share of the prompts of {said['requests']:,} requests): {percent(said['hit_ratio'])} "
            f"reported by the engines, in the model {percent(said['modelled_hit_ratio'])}",
            highlight=False,
        )
    for count, what in (
        (unknown, f"of unknown placement, modelled by {assumed}"),
        (answered - found["keyed"], "without known tokens, modelled without shared prefixes"),
        (answered - found["output_known"], "of unknown answer length"),
    ):
        if count:
            console.print(f"{count:,} requests {what}", highlight=False)
    table = make_table("instance", "requests as placed", "cached", "requests by Pointsman", "cached")
    for name in sorted({*recorded["instances"], *counterfactual["instances"]}):
        row = [side["instances"].get(name, {"requests": 0, "cached_tokens": 0}) for side in (recorded, counterfactual)]
        table.add_row(name, *(f"{side[key]:,}" for side in row for key in ("requests", "cached_tokens")))
    console.print(table)


def _print_now(console: Console, now: Mapping[str, Any], policy: str) -> None:
    console.print(
        f"live placement of {now['asked']:,} requests, by the engines' real state: Pointsman ({policy}) would have found "
        f"{now['cached_tokens']:,} tokens cached",
        highlight=False,
    )
    if now["placed"]:
        console.print(
            f"of the {now['placed']:,} whose engine is known: {now['actual_cached_tokens']:,} tokens were cached there, "
            f"{now['would_be_cached_tokens']:,} on the engine of Pointsman's choice; {now['same']:,} have the same engine",
            highlight=False,
        )
    engines = now["engines"]
    if engines["queried_tokens"]:
        console.print(
            f"the engines' own counters since the start, as last reported: {engines['hit_tokens']:,} of "
            f"{engines['queried_tokens']:,} prompt tokens cached ({engines['hit_tokens'] / engines['queried_tokens']:.1%})",
            highlight=False,
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
