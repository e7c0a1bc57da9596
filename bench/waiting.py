"""CPU time of a router's state while WAITING long prompts are parked: an arrival, a refusal, a release, and lost gateways.

Part of `python -m bench stalls`. Each figure is the CPU time of whole events (RouterState.handle).
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator

from bench.figures import Figure
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, state

# WAITING: number of parked requests. TENANTS: of how many tenants. TOKENS: of their prompts.
WAITING, TENANTS, TOKENS = 16_000, 40, 131_072
BOUND_S = 600.0
GOAL_MS, GOAL_TURN_MS = 0.3, 20.0


def waiting() -> list[Figure]:
    """Return the median CPU time of each operation, and the longest turn after a gateway with all parked requests is lost."""
    router = _full()
    now = 10.0
    figures = []
    arrivals = [_prompt(WAITING + number, TENANTS + 1) for number in range(100)]
    figures.append(_median("arrival", (_timed(router, _asks(asked), now) for asked in arrivals)))
    releases = []
    for number in range(100):
        name = f"under-way-{number}"
        small = request(name, 64, session_id=name, tenant="busy")
        router.handle(_asks(small), now)
        releases.append(_timed(router, ev.Finished(name, "OK", output_tokens=1, finish_reason="TOOL_CALLS"), now))
    figures.append(_median("release", releases))
    # The prompts came every 0.1 ms, so about one bound passes between two turns.
    refusals = []
    for number in range(100):
        at = BOUND_S + 1e-4 * (number + 1)
        spent, effects = _spent(router, ev.RetryDue(), at)
        refused = sum(isinstance(effect, ev.Refused) for effect in effects)
        if refused:
            refusals.append(spent / refused)
    figures.append(_median("refusal", refusals))
    turns = list(_turns(router, ev.GatewayLost("g"), BOUND_S + 2.0))
    assert not len(router.parked_requests.queue)
    figures.append(Figure("waiting_lost_gateway_turn_ms", max(turns) * 1e3, "ms", GOAL_TURN_MS, _note("longest turn")))
    figures.append(Figure("waiting_lost_gateway_ms", sum(turns) * 1e3, "ms", note=_note("all turns together")))
    router = _full()
    turns = list(_turns(router, ev.PoolLost("m"), now))
    assert not len(router.parked_requests.queue)
    figures.append(Figure("waiting_lost_pool_turn_ms", max(turns) * 1e3, "ms", GOAL_TURN_MS, _note("longest turn")))
    return figures


def _full() -> RouterState:
    """Return the state of a router at which WAITING requests are parked, whose keys have all the memory that they need."""
    router = state(admission=AdmissionSettings(True, BOUND_S, BOUND_S, BOUND_S))
    router.requests.room.limit_keys(WAITING * TOKENS)
    join(router, "a", 1, kv_capacity_tokens=1_000_000)
    router.handle(_asks(request("busy", 1_000_000, session_id="busy", tenant="busy")), 0.0)
    router.admission.was_parked("m", 0.0)
    for number in range(WAITING):
        effects = router.handle(_asks(_prompt(number, number % TENANTS)), 1e-4 * number)
        assert any(isinstance(effect, ev.Parked) for effect in effects), effects
    gc.collect()
    gc.freeze()
    return router


def _prompt(number: int, tenant: int) -> PlacementRequest:
    first = (number + 1) << 32
    keys = array("Q", range(first, first + TOKENS // KEY_TOKENS))
    return request(f"r{number}", TOKENS, keys=keys, tenant=f"t{tenant}", session_id=f"s{number}", parkable=True)


def _asks(asked: PlacementRequest) -> ev.Event:
    return ev.PlaceRequested(asked, "g")


def _spent(router: RouterState, event: ev.Event, now: float) -> tuple[float, list[ev.Effect]]:
    began = time.process_time()
    effects = router.handle(event, now)
    return time.process_time() - began, effects


def _timed(router: RouterState, event: ev.Event, now: float) -> float:
    return _spent(router, event, now)[0]


def _turns(router: RouterState, event: ev.Event, now: float) -> Iterator[float]:
    """Yield the CPU time of `event`, and of each further turn until nothing is left to do."""
    yield _timed(router, event, now)
    while router.unfinished or len(router.parked_requests.queue):
        now += 0.001
        yield _timed(router, ev.GoOn() if router.unfinished else ev.RetryDue(), now)


def _median(what: str, times: Iterable[float]) -> Figure:
    return Figure(f"waiting_{what}_ms", statistics.median(times) * 1e3, "ms", GOAL_MS, _note("median"))


def _note(what: str) -> str:
    return f"CPU time, {what}; {WAITING:,} parked prompts of {TOKENS:,} tokens"
