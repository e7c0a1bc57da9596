"""Memory of the gateway: with open streams, and its growth over 200,000 requests of all kinds."""

from __future__ import annotations

import asyncio

from bench import stack
from bench.figures import Figure
from bench.gateway import fleet, open_requests
from bench.load_client import MIX

OPEN = 1_000
MANY = 5_000
TOLD = 9_000
LONG_BYTES = 130_000
LONG_STREAMS = 100
WARM_UP = 60_000
REQUESTS = 200_000
ROUND = 20_000
# Size of the token cache, MB. The cache and the store of sessions are full long before the warm-up ends.
CACHE_MB = 16
PROMPTS = 10_000


async def memory() -> list[Figure]:
    """rss_mb_1000_streams, rss_mb_5000_streams, kb_per_long_stream, rss_mb_9000_told_streams."""
    stack.allow_files(2 * TOLD + 1_000)
    async with fleet(1_000.0) as (engines, model):
        async with stack.pointsman(engines, model) as (gateway, _):
            empty = stack.rss_mb(gateway.pids[0])
            async with stack.open_streams(gateway.port, OPEN):
                some = stack.rss_mb(gateway.pids[0])
            async with stack.open_streams(gateway.port, MANY):
                many = stack.rss_mb(gateway.pids[0])
        # Without the token cache, which is bounded and not part of a stream's memory.
        async with stack.pointsman(engines, model, "--token-cache-mb", "0") as (gateway, _):
            async with stack.open_streams(gateway.port, 1, LONG_BYTES):
                with_one_stream = stack.rss_mb(gateway.pids[0])
            async with stack.open_streams(gateway.port, LONG_STREAMS, LONG_BYTES, group=1):
                long = stack.rss_mb(gateway.pids[0])
    async with (
        fleet(5_000.0, "--tells") as (engines, model),
        stack.pointsman(engines, model, "--continue-mb", "1024") as (gateway, _),
        stack.open_streams(gateway.port, TOLD, group=1_000),
    ):
        continuable = stack.rss_mb(gateway.pids[0])

    def note(rss: float, streams: int) -> str:
        return (
            f"{streams} streams open on 1 KB prompts, {(rss - empty) / streams * 1e3:.1f} KB each over {empty:.0f} MB"
        )

    return [
        Figure("rss_mb_1000_streams", some, "MB", 120.0, f"{note(some, OPEN)}; baseline is the goal"),
        Figure("rss_mb_5000_streams", many, "MB", None, note(many, MANY)),
        Figure(
            "kb_per_long_stream",
            (long - with_one_stream) / (LONG_STREAMS - 1) * 1e3,
            "KB",
            None,
            f"{LONG_STREAMS} streams open on prompts of {LONG_BYTES // 1000} KB, the token cache left out",
        ),
        Figure(
            "rss_mb_9000_told_streams",
            continuable,
            "MB",
            None,
            f"{note(continuable, TOLD)}; their bodies and token ids are kept, so that other engines can go on with them",
        ),
    ]


async def growth() -> list[Figure]:
    """rss_growth_mb_200k. The longest benchmark that runs by default: three to four minutes on two cores."""
    mb: list[float] = []
    routers: list[float] = []
    cache = "--token-cache-mb", str(CACHE_MB)
    async with fleet(0.0) as (engines, model), stack.pointsman(engines, model, *cache) as (gateway, router):
        for number in range((WARM_UP + REQUESTS) // ROUND):
            what = {"chunks": 3, "prompt": 200, "prompts": PROMPTS, "mix": True, "seed": number}
            await stack.load(gateway.port, connections=64, requests=ROUND, **what)
            mb.append(stack.rss_mb(gateway.pids[0]))
            routers.append(stack.rss_mb(router.pids[0]))
        left = await asyncio.to_thread(open_requests, gateway.port)
    first = WARM_UP // ROUND - 1
    kinds = ", ".join(f"{share:.0%} {kind}" for kind, share in MIX.items())
    note = (
        f"over {REQUESTS:,} requests ({kinds}; {PROMPTS:,} prompts), after {WARM_UP:,} that led to {mb[first]:.0f} MB; "
        f"{left:.0f} open at the end; the router's own: {routers[-1] - routers[first]:+.0f}; goal 0"
    )
    return [Figure("rss_growth_mb_200k", mb[-1] - mb[first], "MB", None, note)]
