"""A storm of 16,000 new sessions in virtual time: parked, admitted, refused and answered while an owner and a gateway die, Redis
fails over, and policies and admission are switched."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission import session_admission
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.parked_requests import ParkedRequests
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.router_state import RouterState
from tests.support.virtual.costs import AS_BUILT
from tests.support.virtual.faults import redis_down, redis_flaky
from tests.support.virtual.invariants import check_at_rest
from tests.support.virtual.loop import virtual_clocks
from tests.support.virtual.network import clock_offset_s
from tests.support.virtual.run import REST_S, START_S, Run, new_loop, watch
from tests.support.virtual.world import MODELS, NONE, World

SESSIONS, BOUND_S = 16_000, 20.0
# How often the policy is switched, and how long sessions are not admitted then, s.
SWITCH_S, OPEN_S = 10.0, 0.1
# Maximum time between a request's bound and its refusal: the pool may be without an owner just then.
SLACK_S = 5.0
# Time for the answer of a session that is let in at the last moment, s.
ANSWER_S = 30.0


def test_a_storm_of_sessions_outlives_its_owner_a_gateway_and_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session is answered or refused by its bound, with nothing lost; a client asks another gateway when its own dies."""
    monkeypatch.setattr(session_admission, "ARM_SHARE", 0.0)
    monkeypatch.setattr(session_admission, "ARM_SIZE", 0.1)
    monkeypatch.setattr(session_admission.AdmissionSettings, "bound_s", lambda settings, priority: BOUND_S)
    waited: list[float] = []
    at_bound = ParkedRequests._at_bound

    def noted(self: ParkedRequests, held: Any, now: float) -> Any:
        waited.append(now - held.asked_at)
        return at_bound(self, held, now)

    monkeypatch.setattr(ParkedRequests, "_at_bound", noted)
    let_in, classes = RequestTable.let_in, Counter[Priority]()

    def counted(self: RequestTable, request_id: str) -> None:
        held = self.room.parked.get(request_id)
        assert held is not None
        classes[held.request.priority] += 1
        let_in(self, request_id)

    monkeypatch.setattr(RequestTable, "let_in", counted)
    admits = [True]
    monkeypatch.setattr(RouterState, "_admits", lambda state, pool, now: admits[0])
    result, answers = Run(7), Counter[int]()
    parked: list[int] = []
    loop = new_loop()
    with virtual_clocks(loop, clock_offset_s):
        try:
            watch(loop, result, _storm(random.Random(7), answers, parked, admits))
        finally:
            loop.end()
    assert not result.failure
    assert answers.total() == SESSIONS
    assert answers.keys() == {200, 429}
    assert min(answers.values()) >= 20
    assert min(classes[priority] for priority in Priority) >= 20, classes
    # Most were parked at both owners of a pool, before and after the death of the first.
    assert min(parked) >= 0.7 * SESSIONS / len(MODELS), parked
    assert max(waited) <= BOUND_S + SLACK_S


async def _storm(rng: random.Random, answers: Counter[int], parked: list[int], admits: list[bool]) -> None:
    settings = {"max_requests_per_instance": 16}
    world = World(rng, AS_BUILT, "unified", router_settings=settings)
    world.check_each = 0
    loop = asyncio.get_running_loop()
    with world.running():
        await asyncio.sleep(START_S)
        switching = asyncio.create_task(_switch(world, admits))
        clients = [asyncio.create_task(_client(world, number)) for number in range(SESSIONS)]
        await asyncio.sleep(6.0)
        owner = next(node for node in world.routers.values() if node.router and node.router.state.owned.owns(MODELS[0]))
        assert owner.router is not None
        parked.append(owner.router.state.parked_requests.queue.count(MODELS[0]))
        owner.kill()
        await asyncio.sleep(4.0)
        parked.append(sum(router.state.parked_requests.queue.count(MODELS[0]) for router in world.live_routers()))
        owner.start()
        # Redis fails over: it does not answer, and then another one does, to whose clients a part of the replies is lost.
        redis_down(world, 2.0)
        redis_flaky(world, 4.0)
        world.gateways["g0"].kill()
        await asyncio.sleep(2.0)
        world.gateways["g0"].start()
        began = loop.time()
        for client in clients:
            answers[await client] += 1
        assert loop.time() - began <= 2 * BOUND_S + SLACK_S + ANSWER_S
        switching.cancel()
        await asyncio.sleep(REST_S)
        for router in world.live_routers():
            router.state.check_invariants()
            assert not len(router.state.parked_requests.queue)
        await check_at_rest(world, MODELS)


async def _switch(world: World, admits: list[bool]) -> None:
    """Set another policy every SWITCH_S, under which no session is admitted for the first OPEN_S."""
    for policy in itertools.cycle(("foresight", "lmetric", "unified")):
        await asyncio.sleep(SWITCH_S - OPEN_S)
        admits[0] = False
        for router in world.live_routers():
            router.submit(ev.PolicySet(make_policy(policy)))
        await asyncio.sleep(OPEN_S)
        admits[0] = True


async def _client(world: World, number: int) -> int:
    """Begin one session at a random moment; return the status of its answer. If its gateway dies, the other one is asked."""
    await asyncio.sleep(world.rng.uniform(0.0, 5.0))
    tokens = [world.rng.randrange(1_000) for _ in range(world.rng.randint(60, 120))]
    gateway = world.rng.choice(("g0", "g1"))
    while True:
        status = await world.gateways[gateway].begin_session(f"n{number}", MODELS[number % 2], tokens, 5)
        if status not in (NONE, 503):
            return status
        gateway = "g1" if gateway == "g0" else "g0"
        await asyncio.sleep(0.5)
