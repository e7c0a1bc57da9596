"""A fleet of processes under 200,000 requests at full speed: the growth of each process, and a check that no request stays
open."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import linear_regression

from bench import stack
from bench.figures import Figure
from bench.load_client import MIX
from tests.support.processes.fleet import ROUTERS, Fleet

REQUESTS = 200_000
ROUND = 5_000
# Share of the requests after which growth is measured. Until then the bounded stores fill: tokens, sessions, decisions, the
# engines' caches.
WARM_UP = 0.4
CONNECTIONS = 32
PROMPTS = 10_000
LOAD = {"connections": CONNECTIONS, "chunks": 3, "prompt": 200, "prompts": PROMPTS, "mix": True}
CACHE_MB = 16
# Answers that a client may retry; they can occur on an overloaded machine.
TRY_AGAIN = ("http/1.1 429", "http/1.1 502", "http/1.1 503")


async def soak() -> list[Figure]:
    """soak_growth_mb_100k of each process: the slope of its resident memory. Takes half an hour on two cores.

    A router fills its stores while it owns the pool, by about 60 MB over its first 30,000 requests. A router that becomes the
    owner late grows by that amount in any case. So each router's note says how often it was the owner.
    """
    return await run(REQUESTS, ROUND)


async def run(requests: int, by: int) -> list[Figure]:
    """Run soak() with `requests`, and sample memory and owner after every `by` of them. Raises AssertionError if a request is
    open at the end, and RuntimeError if a request failed in a way that a client cannot retry."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(
            Path(folder),
            linked=False,
            router={"log_level": "error"},
            gateway={"log_level": "error", "token_cache_mb": CACHE_MB},
            emulate={"speedup": 1_000},
        )
        try:
            await fleet.start()
            began = time.monotonic()
            pids = {name: part.pid for name, part in fleet.parts.items() if name != "gateway"}
            pids |= {f"gateway-{at}": pid for at, pid in enumerate(fleet.gateway_processes())}
            mb: dict[str, list[float]] = {name: [] for name in pids}
            failures: Counter[str] = Counter()
            owners: Counter[str] = Counter()
            repeated = 0
            for number in range(requests // by):
                counts = await stack.load(fleet.ports["gateway"], True, requests=by, seed=number, **LOAD)
                failures.update(counts["failures"])
                repeated += counts["repeated"]
                owners[await fleet.owner()] += 1
                for name, pid in pids.items():
                    mb[name].append(stack.rss_mb(pid))
            took_s = time.monotonic() - began
            if wrong := {head: count for head, count in failures.items() if not head.startswith(TRY_AGAIN)}:
                raise RuntimeError(f"requests failed: {wrong}")
            await fleet.wait_until_idle()
        finally:
            await fleet.stop()
    kinds = ", ".join(f"{share:.0%} {kind}" for kind, share in MIX.items())
    what = f"{requests:,} requests ({kinds}), {requests / took_s:,.0f} a second, {dict(failures) or 'none'} failed"
    what += f", {repeated} sent again"
    looks = requests // by
    owned = {name: f"; the owner at {owners[name]} of {looks} samples" for name in ROUTERS}
    return [_figure(name, values, by, what + owned.get(name, "")) for name, values in sorted(mb.items())]


def _figure(name: str, mb: list[float], by: int, what: str) -> Figure:
    first = int(WARM_UP * len(mb))
    late = mb[first:]
    slope = linear_regression(range(len(late)), late).slope * 100_000 / by
    note = f"{mb[0]:.0f}, {late[0]:.0f}, {late[-1]:.0f} MB after {by:,}, {(first + 1) * by:,} and all of {what}; goal 0"
    return Figure(f"soak_growth_mb_100k_{name.replace('-', '_')}", slope, "MB", None, note)
