"""Run the named benchmarks, or without names all short ones.

A short benchmark takes a minute or less, except `growth`: 260,000 requests, three to four minutes.

The following benchmarks run only if they are named. `large_fleet` and `shortlist` take an hour each, `soak` half an hour,
`outlive` one minute, `ill_engines` a quarter of an hour, `events`, `hostile`, `profile` and `side_by_side` some minutes.
`elastic`, `layerwise`, `layerwise_cpu`, `layerwise_cpu_long`, `layerwise_trace` and `report_age` take minutes each, most of them
to start real engines.
`http_lint` installs httplint; `h2load` needs Debian's nghttp2-client.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench.decide import decide, foresight, index
from bench.elastic import elastic
from bench.engine_steps import engine_steps
from bench.events import events
from bench.figures import Figure, figure_table
from bench.gateway import chunks, leaks, requests
from bench.h2load import h2load
from bench.hostile import hostile
from bench.http_lint import http_lint
from bench.ill_engines import ill_engines
from bench.key_changes import key_changes
from bench.large_fleet import large_fleet
from bench.layer_events import layer_events
from bench.layerwise import layerwise
from bench.layerwise_cpu import layerwise_cpu, layerwise_cpu_long
from bench.layerwise_trace import layerwise_trace
from bench.memory import growth, memory
from bench.open_requests import open_request_bytes
from bench.outlive import outlive
from bench.picker import picker
from bench.place import place
from bench.profile import profile
from bench.report_age import report_age
from bench.scrapes import scrapes
from bench.shared_prompts import shared_prompts
from bench.shortlist import shortlist
from bench.side_by_side import side_by_side
from bench.simulate import simulate
from bench.soak import soak
from bench.stalls import stalls
from bench.takeover import bursts, takeover
from bench.turns import turns
from pointsman_common.io.logs import configure_logs

RESULTS = Path(__file__).parent / "results.jsonl"
BENCHMARKS: dict[str, Callable[[], object]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        decide,
        foresight,
        index,
        place,
        key_changes,
        stalls,
        bursts,
        takeover,
        chunks,
        requests,
        picker,
        turns,
        shared_prompts,
        scrapes,
        memory,
        open_request_bytes,
        growth,
        leaks,
        simulate,
    )
}
# Benchmarks that run only if they are named.
LONG: dict[str, Callable[[], object]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        large_fleet,
        shortlist,
        elastic,
        engine_steps,
        events,
        layer_events,
        layerwise,
        layerwise_cpu,
        layerwise_cpu_long,
        layerwise_trace,
        report_age,
        outlive,
        soak,
        side_by_side,
        profile,
        hostile,
        ill_engines,
        http_lint,
        h2load,
    )
}


def names_of(words: list[str]) -> list[str]:
    """Return the benchmarks that the command line names, or BENCHMARKS without names. Exits with an error for an unknown name."""
    known = BENCHMARKS | LONG
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Not `choices`: with nargs="*" argparse would reject an empty list of names.
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"one of {', '.join(known)}; or gpu, with flags of its own"
    )
    names: list[str] = parser.parse_args(words).names
    for name in names:
        if name not in known:
            parser.error(f"no benchmark {name!r}: {', '.join(known)}")
    return names or list(BENCHMARKS)


def main() -> None:
    """Run the benchmarks. Each figure is printed and appended to results.jsonl when its benchmark ends; a table follows at the
    end."""
    names = names_of(sys.argv[1:])
    configure_logs("bench", "error")
    all_figures: list[Figure] = []
    with RESULTS.open("a") as results:
        for name in names:
            found = (BENCHMARKS | LONG)[name]()
            figures: list[Figure] = asyncio.run(found) if inspect.iscoroutine(found) else found  # type: ignore[assignment]
            for figure in figures:
                results.write(json.dumps(figure.row()) + "\n")
                print(f"{name}: {figure.metric} {figure.value:,.2f} {figure.unit}", file=sys.stderr, flush=True)
            results.flush()
            all_figures += figures
    Console(width=180).print(figure_table(all_figures))
