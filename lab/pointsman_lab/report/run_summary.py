"""Summary of a run: latencies, hit ratio and a table of instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.terminal import make_table, percent

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return {"p50", "p90", "p99", "mean", "count"} of `values` (linear interpolation between ranks); None without values."""
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    found = {f"p{name}": round(float(value), 6) for name, value in zip(PERCENTILES, points, strict=True)}
    return found | {"mean": round(float(np.mean(values)), 6), "count": len(values)}


def summarise(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return a run's summary; JSON-ready. Latencies (s) and tokens are of complete answers; failures are only counted.

    hit_ratio is cached / prompt tokens of the answers whose engine reported both, None if none did.
    """
    good = [record for record in records if record.ok]
    instances = sorted({record.instance for record in records})
    span = max((record.t_send + record.e2e_s for record in records), default=0.0)
    errors: dict[str, int] = {}
    for record in records:
        if not record.ok:
            name = str(record.status) if record.status not in (0, 200) else record.error.partition(":")[0]
            errors[name] = errors.get(name, 0) + 1
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": errors,
        "sessions": len({record.session for record in records}),
        "span_s": round(span, 3),
        **_figures(good),
        "instances": {
            name: _figures([record for record in good if record.instance == name])
            | {"requests": sum(record.instance == name for record in records)}
            for name in instances
        },
    }


def _figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    counted = [record for record in records if record.cached_tokens is not None and record.prompt_tokens]
    cached = sum(record.cached_tokens or 0 for record in counted)
    prompt = sum(record.prompt_tokens or 0 for record in counted)
    return {
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in records),
        "cached_tokens": cached,
        "output_tokens": sum(record.output_tokens or 0 for record in records),
        "hit_ratio": round(cached / prompt, 6) if prompt else None,
        "session_count": len({record.session for record in records}),
        "ttft_s": percentiles([record.ttft_s for record in records if record.ttft_s is not None]),
        "tpot_s": percentiles([value for record in records if (value := record.tpot_s) is not None]),
        "e2e_s": percentiles([record.e2e_s for record in records]),
    }


def print_summary(console: Console, summary: dict[str, Any], title: str) -> None:
    """Print a summary as tables."""
    failed = f"[red]{summary['failed']} failed {summary['errors']}[/red]" if summary["failed"] else "none failed"
    console.print(
        f"[bold]{title}[/bold]: {summary['requests']} requests of {summary['sessions']} sessions in "
        f"{summary['span_s']:.1f} s, {failed}; {summary['output_tokens']:,} tokens generated; of "
        f"{summary['prompt_tokens']:,} prompt tokens {percent(summary['hit_ratio'])} came from prefix caches",
        highlight=False,
    )
    latencies = make_table("", "p50", "p90", "p99", "mean")
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        latencies.add_row(name, *(_ms(summary[key], column) for column in ("p50", "p90", "p99", "mean")))
    console.print(latencies)
    table = make_table(
        "instance", "requests", "sessions", "prompt tokens", "from cache", "generated", "TTFT p50", "TTFT p90"
    )
    for name, totals in summary["instances"].items():
        table.add_row(
            name or "(unknown)",
            str(totals["requests"]),
            str(totals["session_count"]),
            f"{totals['prompt_tokens']:,}",
            percent(totals["hit_ratio"]),
            f"{totals['output_tokens']:,}",
            *(_ms(totals["ttft_s"], column) for column in ("p50", "p90")),
        )
    console.print(table)


def _ms(points: dict[str, float] | None, key: str) -> str:
    return f"{points[key] * 1e3:,.1f} ms" if points else "-"
