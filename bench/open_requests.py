"""What a router keeps of an open request, on a fleet of a thousand instances."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

from bench.figures import Figure
from bench.full_cache_fleet import PROMPT_TOKENS, filled
from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.prefix.provisional_blocks import PROVISIONAL_S
from pointsman.router.core.router_state import RouterState
from pointsman.router.core.types import PlacementRequest

INSTANCES = 1_000
# Prompt tokens -> requests open. A long one takes 40 ms here, most of them to trace 8,125 numbers.
OPEN = {1_024: 10_000, PROMPT_TOKENS: 1_000}
# Until its first token a request's keys are kept.
IN_PREFILL = 1_000
GOAL_BYTES = 8_000.0


def open_request_bytes() -> list[Figure]:
    """open_request_bytes_1k and _130k, of requests that are answered, and open_prefill_bytes_* of those that are not yet."""
    figures = []
    for tokens, count in OPEN.items():
        answered, prefill = _bytes_each(tokens, count, answered=True), _bytes_each(tokens, IN_PREFILL, answered=False)
        case = f"{tokens:,}-token prompts ({tokens // KEY_TOKENS:,} keys) on {INSTANCES:,} instances"
        name = f"{tokens // 1_000}k"
        figures += [
            Figure(
                f"open_request_bytes_{name}",
                answered,
                "B",
                GOAL_BYTES,
                f"{count:,} open in decode, {case}; baseline is the goal",
            ),
            Figure(f"open_prefill_bytes_{name}", prefill, "B", None, f"{IN_PREFILL:,} open in prefill, {case}"),
        ]
    return figures


def _bytes_each(tokens: int, count: int, *, answered: bool) -> float:
    """Bytes that the state grows by with each of `count` requests, without what is bounded for all of them together."""
    state = filled(INSTANCES, [0], 16)
    rng = random.Random(1)
    now = 1.0
    state.handle(ev.GatewayHello("g"), now)
    # What grows once for all: orders of loads, snapshots of instances, a mean.
    for number in range(2):
        _open(state, f"first{number}", tokens, rng, now, answered=answered)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        _open(state, f"r{number}", tokens, rng, now, answered=answered)
    # What was just computed counts as cached for a while, up to a bound.
    now += 2 * PROVISIONAL_S
    state.handle(ev.Tick(), now)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(state.reservations) == count + 2
    return grown / count


def _open(state: RouterState, name: str, tokens: int, rng: random.Random, now: float, *, answered: bool) -> None:
    keys = array("Q", rng.randbytes(tokens // KEY_TOKENS * 8))
    asked = PlacementRequest(
        f"0f3c9a52-7d1e-4b68-9c40-{name}", "m", tokens, keys, tenant="tenant", session_id=f"session-{name}"
    )
    state.handle(ev.PlaceRequested(asked, "g"), now)
    if answered:
        state.handle(ev.FirstToken(asked.request_id), now)
