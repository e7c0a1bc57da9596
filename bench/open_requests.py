"""Memory of a router per open request: on a fleet of a thousand instances, and with many requests on few instances."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

from bench.figures import Figure
from bench.full_cache_fleet import PROMPT_TOKENS, filled
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.prefix.provisional_blocks import PROVISIONAL_S
from pointsman_router.core.router_state import RouterState

INSTANCES = 1_000
# Prompt tokens -> number of open requests. A long request takes 40 ms here, mostly because tracemalloc traces its 8,125 numbers.
OPEN = {1_024: 10_000, PROMPT_TOKENS: 1_000}
# Number of requests open in prefill. The router keeps a request's keys until its first token.
IN_PREFILL = 1_000
# Many open requests on few instances: the memory of a request must not grow with the number of others.
FEW_INSTANCES, OPEN_ON_FEW = 10, 5_000
GOAL_BYTES = 8_000.0


def open_request_bytes() -> list[Figure]:
    """open_request_bytes_1k and _130k of requests in decode, and open_prefill_bytes_* of requests in prefill; *_crowded: with
    many requests on each of few instances."""
    figures = []
    for tokens, count in OPEN.items():
        name, case = f"{tokens // 1_000}k", _case(tokens, INSTANCES)
        answered, prefill = _bytes_each(tokens, count, answered=True), _bytes_each(tokens, IN_PREFILL, answered=False)
        figures += [_in_decode(name, answered, count, case), _in_prefill(name, prefill, IN_PREFILL, case)]
    tokens = min(OPEN)
    crowded = {
        answered: _bytes_each(tokens, OPEN_ON_FEW, answered=answered, instances=FEW_INSTANCES)
        for answered in (True, False)
    }
    name, case = f"{tokens // 1_000}k_crowded", _case(tokens, FEW_INSTANCES)
    figures += [
        _in_decode(name, crowded[True], OPEN_ON_FEW, case),
        _in_prefill(name, crowded[False], OPEN_ON_FEW, case),
    ]
    return figures


def _case(tokens: int, instances: int) -> str:
    return f"{tokens:,}-token prompts ({tokens // KEY_TOKENS:,} keys) on {instances:,} instances"


def _in_decode(name: str, size: float, count: int, case: str) -> Figure:
    where = f"{count:,} open in decode, {case}; baseline is the goal"
    return Figure(f"open_request_bytes_{name}", size, "B", GOAL_BYTES, where)


def _in_prefill(name: str, size: float, count: int, case: str) -> Figure:
    return Figure(f"open_prefill_bytes_{name}", size, "B", None, f"{count:,} open in prefill, {case}")


def _bytes_each(tokens: int, count: int, *, answered: bool, instances: int = INSTANCES) -> float:
    """Return the growth of the router's state per request, in bytes, over `count` requests; bounded shared state is excluded."""
    state = filled(instances, [0], 16)
    rng = random.Random(1)
    now = 1.0
    state.handle(ev.GatewayHello("g"), now)
    # The first requests create state that all requests share: orders of loads, snapshots of instances, a mean.
    for number in range(2):
        _open(state, f"first{number}", tokens, rng, now)
        state.handle(ev.FirstToken(_id(f"first{number}")), now)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    # All requests are in prefill at once, so that the state of each could include all requests before it.
    for number in range(count):
        _open(state, f"r{number}", tokens, rng, now)
    for number in range(count if answered else 0):
        state.handle(ev.FirstToken(_id(f"r{number}")), now)
    # Provisional blocks are kept for a while, up to a bound; they must not count.
    now += 2 * PROVISIONAL_S
    state.handle(ev.Tick(), now)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(state.reservations) == count + 2
    return grown / count


def _id(name: str) -> str:
    return f"0f3c9a52-7d1e-4b68-9c40-{name}"


def _open(state: RouterState, name: str, tokens: int, rng: random.Random, now: float) -> None:
    keys = array("Q", rng.randbytes(tokens // KEY_TOKENS * 8))
    asked = PlacementRequest(_id(name), "m", tokens, keys, tenant="tenant", session_id=f"session-{name}")
    state.handle(ev.PlaceRequested(asked, "g"), now)
